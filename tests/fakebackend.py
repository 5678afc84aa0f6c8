"""A backend that serves with tests/fakeserver.py, and real load jobs on it.

As a program it is run_performance, run_accuracy or probe_server on the fake server::

    python tests/fakebackend.py performance --fake '{"ttft_ms": 5}' --spec @spec.json ...
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import fakeserver
from fp8flow.backends import PageKind, Place, Served
from fp8flow.load_job import Task, add_load_arguments, run_load_job
from fp8flow.probe import run_probe
from fp8flow.records import build_product
from fp8flow.spec import Spec
from loadgen_runs import write_dataset

ROOT = Path(__file__).resolve().parents[1]


class FakeBackend:
    """Serves with the fake server; ``options`` are its options.

    Args:
        says_reuse: what its settings say of prefix_reuse, whatever the server does.
        readings: what its settings say in addition, the first time they are read, the second
            time, and so on; the last one holds from then on.
        told: what the server was told (``Backend.asked``).
        files: what the server reads (``Backend.serve_files``).
        by_server: options of single servers, in the order of their start, which win.
    """

    name = "fake"
    uses_gpu = False
    starts_server = True
    streams_token_ids = True
    reports_prefix_reuse = True
    pages: Mapping[str, PageKind] = {"/fp8flow/settings": "json"}

    def __init__(
        self,
        says_reuse: object = None,
        readings: Sequence[Mapping[str, Any]] = (),
        told: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        by_server: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> None:
        self.says_reuse = says_reuse
        self.readings = list(readings)
        self.told = dict(told or {})
        self.files = dict(files or {})
        self.by_server = list(by_server)
        self.options = options

    def serve_files(self, engine: Mapping[str, Any], served: Served) -> dict[str, str]:
        return self.files

    def serve_command(self, engine: Mapping[str, Any], served: Served, place: Place) -> list[str]:
        own = self.by_server.pop(0) if self.by_server else {}
        options = {**self.options, **own}
        return fakeserver.command(
            host=place.host, port=place.port, model=place.model_name, **options
        )

    def serve_environment(self, engine: Mapping[str, Any], threads: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(threads), **engine.get("environment", {})}

    def request_fields(self, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        return {"return_token_ids": True}

    def asked(self, engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
        return self.told

    def parse_settings(self, pages: Mapping[str, Any], log: str) -> dict[str, Any]:
        found = dict(pages["/fp8flow/settings"])
        assert "fakeserver: listening on" in log or not self.starts_server
        if self.readings:
            found |= self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if self.says_reuse is not None:
            found["prefix_reuse"] = self.says_reuse
        if self.says_reuse == "nothing":
            del found["prefix_reuse"]
        return found


class FakeExternal(FakeBackend):
    """A fake server that somebody else runs."""

    starts_server = False
    reports_prefix_reuse = False


def make_inputs(folder: Path, rows: int = 32, length: int = 20) -> tuple[Path, Path]:
    """Write a checkpoint and an evaluation set as products; return their manifests."""
    checkpoint = folder / "fp8" / "checkpoint" / "manifest.json"
    with build_product(checkpoint, Spec("quantize")) as product:
        (product.folder / "config.json").write_text("{}")
        write_tokenizer(product.folder / "tokenizer.json")
    dataset = folder / "data" / "validation" / "manifest.json"
    with build_product(dataset, Spec("prepare_dataset")) as product:
        write_dataset(product.folder / "samples.parquet", rows, length)
    assert pq.ParquetFile(dataset.parent / "samples.parquet").metadata.num_rows == rows
    return checkpoint, dataset


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer that splits the fake server's words as it made them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = range(fakeserver.FIRST_WORD_ID, fakeserver.FIRST_WORD_ID + fakeserver.VOCABULARY)
    vocabulary = {f"w{i}": i for i in words} | {"<unk>": 0}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path))


def make_spec(
    mode: str = "performance",
    scenario: str = "Offline",
    engine: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Spec:
    """Return the spec of a small run.

    Args:
        mode: performance, accuracy or probe.
        scenario: Offline or Server.
        engine: keys of the section ``engine`` in addition.
        changes: keys of the scenario and the harness.
    """
    harness = {
        "name": "loadgen",
        "max_output_tokens": 16,
        "min_output_tokens": 1,
        "max_connections": 16,
        "request_timeout_s": 30.0,
        "warmup_requests": 3,
    }
    settings = {
        "target_qps": 50.0,
        "min_duration_ms": 200,
        "min_queries": None,
        "ttft_limit_ms": None,
        "tpot_limit_ms": None,
    }
    for key, value in changes.items():
        (harness if key in harness else settings)[key] = value
    if mode == "accuracy":
        del settings["min_duration_ms"], settings["min_queries"]
    section = {"backend": "fake", "serve": {}, **(engine or {})}
    shared = {"engine": section, "model": {"name": "fake"}}
    if mode == "probe":
        return Spec("probe_server", shared)
    return Spec(
        f"run_{mode}",
        shared | {"harness": harness, "scenario": scenario, "scenario_settings": settings},
    )


def start_job(
    folder: Path, mode: str = "performance", fake: Mapping[str, Any] | None = None, **changes: Any
) -> subprocess.Popen[str]:
    """Start a load job in a process of its own, in a session of its own."""
    checkpoint, dataset = folder / "fp8/checkpoint/manifest.json", folder / "data/validation"
    if not checkpoint.exists():
        make_inputs(folder)
    spec = folder / "spec.json"
    spec.write_text(make_spec(mode, **changes).canonical())
    grace = ["--ready-timeout-s", "20", "--stop-grace-s", "2"]
    path = [str(ROOT / "workflow" / "scripts"), str(ROOT / "tests")]
    command = [sys.executable, __file__, mode, "--fake", json.dumps(dict(fake or {}))]
    command += ["--spec", f"@{spec}", "--checkpoint", str(checkpoint), *grace]
    command += ["--dataset", str(dataset / "manifest.json"), "--log", str(folder / "job.log")]
    command += ["--output", str(folder / "run" / "run.json")]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )


def main(argv: list[str]) -> int:
    """Run one job."""
    from fp8flow.cli import script_main

    mode = argv.pop(0)

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_load_arguments(parser)
        parser.add_argument("--fake", type=json.loads, default={})

    def run(args: argparse.Namespace, spec: Spec) -> None:
        task = Task.of(args, spec, FakeBackend(**args.fake))
        if mode == "probe":
            run_probe(task)
        else:
            run_load_job(task, mode)

    return script_main(__doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
