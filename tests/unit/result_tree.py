"""A complete results folder of an official-size run, made in seconds: real records and readers over
fabricated logs. Everything is as a submission needs it but TEST06, which no run makes yet.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fp8flow.code_hash import code_hash
from fp8flow.pipeline import BACKENDS, PROGRAMS
from fp8flow.records import Record, write_record
from fp8flow.runs import build_run_result
from fp8flow.source_copy import CHECKOUT
from fp8flow.spec import Spec
from fp8flow.system import stack_versions

ROWS = 13_368
TOKENS = 3
LIST_SHA256 = "4de1bc2bcf345ba8fc118788455dfaf2e09530fd9ed4daedf2b15661324ad9a7"
REVISION = "be673f326cab4cd22ccfef76109faf68e41aa5f1"
# Just above the accuracy gates.
SCORES = {"rouge1": 38.3915, "rouge2": 15.7485, "rougeL": 24.2508, "rougeLsum": 35.4351}
GEN_LEN = 7_350_880
MS = 1_000_000

SUBMISSION = {
    "submitter": "acme",
    "division": "closed",
    "benchmark": "llama3.1-8b",
    "round": "v6.1",
    "variant": "fp8",
    "attested": [],
}
# Rule of each shared record.
RULES = {"model": "fetch_model", "dataset": "prepare_dataset", "checkpoint": "quantize",
         "calibration": "prepare_calibration", "probe": "probe_server",
         "system": "describe_system"}  # fmt: skip
ENGINE = {"backend": "transformers", "serve": {"max_batch_size": 16}}
HARNESS = {
    "name": "loadgen",
    "max_output_tokens": 128,
    "min_output_tokens": 1,
    "max_connections": 64,
    "request_timeout_s": 600.0,
    "warmup_requests": 4,
}
SYSTEM_FIELDS = {
    "status": "available",
    "system_name": "One GPU server",
    "system_type": "datacenter",
    "system_type_detail": "",
    "number_of_nodes": "1",
    "host_processor_model_name": "CPU",
    "host_processors_per_node": "2",
    "host_processor_core_count": "48",
    "host_processor_frequency": "",
    "host_processor_caches": "",
    "host_processor_interconnect": "",
    "host_memory_capacity": "1024 GiB",
    "host_memory_configuration": "16x 64 GB DDR5 ECC",
    "host_storage_type": "NVMe SSD",
    "host_storage_capacity": "3.84 TB",
    "host_networking": "2x 100 Gb/s Ethernet",
    "host_network_card_count": "2",
    "host_networking_topology": "one switch",
    "accelerators_per_node": "1",
    "accelerator_model_name": "GPU",
    "accelerator_frequency": "",
    "accelerator_host_interconnect": "PCIe Gen5 x16",
    "accelerator_interconnect": "N/A",
    "accelerator_interconnect_topology": "",
    "accelerator_memory_capacity": "141 GB",
    "accelerator_memory_configuration": "HBM3e",
    "accelerator_on-chip_memories": "",
    "cooling": "air",
    "framework": "",
    "operating_system": "Linux",
    "other_software_stack": "driver",
    "hw_notes": "",
    "sw_notes": "",
}


def scenario_settings(scenario: str) -> dict[str, Any]:
    return {
        "target_qps": 20.0 if scenario == "Offline" else 21.8,
        "min_duration_ms": 600_000,
        "min_queries": None,
        "ttft_limit_ms": None,
        "tpot_limit_ms": None,
    }


def config(scenarios: tuple[str, ...]) -> dict[str, Any]:
    return {
        "model": {"source": "hub", "name": "llama3.1-8b"},
        "harness": HARNESS,
        "scenarios": {name: scenario_settings(name) for name in scenarios},
    }


@dataclass
class ResultTree:
    """Records of a results folder."""

    results: Path
    scenarios: tuple[str, ...]
    records: dict[str, Record] = field(default_factory=dict)

    def path(self, name: str) -> str:
        return str(self.records[name].path)

    def of(self, kind: str) -> list[str]:
        return [self.path(f"{name} {kind}") for name in self.scenarios]

    def runs(self) -> list[str]:
        return [*self.of("performance"), *self.of("accuracy")]

    @property
    def submission(self) -> Path:
        return self.results / "submission" / "manifest.json"

    def specs(self) -> dict[str, str]:
        settings = {"submission": SUBMISSION, "config": config(self.scenarios)}
        assemble = Spec("assemble_submission", settings)
        validate = Spec("validate_submission", {"submission": SUBMISSION})
        return {"assemble": assemble.canonical(), "validate": validate.canonical()}

    def assemble_arguments(self) -> list[str]:
        """Return the arguments of assemble_submission.py."""
        shared = [
            word
            for name in ("model", "dataset", "checkpoint", "probe", "system", "calibration")
            for word in (f"--{name}", self.path(name))
        ]
        measured = ["--runs", *self.runs(), "--accuracies", *self.of("scores")]
        spec = ["--spec", self.specs()["assemble"]]
        return [*spec, *shared, *measured, "--output", str(self.submission)]

    def validate_arguments(self) -> list[str]:
        """Return the arguments of validate_submission.py."""
        measured = ["--runs", *self.runs(), "--accuracies", *self.of("scores")]
        spec = ["--spec", self.specs()["validate"]]
        output = ["--output", str(self.submission.with_name("verdict.json"))]
        return [*spec, "--submission", str(self.submission), *measured, *output]


def effective_settings(scenario: str, mode: str, rows: int) -> dict[str, Any]:
    offline = scenario == "Offline"
    return {
        "scenario": "Offline" if offline else "Server",
        "test_mode": "PerformanceOnly" if mode == "performance" else "AccuracyOnly",
        "samples_per_query": rows if offline else 1,
        "target_latency_ns": 0,
        "min_duration_ms": 600_000,
        "min_query_count": 1 if offline else 100,
        "performance_sample_count": rows,
        "accuracy_sample_count": rows,
        "sample_concatenate_permutation": True,
        "qsl_rng_seed": 2085463073848966840,
        "sample_index_rng_seed": 2747215439041700203,
        "schedule_rng_seed": 16159082839903944936,
    }


def query_rows(scenario: str, rows: int) -> list[dict[str, Any]]:
    """Return queries that take 620 s in all, with TTFT 500 ms and TPOT 50 ms."""
    step = 620_000_000_000 // rows
    found = []
    for number in range(rows):
        issued = 0 if scenario == "Offline" else number * step
        first = number * step + 500 * MS
        found.append(
            {
                "id": number,
                "index": number,
                "scheduled_ns": issued,
                "issued_ns": issued,
                "first_token_ns": first,
                "done_ns": first + (TOKENS - 1) * 50 * MS,
                "input_tokens": 10,
                "output_tokens": TOKENS,
                "status": "ok",
                "finish_reason": "stop",
            }
        )
    return found


def loadgen_results(scenario: str, queries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return LoadGen's result keys of a valid performance run over these queries."""
    end_s = max(row["done_ns"] for row in queries) / 1e9
    count = len(queries)
    values: dict[str, Any] = {"result_validity": "VALID", "early_stopping_met": True}
    names = {"ttft": "first_token_99.00_percentile_latency_ns",
             "tpot": "time_per_output_token_99.00_percentile_ns"}  # fmt: skip
    if scenario == "Offline":
        values |= {
            "result_tokens_per_second": TOKENS * count / end_s,
            "result_samples_per_second": count / end_s,
        }
        return values
    return values | {
        "result_completed_tokens_per_second": TOKENS * count / end_s,
        "result_completed_samples_per_sec": (count - 1) / end_s,
        f"result_{names['ttft']}": 500 * MS,
        f"result_{names['tpot']}": 50 * MS,
    }


def write_detail_log(path: Path, values: Mapping[str, Any]) -> None:
    lines = (
        ":::MLLOG "
        + json.dumps({"key": k, "value": v, "metadata": {"is_error": False, "is_warning": False}})
        for k, v in values.items()
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_attempt(folder: Path, scenario: str, mode: str, rows: int) -> None:
    """Write the raw files of one run as LoadGen and its worker do."""
    folder.mkdir(parents=True)
    queries = query_rows(scenario, rows)
    pq.write_table(pa.Table.from_pylist(queries), folder / "queries.parquet")
    values: dict[str, Any] = {
        "loadgen_version": "6.0.17 @ d6147c7eb7",
        "qsl_reported_total_count": rows,
        "requested_use_token_latencies": True,
        "generated_query_count": 1 if scenario == "Offline" else rows,
        "generated_samples_per_query": rows if scenario == "Offline" else 1,
    }
    effective = effective_settings(scenario, mode, rows)
    values |= {f"effective_{key}": value for key, value in effective.items()}
    if mode == "performance":
        values |= loadgen_results(scenario, queries)
    values["power_end"] = "now"
    write_detail_log(folder / "mlperf_log_detail.txt", values)
    (folder / "mlperf_log_summary.txt").write_text("No errors encountered during test.\n")
    logged = [{"qsl_idx": n, "data": "0a000000" * TOKENS} for n in range(rows)]
    text = json.dumps(logged if mode == "accuracy" else [])
    (folder / "mlperf_log_accuracy.json").write_text(text)
    name = "Offline" if scenario == "Offline" else "Server"
    conf = f"*.{name}.target_qps = 20\n*.{name}.min_duration = 600000\n"
    (folder / "user.conf").write_text(conf)
    limits = {"Offline": None, "Server": [2000.0, 100.0], "Interactive": [500.0, 30.0]}
    outcome = {
        "reason": None,
        "scenario": scenario,
        "mode": mode,
        "counts": {
            "issued": rows,
            "completed": rows,
            "failed": 0,
            "empty": 0,
            "failures_by_kind": {},
            "first_failure": None,
        },
        "usage_mismatches": 0,
        "without_usage": 0,
        "shorter_than_minimum": 0,
        "client": {"cpu_s": 1.0, "wall_s": 620.0},
        "scheduled": "fabricated",
        "settings": {
            "source": "official",
            "why": "",
            "requested": {"min_duration_ms": 600_000, "limits_ms": limits[scenario]},
            "user_conf": conf,
            "max_output_tokens": 128,
            "min_output_tokens": 1,
            "request_fields": {"temperature": 0},
        },
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))


def run_code(mode: str) -> str:
    """Return the code hash of a run's rule, as the pipeline has it."""
    programs = (*PROGRAMS[f"run_{mode}"].scripts, *BACKENDS[ENGINE["backend"]].scripts)
    return code_hash(CHECKOUT / "workflow" / "scripts", programs)


def write_run(
    tree: ResultTree, scenario: str, mode: str, attempt: Path | None, rows: int
) -> Record:
    """Write run.json over a fabricated attempt, or over a copy of a real one."""
    path = tree.results / "fp8" / scenario / mode / "run.json"
    folder = path.parent / "attempts" / "1"
    if attempt is None:
        write_attempt(folder, scenario, mode, rows)
    else:
        shutil.copytree(attempt, folder)
    server = {"settings": {"prefix_reuse": False}, "prefix_reuse": False, "warmup_requests": 4}
    settings = scenario_settings(scenario)
    if mode == "accuracy":
        settings = {
            k: v for k, v in settings.items() if k not in ("min_duration_ms", "min_queries")
        }
    spec = Spec(
        f"run_{mode}",
        {
            "engine": ENGINE,
            "model": {"name": "llama3.1-8b"},
            "harness": HARNESS,
            "scenario": scenario,
            "scenario_settings": settings,
        },
        code=run_code(mode),
        tools={"transformers": "5", "mlcommons-loadgen": "6"},
    )
    inputs = {name: tree.records[name] for name in ("checkpoint", "dataset")}
    files = sorted(f"attempts/1/{p.name}" for p in folder.iterdir())
    result = build_run_result(folder, server=server)
    count = result["tokens"]["output_total"]
    counted = {"recount_mismatches": 0, "recount_total": count, "recount_expected": count}
    result["tokens"] |= counted
    return write_record(path, spec, result, inputs=inputs, files=files)


def write_scores(tree: ResultTree, scenario: str, rows: int, **changes: Any) -> Record:
    """Write accuracy.json and accuracy.txt of a scenario."""
    path = tree.results / "fp8" / scenario / "accuracy" / "accuracy.json"
    result: dict[str, Any] = {
        "scenario": scenario,
        "state": "complete",
        "reason": None,
        **SCORES,
        "gen_len": GEN_LEN,
        "gen_num": rows,
        "responses": {
            "expected": rows,
            "scored": rows,
            "missing": 0,
            "empty": 0,
            "duplicates": 0,
        },
        "client_check": {
            "compared": rows,
            "token_mismatches": 0,
            "text_mismatches": 0,
            "not_in_outputs": 0,
        },
    } | changes
    values = {name: f"{result[name]}" for name in SCORES}
    values |= {"gen_len": result["gen_len"], "gen_num": result["gen_num"]}
    path.with_name("accuracy.txt").write_text(f"{values}\n")
    inputs = {"run": tree.records[f"{scenario} accuracy"], "dataset": tree.records["dataset"],
              "model": tree.records["model"]}  # fmt: skip
    return write_record(path, Spec("score_accuracy"), result, inputs=inputs, files=["accuracy.txt"])


def model_result() -> dict[str, Any]:
    return {
        "source": "hub",
        "id": "meta-llama/Llama-3.1-8B-Instruct",
        "revision": REVISION,
        "architecture": "LlamaForCausalLM",
        "parameters": 8_030_261_248,
        "dtype": "bfloat16",
        "submittable": True,
        "notes": [],
    }


def dataset_result(rows: int) -> dict[str, Any]:
    return {
        "source": "hub",
        "hub_id": "abisee/cnn_dailymail",
        "revision": "3.0.0",
        "split": "validation",
        "file": None,
        "file_sha256": None,
        "rows": rows,
        "unique_ids": rows,
        "template": "reference",
        "template_sha256": "aa",
        "prompt_sha256": "bb",
        "starts_with_bos": True,
        "token_check": {"state": "not compared"},
        "is_official_size": rows == ROWS,
    }


def calibration_result() -> dict[str, Any]:
    return dataset_result(512) | {
        "split": "train",
        "unique_ids": 511,
        "ids_sha256": "cc",
        "token_ids_sha256": "dd",
        "list_sha256": LIST_SHA256,
        "list_rows": 1000,
        "official_list": True,
        "allowed_in_closed": True,
        "reason": "a part of the official calibration list, in list order",
        "max_length": 2048,
        "truncated_rows": 1,
        "tokens_cut": 10,
        "tokens_total": 400_000,
    }


def checkpoint_result() -> dict[str, Any]:
    spread = {"min": 0.001, "median": 0.002, "max": 0.003, "count": 224}
    total = {"weight_scale": spread, "input_scale": spread, "k_scale": None, "v_scale": None}
    return {
        "method": "fp8_static",
        "kv_cache": "fp8",
        "kv_scales": "cast",
        "quant_algo": "FP8",
        "exclude": ["lm_head"],
        "dtype": "bfloat16",
        "calibration": {"rows": 512, "batches": 64, "batch_size": 8, "batching": "equal length"},
        "modules": {"quantized_count": 224, "quantized": [], "unquantized": ["lm_head"]},
        "scales": {"total": total},
        "versions": {"nvidia-modelopt": "0.47.0"},
    }


def system_result() -> dict[str, Any]:
    return {
        "name": "gpu-server",
        "fields": SYSTEM_FIELDS,
        "origins": dict.fromkeys(SYSTEM_FIELDS, "config"),
        "not_detected": [],
        "ecc": {
            "host": {"on": True, "origin": "config"},
            "accelerators": {"on": True, "origin": "detected"},
        },
        "nics": [{"name": "eth0", "kind": "Ethernet", "speed_mbit": 100_000, "driver": "mlx5"}],
        "accelerators": [],
        "network_data_path": "PCIe from the card to host DRAM, PCIe to the GPU",
        "stack": stack_versions(),
    }


def _write_shared(tree: ResultTree, rows: int, changes: Mapping[str, Mapping[str, Any]]) -> None:
    quantization = {"method": "fp8_static", "kv_cache": "fp8", "kv_scales": "cast"}
    quantization |= {"exclude": ["lm_head"]}
    serving = {"engine": ENGINE, "model": {"name": "llama3.1-8b"}}
    products = (
        ("model", "model/manifest.json", model_result(), {}, ()),
        ("dataset", "data/validation/manifest.json", dataset_result(rows), {}, ("model",)),
        ("calibration", "data/calibration/manifest.json", calibration_result(), {}, ("model",)),
        (
            "checkpoint",
            "fp8/checkpoint/manifest.json",
            checkpoint_result(),
            {"quantization": quantization},
            ("model", "calibration"),
        ),
        (
            "probe",
            "fp8/server/probe.json",
            {
                "server": {"prefix_reuse": False},
                "reuse": {"prefix_reuse": False},
                "parity": {"mismatches": 0},
                "deterministic": True,
            },
            serving,
            ("checkpoint", "dataset"),
        ),
        ("system", "system/system.json", system_result(), {}, ()),
    )
    for name, path, result, settings, needs in products:
        target = tree.results / path
        target.parent.mkdir(parents=True, exist_ok=True)
        inputs = {need: tree.records[need] for need in needs}
        result |= changes.get(name, {})
        tree.records[name] = write_record(
            target, Spec(RULES[name], settings), result, inputs=inputs
        )


def make_results(
    results: Path,
    *,
    scenarios: tuple[str, ...] = ("Offline", "Server"),
    rows: int = ROWS,
    attempts: Mapping[tuple[str, str], Path] | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> ResultTree:
    """Write a results folder up to scores and system description.

    Args:
        results: the folder.
        scenarios: scenarios to write.
        rows: samples of the evaluation set, all issued once.
        attempts: real attempt folders by scenario and mode, instead of fabricated ones.
        changes: changed keys of the results of shared records, by name.
    """
    tree = ResultTree(results, scenarios)
    _write_shared(tree, rows, changes or {})
    for scenario in scenarios:
        for mode in ("performance", "accuracy"):
            attempt = (attempts or {}).get((scenario, mode))
            tree.records[f"{scenario} {mode}"] = write_run(tree, scenario, mode, attempt, rows)
        tree.records[f"{scenario} scores"] = write_scores(tree, scenario, rows)
    return tree
