"""run.json results: from real runs, and from rows whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fakeserver
import loadgen_runs
from fp8flow import runs
from fp8flow.errors import FlowError
from fp8flow.loadgen_log import DetailLog
from fp8flow.runs import build_run_result
from fp8flow.spec import canonical_json

KEYS = {
    "harness",
    "scenario",
    "mode",
    "state",
    "reason",
    "attempt",
    "counts",
    "duration_s",
    "min_duration_s",
    "throughput",
    "measured_from",
    "measured_from_reason",
    "latency_ns",
    "tokens",
    "settings",
    "loadgen",
    "limits_ns",
    "client",
    "server",
    "workload",
}


def row(**changes: Any) -> dict[str, Any]:
    base = {
        "index": 0,
        "scheduled_ns": 1_000,
        "issued_ns": 1_500,
        "sent_ns": 1_600,
        "first_token_ns": 11_000,
        "done_ns": 31_000,
        "input_tokens": 7,
        "output_tokens": 5,
        "status": "ok",
        "finish_reason": "stop",
    }
    return base | changes


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
@pytest.mark.parametrize("mode", ["performance", "accuracy"])
def test_real_run(tmp_path: Path, scenario: str, mode: str) -> None:
    loadgen_runs.run_worker(tmp_path, {"ttft_ms": 5, "tpot_ms": 1}, scenario=scenario, mode=mode)
    result = build_run_result(
        tmp_path / "1", server={"prefix_reuse": False}, workload={"dataset_digest": "d"}
    )
    assert result.keys() >= KEYS
    assert (result["state"], result["reason"]) == ("complete", None)
    assert result["disagreements"] == []
    assert result["attempt"] == 1
    assert result["server"] == {"prefix_reuse": False}
    assert result["workload"] == {"dataset_digest": "d"}
    throughput = result["throughput"]
    assert throughput["tokens_per_sample"] == 16
    assert throughput["output_tokens_per_s"] == pytest.approx(16 * throughput["samples_per_s"])
    assert throughput["samples_per_s"] == pytest.approx(32 / result["duration_s"])
    for name in ("ttft", "tpot", "latency"):
        block = result["latency_ns"][name]
        assert block["min"] <= block["p50"] <= block["p99"] <= block["p99.9"] <= block["max"]
        assert block["early_stopping_p99"] is None  # 32 queries are too few
        assert block["from"] == "scheduled"
    assert result["measured_from"] == "scheduled"
    assert result["measured_from_reason"] == result["scheduled"] != ""
    assert result["min_duration_s"] == (None if mode == "accuracy" else 0.1)
    asked = None if mode == "accuracy" else 100
    assert result["settings"]["asked_for"]["min_duration_ms"] == asked
    assert result["settings"]["requested"]["min_duration_ms"] == asked
    key = {"Offline": "tokens_per_second", "Server": "completed_tokens_per_second"}[scenario]
    assert throughput["loadgen_field"] == f"result_{key}"
    assert throughput["loadgen_tokens_per_s"] == result["loadgen"]["result"].get(key)
    assert (throughput["loadgen_tokens_per_s"] is None) == (mode == "accuracy")
    assert result["latency_ns"]["ttft"]["min"] >= 5e6
    assert result["tokens"]["input_total"] == 32 * 20
    assert result["tokens"]["output_total"] == 32 * 16
    assert result["tokens"]["finish_reasons"] == {"length": 32}
    seed = result["settings"]["effective"]["schedule_rng_seed"]
    assert seed == "16159082839903944936"
    assert result["limits_ns"] == (
        None if scenario == "Offline" else {"ttft": 2_000_000_000, "tpot": 100_000_000}
    )
    canonical_json(result)  # strict JSON: no NaN


def test_loadgens_statistics_are_used_and_agree_with_ours(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {"ttft_ms": 5, "tpot_ms": 1}, scenario="Server")
    result = build_run_result(tmp_path / "1")
    logged = result["loadgen"]["result"]
    ttft = result["latency_ns"]["ttft"]
    assert ttft["source"] == "loadgen"
    assert ttft["p99"] == logged["first_token_99.00_percentile_latency_ns"]
    rows = pq.read_table(tmp_path / "1" / "queries.parquet").to_pylist()
    own = runs.summarise(runs.latencies(rows).ttft, "scheduled")
    assert own is not None
    assert own["mean"] == pytest.approx(ttft["mean"], abs=1e6)
    assert (
        result["latency_ns"]["tpot"]["p50"] == logged["time_per_output_token_50.00_percentile_ns"]
    )


def test_source_and_origin_are_told_of_each_statistic() -> None:
    log = DetailLog(
        values={
            "result_first_token_mean_latency_ns": 10,
            "result_first_token_99.00_percentile_latency_ns": 12,
        }
    )
    series = runs.Series(ttft=[10], measured_from="issued")
    block = runs._latency_block(series, log, [])["ttft"]
    assert block is not None
    assert (block["p99"], block["source"], block["from"]) == (12, "loadgen", "scheduled")
    assert block["sources"]["p99"] == block["sources"]["mean"] == "loadgen"
    assert block["origins"]["p99"] == "scheduled"
    for name in ("p50", "early_stopping_p99", "count"):
        assert (block["sources"][name], block["origins"][name]) == ("queries", "issued")
    named = block.keys() - {"from", "source", "sources", "origins"}
    assert block["sources"].keys() == block["origins"].keys() == named


def test_source_is_that_of_p99() -> None:
    log = DetailLog(values={"result_first_token_mean_latency_ns": 10})
    block = runs._latency_block(runs.Series(ttft=[10], measured_from="issued"), log, [])["ttft"]
    assert block is not None
    assert (block["source"], block["from"]) == ("queries", "issued")
    assert block["sources"]["mean"] == "loadgen"


def test_unknown_schedule_is_told_with_its_reason(tmp_path: Path) -> None:
    with fakeserver.running() as server:
        job = loadgen_runs.write_job(tmp_path, server.base_url, scenario="Server")
        loadgen_runs.run_changed(job, "loadgen_output.scheduled_ns = lambda *_: (None, 'no seed')")
    result = build_run_result(tmp_path / "1")
    assert (result["measured_from"], result["measured_from_reason"]) == ("issued", "no seed")
    ttft = result["latency_ns"]["ttft"]
    assert ttft["origins"]["early_stopping_p99"] == "issued"
    assert (ttft["from"], ttft["source"]) == ("scheduled", "loadgen")


def test_failed_run_counts_no_throughput_from_failures(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {"fail_rate": 0.4, "seed": 2}, scenario="Server")
    result = build_run_result(tmp_path / "1")
    counts = result["counts"]
    assert result["state"] == "failed"
    assert "http_500" in result["reason"]
    assert counts["failed"] > 0
    assert result["tokens"]["output_total"] == counts["completed"] * 16
    assert result["latency_ns"]["ttft"]["count"] == counts["completed"]
    assert result["latency_ns"]["ttft"]["source"] == "queries"


def test_run_without_any_answer_has_nulls_not_numbers(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {"fail_rate": 1.0})
    result = build_run_result(tmp_path / "1")
    assert result["state"] == "failed"
    assert result["duration_s"] is None
    assert result["throughput"]["output_tokens_per_s"] is None
    assert result["latency_ns"] == {"ttft": None, "tpot": None, "latency": None}
    assert result["tokens"]["output_mean"] is None
    assert result["throughput"]["loadgen_tokens_per_s"] is None


def test_one_token_answers_are_reported(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {"empty_text": True}, scenario="Server")
    result = build_run_result(tmp_path / "1")
    assert result["counts"]["empty"] == 32
    assert any("Number of tokens" in error for error in result["loadgen"]["errors"])
    assert any("tokens_per_second" in text for text in result["disagreements"])


def test_no_outcome_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"outcome\.json is missing"):
        build_run_result(tmp_path)


@pytest.mark.parametrize("mode", ["performance", "accuracy"])
def test_tampered_attempts_are_noticed(tmp_path: Path, mode: str) -> None:
    loadgen_runs.run_worker(tmp_path, {}, mode=mode)
    attempt = tmp_path / "1"
    rows = pq.read_table(attempt / "queries.parquet")
    pq.write_table(rows.slice(0, 31), attempt / "queries.parquet")
    result = build_run_result(attempt)
    assert result["state"] == "failed"
    assert "queries.parquet has 31 rows for 32 queries" in result["reason"]


def test_lost_answer_in_the_accuracy_log_is_noticed(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {}, mode="accuracy")
    path = tmp_path / "1" / "mlperf_log_accuracy.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps([*entries[:-1], entries[0]]), encoding="utf-8")
    result = build_run_result(tmp_path / "1")
    assert result["state"] == "failed"
    assert "exactly once" in result["reason"]


def test_truncated_log_fails_the_run(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {})
    log = tmp_path / "1" / "mlperf_log_detail.txt"
    text = log.read_text(encoding="utf-8")
    log.write_text(text[: text.index("result_validity")], encoding="utf-8")
    result = build_run_result(tmp_path / "1")
    assert result["state"] == "failed"
    assert "ends before its results" in result["reason"]
    assert result["loadgen"]["valid"] is None


def test_throughput_that_loadgen_does_not_confirm_is_listed(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {"ttft_ms": 5})
    log = tmp_path / "1" / "mlperf_log_detail.txt"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    at = next(i for i, text in enumerate(lines) if '"result_tokens_per_second"' in text)
    entry = json.loads(lines[at].split(" ", 1)[1])
    entry["value"] *= 1.02
    lines[at] = f":::MLLOG {json.dumps(entry)}\n"
    log.write_text("".join(lines), encoding="utf-8")
    result = build_run_result(tmp_path / "1")
    assert result["state"] == "complete"
    assert len(result["disagreements"]) == 1
    assert result["disagreements"][0].startswith("tokens_per_second")


def test_latencies_by_hand() -> None:
    series = runs.latencies(
        [
            row(),
            row(first_token_ns=None, done_ns=21_000, output_tokens=1, status="empty"),
            row(status="failed", done_ns=99_000, output_tokens=None),
        ]
    )
    assert series.measured_from == "scheduled"
    assert series.ttft == [10_000, 20_000]
    assert series.latency == [30_000, 20_000]
    assert series.tpot == [5_000]  # (31,000 - 11,000) / 4; one token has none


def test_without_schedule_the_time_of_issue_counts() -> None:
    series = runs.latencies([row(scheduled_ns=None), row()])
    assert series.measured_from == "issued"
    assert series.ttft == [9_500, 9_500]


def test_percentiles_are_loadgens() -> None:
    found = runs.summarise(list(range(1000, 0, -1)), "issued")
    assert found is not None
    assert (found["min"], found["max"], found["mean"]) == (1, 1000, 500.5)
    assert (found["p50"], found["p99"], found["p99.9"]) == (501, 991, 1000)
    assert found["early_stopping_p99"] == 1000 - 2 + 1
    assert runs.summarise([], "issued") is None


def test_throughput_by_hand() -> None:
    block, duration_s = runs.throughput(
        [row(), row(scheduled_ns=2_000, done_ns=1_000_001_000), row(status="failed")]
    )
    assert duration_s == pytest.approx(1.0)
    assert block["output_tokens_per_s"] == pytest.approx(10.0)
    assert block["samples_per_s"] == pytest.approx(2.0)
    assert block["tokens_per_sample"] == 5.0


def test_latency_that_loadgen_does_not_confirm_is_listed() -> None:
    log = DetailLog(values={"result_first_token_mean_latency_ns": 50_000_000})
    series = runs.Series(ttft=[60_000_000], tpot=[1], latency=[2])
    noted: list[str] = []
    block = runs._latency_block(series, log, noted)
    assert len(noted) == 1
    assert noted[0].startswith("mean ttft")
    assert block["tpot"] is not None
    assert block["tpot"]["source"] == "queries"


def test_recount_compares_texts_with_ids(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")
    outputs = pa.table(
        {
            "index": [0, 1, 2],
            "token_ids": pa.array([[3, 4, end], [5, 6], [7, 8]], pa.list_(pa.int32())),
            "text": ["w3 w4", "w5 w6 w7", "w7 w8"],
        }
    )
    pq.write_table(outputs, tmp_path / "outputs.parquet")
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        assert runs.recount(tmp_path / "outputs.parquet", given) == {
            "recount_mismatches": 1,
            "recount_total": 7,
            "recount_expected": 6,
        }
