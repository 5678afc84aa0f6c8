"""What a load job works on: the verified checkpoint and data set, and prompts for the warm-up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.backends import Served
from fp8flow.errors import FlowError
from fp8flow.records import Record, verify_record

SAMPLES = "samples.parquet"
_WARM_UP_SEED = 20_260_401

Prompts = Sequence[Any]  # of int32 arrays; NumPy is not imported at import


@dataclass
class Workload:
    """What is served and asked: the verified inputs of a job.

    ``prompts`` are the token ids of all samples, int32 arrays in index order.
    """

    checkpoint: Record
    dataset: Record
    model_name: str
    prompts: Prompts
    engine: Record | None = None

    @property
    def served(self) -> Served:
        """What a server loads, by the checkpoint's own record."""
        result, root = self.checkpoint.result, self.checkpoint.root
        apart = result.get("format") == "tensorrt_llm"
        return Served(
            checkpoint=root,
            tokenizer=root / "tokenizer" if apart else root,
            quant_algo=result.get("quant_algo"),
            kv_cache=result.get("kv_cache") or "auto",
            engine=None if self.engine is None else self.engine.root,
        )

    @property
    def samples(self) -> Path:
        """The evaluation set's file."""
        return self.dataset.root / SAMPLES

    @property
    def inputs(self) -> dict[str, Record]:
        """The records, for the record of the run."""
        found = {"checkpoint": self.checkpoint, "dataset": self.dataset}
        return found if self.engine is None else {**found, "engine": self.engine}


def read_workload(
    checkpoint: Path, dataset: Path, model_name: str, engine: Path | None = None
) -> Workload:
    """Verify and read what a job works on.

    Args:
        checkpoint: manifest.json of the checkpoint.
        dataset: manifest.json of the evaluation set.
        model_name: the name that the server gives the model.
        engine: manifest.json of the TensorRT engine, if one is served.

    Raises:
        FlowError: if an input is missing, was changed after it was made, or has no samples.
    """
    import pyarrow.parquet as pq

    records = verify_record(checkpoint), verify_record(dataset)
    samples = dataset.parent / SAMPLES
    column = pq.read_table(samples, columns=["token_ids"])["token_ids"].combine_chunks()
    if not len(column):
        raise FlowError(f"{samples} has no samples")
    # Views into one buffer: lists of Python integers would take ten times the memory.
    flat = column.flatten().to_numpy().astype("int32", copy=False)
    offsets = column.offsets.to_numpy() - column.offsets[0].as_py()
    prompts = [flat[a:b] for a, b in itertools.pairwise(offsets)]
    built = None if engine is None else verify_record(engine)
    return Workload(*records, model_name, prompts, built)


def warm_up_prompts(prompts: Prompts, count: int) -> Prompts:
    """Return ``count`` different prompts that are not in the set, of lengths as in the set.

    They are made of ids that occur in the set, so every vocabulary has them.
    """
    import numpy as np

    generator = np.random.default_rng(_WARM_UP_SEED)
    vocabulary = np.unique(np.concatenate(prompts))
    known = {prompt.tobytes() for prompt in prompts}
    made: list[Any] = []
    extra = 0
    while len(made) < count:
        length = len(prompts[int(generator.integers(len(prompts)))]) + extra
        prompt = generator.choice(vocabulary, length)
        if prompt.tobytes() in known:
            extra += 1  # a tiny set may have no other prompt of its own lengths
            continue
        known.add(prompt.tobytes())
        made.append(prompt)
    return made
