"""Ranges of activations over the calibration set: no padding, and no waiting for the device.

ModelOpt's own collection looks at every value on the host, three times for each quantizer and
forward pass, and measures the unchanging weights again in each. On a GPU that takes longer than
the model does. Here the largest magnitudes stay on the device and are read once, at the end; the
numbers are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.log import progress

Batch = list[list[int]]
INPUTS = ("input_quantizer",)
KV_CACHE = ("k_bmm_quantizer", "v_bmm_quantizer")
# Beyond it, the attention between rows that must not see each other costs more than it saves.
PACKED_TOKENS = 4096


def read_token_rows(path: Path) -> list[list[int]]:
    """Return the column ``token_ids`` of a samples.parquet.

    Raises:
        FlowError: if the file cannot be read or has no such column.
    """
    import pyarrow.parquet as pq

    try:
        rows: list[list[int]] = pq.read_table(path, columns=["token_ids"])["token_ids"].to_pylist()
    except (OSError, KeyError, ValueError) as error:
        raise FlowError(
            f"cannot read the calibration samples {path}: {error}; run prepare_calibration again"
        ) from error
    return rows


def check_rows(rows: Sequence[Sequence[int]]) -> None:
    """Check that there is something to calibrate with.

    Raises:
        FlowError: if there are no rows, or one is empty.
    """
    if not rows or not all(rows):
        raise FlowError(
            "the calibration set has no rows or an empty one; check calibration.source and samples"
        )


def equal_length_batches(rows: Sequence[Sequence[int]], batch_size: int) -> list[Batch]:
    """Return batches of rows of one length, shortest first, in their order within a length.

    A static scale is the largest activation ever seen, and padding is seen too: attention masks
    keep padding out of the other tokens' results, but not out of the statistics of the linear
    layers, which run on every position. Batches without padding are exact and need no support
    from the model.

    Raises:
        FlowError: if there are no rows, or one is empty.
    """
    check_rows(rows)
    by_length: dict[int, Batch] = defaultdict(list)
    for row in rows:
        by_length[len(row)].append(list(row))
    return [
        group[start : start + batch_size]
        for _, group in sorted(by_length.items())
        for start in range(0, len(group), batch_size)
    ]


def packed_batches(
    rows: Sequence[Sequence[int]], batch_size: int, most_tokens: int = PACKED_TOKENS
) -> list[Batch]:
    """Return batches of rows to be laid one after another in one sequence, in their order.

    A GPU works through one row of a few hundred tokens faster than it is told to; several rows in
    one pass keep it busy, still without padding.

    Args:
        rows: token ids.
        batch_size: most rows in a batch.
        most_tokens: most tokens in a batch; a longer row is a batch of its own.

    Raises:
        FlowError: if there are no rows, or one is empty.
    """
    check_rows(rows)
    batches: list[Batch] = []
    room = 0
    for row in rows:
        if not batches or len(row) > room or len(batches[-1]) == batch_size:
            batches.append([])
            room = most_tokens
        batches[-1].append(list(row))
        room -= len(row)
    return batches


def can_pack(model: Any) -> bool:
    """Return whether one mask for all layers says who sees whom, so that rows can be packed."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = getattr(config, "sliding_window", None) is None and kinds == {"full_attention"}
    return plain and getattr(config, "_attn_implementation", None) in ("sdpa", "eager")


def batch_inputs(batch: Batch, device: Any, dtype: Any) -> dict[str, Any]:
    """Return the model's arguments for a batch.

    Rows of one length are stacked. Others are laid one after another, each with positions from 0
    and a mask (0 or the lowest number of ``dtype``) that keeps it from seeing the others.
    """
    import torch

    lengths = [len(row) for row in batch]
    if len(set(lengths)) == 1:
        return {"input_ids": torch.tensor(batch, device=device)}
    owner = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(lengths)).to(device)
    seen = (owner[:, None] == owner[None, :]).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    mask.masked_fill_(~seen, torch.finfo(dtype).min)
    return {
        "input_ids": torch.tensor([[token for row in batch for token in row]], device=device),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "attention_mask": mask[None, None],
    }


class _Watch:
    """Quantizers whose input is measured, and the weights' that have been measured."""

    def __init__(self, model: Any, kinds: Sequence[str]) -> None:
        from modelopt.torch.quantization.nn import TensorQuantizer

        self.watched: dict[str, Any] = {}
        self.weights: list[Any] = []
        self.largest: dict[str, Any] = {}
        for name, module in model.named_modules():
            if not isinstance(module, TensorQuantizer) or not module.is_enabled:
                continue
            leaf = name.rpartition(".")[2]
            if leaf == "weight_quantizer":
                self.weights.append(module)
                continue
            module.disable_calib()
            if leaf in kinds:
                self.watched[name] = module

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Measure what comes in, for the time of the block."""
        handles = [
            module.register_forward_pre_hook(self._hook(name))
            for name, module in self.watched.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        import torch

        def measure(_module: Any, arguments: tuple[Any, ...]) -> None:
            amax = arguments[0].detach().abs().amax()
            before = self.largest.get(name)
            self.largest[name] = amax if before is None else torch.maximum(before, amax)

        return measure

    def weights_are_known(self) -> None:
        """Keep ModelOpt from measuring the weights again."""
        for module in self.weights:
            module.disable_calib()

    def store(self) -> None:
        """Give each quantizer its largest magnitude.

        Raises:
            FlowError: if one saw nothing, or something that is no finite number.
        """
        import torch

        if unseen := sorted(set(self.watched) - set(self.largest)):
            raise FlowError(
                f"the calibration set never reached {len(unseen)} quantizers, such as {unseen[0]}; "
                "exclude those modules, or take more samples"
            )
        names = list(self.largest)
        values = torch.stack([self.largest[name].float() for name in names]).cpu().tolist()
        bad = [name for name, value in zip(names, values, strict=True) if not 0 < value < torch.inf]
        if bad:
            raise FlowError(
                f"{len(bad)} activations are zero, infinite or NaN on the calibration set, such as "
                f"those of {bad[0]}; check the model's weights and the samples"
            )
        for name, module in self.watched.items():
            module.amax = self.largest[name].clone()


def measure_ranges(model: Any, part: Any, batches: Sequence[Batch], kinds: Sequence[str]) -> None:
    """Measure the largest magnitudes of activations and give them to ModelOpt's quantizers.

    To be called as ModelOpt's forward loop, which collects the weights' statistics itself.

    Args:
        model: the model with its quantizers in calibration.
        part: the model or the part of it that is run.
        batches: token ids; see :func:`batch_inputs`.
        kinds: last parts of the names of the quantizers to measure.

    Raises:
        FlowError: if a quantizer saw nothing, or something that is no finite number.
    """
    import torch

    watch = _Watch(model, kinds)
    with torch.inference_mode(), watch.hooked():
        for number, batch in enumerate(progress(batches, "calibration", unit="batch")):
            part(**batch_inputs(batch, part.device, part.dtype), use_cache=False)
            if number == 0:
                watch.weights_are_known()
    watch.store()
