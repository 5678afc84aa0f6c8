"""Real LoadGen runs against the fake server: a data set, a worker, its attempt folder."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import fakeserver

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
WORKER = SCRIPTS / "loadgen_worker.py"


def write_dataset(path: Path, rows: int = 32, length: int = 20) -> Path:
    """Write samples.parquet with random prompts."""
    rng = random.Random(7)
    prompts = [[rng.randrange(1, 30_000) for _ in range(length)] for _ in range(rows)]
    table = pa.table(
        {
            "index": pa.array(range(rows), pa.int64()),
            "id": [f"article-{i}" for i in range(rows)],
            "token_ids": pa.array(prompts, pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, path)
    return path


def write_job(folder: Path, base_url: str, rows: int = 32, **job: Any) -> Path:
    """Write a demo-sized job.json, its data set beside it; ``folder / "1"`` is the attempt."""
    content = {
        "dataset": str(write_dataset(folder / "samples.parquet", rows)),
        "base_urls": [base_url],
        "model": "fake",
        "scenario": "Offline",
        "mode": "performance",
        "target_qps": 100.0,
        "min_duration_ms": 100,
        "max_output_tokens": 16,
        "max_connections": 16,
        "output_dir": str(folder / "1"),
        "progress_interval_s": 0.2,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(content | job), encoding="utf-8")
    return path


def run_changed(job: Path, change: str) -> dict[str, Any]:
    """Run a job in a process of its own after ``change``, code that puts a fault into LoadGenRun.

    Names at hand: ``Run`` (LoadGenRun) and the modules ``client``, ``loadgen``, ``loadgen_output``.
    """
    code = f"""
import os
from pathlib import Path
from fp8flow import client, loadgen, loadgen_output
Run = loadgen.LoadGenRun
{change}
loadgen.run_job(loadgen.LoadJob.read(Path({str(job)!r})))
os._exit(0)  # a run that was given up leaves LoadGen's thread behind
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        check=True,
        timeout=60,
    )
    outcome: dict[str, Any] = json.loads((job.parent / "1" / "outcome.json").read_text("utf-8"))
    return outcome


def start_worker(job: Path) -> subprocess.Popen[str]:
    """Start the worker on a job."""
    return subprocess.Popen(
        [sys.executable, str(WORKER), "--job", str(job)],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        stderr=subprocess.PIPE,
        text=True,
    )


def run_worker(
    folder: Path, server: dict[str, Any], rows: int = 32, **job: Any
) -> tuple[int, dict[str, Any] | None, str]:
    """Run one job against a fake server; return exit status, outcome.json and stderr."""
    with fakeserver.running(**server) as running:
        process = start_worker(write_job(folder, running.base_url, rows, **job))
        _, stderr = process.communicate(timeout=120)
    outcome = folder / "1" / "outcome.json"
    found = json.loads(outcome.read_text(encoding="utf-8")) if outcome.exists() else None
    return process.returncode, found, stderr
