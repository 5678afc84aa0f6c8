"""Real LoadGen against the fake server: the demo's runs, failures, and how a run ends early."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import fakeserver
import loadgen_runs
from fp8flow.errors import FlowError
from fp8flow.loadgen import token_array
from fp8flow.loadgen_log import parse_detail
from fp8flow.loadgen_settings import SEEDS, LoadJob, read_bodies, user_conf_text


def rows_of(folder: Path, name: str = "queries") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "1" / f"{name}.parquet").to_pylist()
    return rows


def a_job(tmp_path: Path, **changes: Any) -> LoadJob:
    path = loadgen_runs.write_job(tmp_path, "http://127.0.0.1:1", **changes)
    return LoadJob.read(path)


@pytest.mark.parametrize("scenario", ["Offline", "Server", "Interactive"])
@pytest.mark.parametrize("mode", ["performance", "accuracy"])
def test_run_is_complete_and_consistent(tmp_path: Path, scenario: str, mode: str) -> None:
    status, outcome, stderr = loadgen_runs.run_worker(
        tmp_path, {"ttft_ms": 2, "tpot_ms": 1}, scenario=scenario, mode=mode
    )
    assert status == 0, stderr
    assert outcome is not None
    assert outcome["state"] == "complete"
    assert outcome["counts"]["issued"] == outcome["counts"]["completed"] == 32
    log = parse_detail(tmp_path / "1" / "mlperf_log_detail.txt")
    assert not log.errors
    assert log.is_complete(mode)
    for name, seed in SEEDS.items():
        assert log.values[f"effective_{name}"] == seed
    assert log.values["requested_use_token_latencies"] is True
    rows = rows_of(tmp_path)
    assert sorted(row["index"] for row in rows) == list(range(32))
    for row in rows:
        assert row["status"] == "ok"
        assert row["output_tokens"] == row["usage_tokens"] == 16
        assert row["scheduled_ns"] <= row["issued_ns"] <= row["sent_ns"]
        assert row["sent_ns"] < row["first_token_ns"] < row["done_ns"]


def test_limits_of_the_scenarios(tmp_path: Path) -> None:
    assert a_job(tmp_path).limits_ms is None
    assert a_job(tmp_path, scenario="Server").limits_ms == (2000.0, 100.0)
    assert a_job(tmp_path, scenario="Interactive").limits_ms == (500.0, 30.0)
    assert a_job(tmp_path, scenario="Server", ttft_limit_ms=7.5).limits_ms == (7.5, 100.0)


def test_accuracy_log_holds_the_streamed_ids(tmp_path: Path) -> None:
    loadgen_runs.run_worker(tmp_path, {"early_stop_tokens": 5}, mode="accuracy")
    log = json.loads((tmp_path / "1" / "mlperf_log_accuracy.json").read_text(encoding="utf-8"))
    outputs = {row["index"]: row for row in rows_of(tmp_path, "outputs")}
    assert len(log) == len(outputs) == 32
    for entry in log:
        ids = outputs[entry["qsl_idx"]]["token_ids"]
        data = bytes.fromhex(entry["data"])
        assert [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)] == ids
        assert entry["token_count"] == len(ids) == 5
        text = outputs[entry["qsl_idx"]]["text"]
        assert text == "".join(map(fakeserver.word, ids))


def test_first_token_is_reported_to_loadgen_in_server(tmp_path: Path) -> None:
    loadgen_runs.run_worker(
        tmp_path, {"ttft_ms": 30, "tpot_ms": 5}, scenario="Server", target_qps=200.0
    )
    values = parse_detail(tmp_path / "1" / "mlperf_log_detail.txt").values
    assert values["result_first_token_min_latency_ns"] >= 30e6
    # Fifteen further tokens, 5 ms each.
    assert values["result_min_latency_ns"] >= 30e6 + 15 * 5e6
    assert values["result_first_token_max_latency_ns"] < values["result_max_latency_ns"]
    assert values["result_time_to_output_token_min"] >= 4.9e6


def test_official_settings_come_from_loadgens_own_file(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from dataclasses import replace
from fp8flow.loadgen_settings import LoadJob, make_settings, user_conf_text
job = replace(LoadJob.read(Path({str(tmp_path / "job.json")!r})), official=True)
conf = Path({str(tmp_path / "user.conf")!r})
conf.write_text(user_conf_text(job, 13368))
s = make_settings(job, 13368, conf)
print(s.qsl_rng_seed, s.sample_index_rng_seed, s.schedule_rng_seed, s.use_token_latencies,
      s.ttft_latency, s.tpot_latency, s.min_duration_ms, s.server_target_qps,
      s.sample_concatenate_permutation, s.performance_sample_count_override, s.scenario.name)
"""
    loadgen_runs.write_job(
        tmp_path, "http://x", scenario="Interactive", target_qps=12.5, min_duration_ms=600_000
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(loadgen_runs.SCRIPTS)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    expected = [*SEEDS.values(), True, 500_000_000, 30_000_000, 600_000, 12.5, True, 13_368]
    assert done.stdout.split() == [*map(str, expected), "Server"]


def test_official_settings_need_the_official_set(tmp_path: Path) -> None:
    status, outcome, stderr = loadgen_runs.run_worker(tmp_path, {}, official=True)
    assert (status, outcome) == (1, None)
    assert "official settings need 13368 rows" in stderr
    assert "Traceback" not in stderr


def test_user_conf_of_official_and_explicit_runs(tmp_path: Path) -> None:
    job = a_job(tmp_path, official=True, scenario="Server", target_qps=30.25)
    text = user_conf_text(job, 13_368)
    assert text == "*.Server.target_qps = 30.25\n*.Server.min_duration = 100\n"
    explicit = user_conf_text(a_job(tmp_path, scenario="Server", min_queries=9), 32)
    assert "*.Server.min_query_count = 9\n" in explicit
    assert "*.Server.ttft_latency = 2000\n" in explicit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": "Online"}, "allowed: Offline, Server, Interactive"),
        ({"mode": "both"}, "allowed: performance, accuracy"),
        ({"official": True, "ttft_limit_ms": 5.0}, "official"),
        ({"audit_config": "/does/not/exist"}, "audit_config"),
        ({"max_conections": 3}, "max_conections"),
        ({"base_urls": []}, "base_urls"),
        ({"base_urls": "http://x"}, "base_urls"),
    ],
)
def test_wrong_jobs_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = loadgen_runs.write_job(tmp_path, "http://x", **change)
    with pytest.raises(FlowError, match=message):
        LoadJob.read(path)


def test_data_set_is_checked(tmp_path: Path) -> None:
    import pyarrow as pa

    job = a_job(tmp_path, rows=3, request_fields={"top_k": 1})
    bodies, lengths = read_bodies(job)
    assert lengths == [20, 20, 20]
    assert json.loads(bodies[2])["top_k"] == 1
    assert json.loads(bodies[2])["max_tokens"] == 16
    ids = pa.array([[1], [2]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"index": [1, 0], "token_ids": ids}), job.dataset)
    with pytest.raises(FlowError, match="not 0, 1, 2"):
        read_bodies(job)
    job.dataset.write_bytes(b"PAR1 not really")
    with pytest.raises(FlowError, match="cannot read the data set"):
        read_bodies(job)


def test_failed_queries_fail_the_run_but_it_ends(tmp_path: Path) -> None:
    status, outcome, _ = loadgen_runs.run_worker(
        tmp_path, {"fail_rate": 0.3, "fail_status": 503, "seed": 1}, scenario="Server"
    )
    assert status == 1
    assert outcome is not None
    counts = outcome["counts"]
    assert outcome["state"] == "failed"
    assert counts["failed"] == counts["failures_by_kind"]["http_503"] > 0
    assert counts["issued"] == 32 == counts["completed"] + counts["failed"]
    assert "http_503" in counts["first_failure"]
    assert outcome["loadgen_finished"]
    # No complaint from LoadGen about the order of first token and completion.
    assert not parse_detail(tmp_path / "1" / "mlperf_log_detail.txt").errors
    failed = [row for row in rows_of(tmp_path) if row["status"] == "failed"]
    assert len(failed) == counts["failed"]
    assert all(row["output_tokens"] is None and row["detail"] for row in failed)


def test_answers_without_text_are_counted_as_empty(tmp_path: Path) -> None:
    status, outcome, _ = loadgen_runs.run_worker(tmp_path, {"empty_text": True})
    assert status == 0
    assert outcome is not None
    assert outcome["counts"]["empty"] == 32
    assert {row["status"] for row in rows_of(tmp_path)} == {"empty"}
    errors = parse_detail(tmp_path / "1" / "mlperf_log_detail.txt").errors
    assert sum(errors.values()) > 0  # LoadGen refuses one-token answers; the run result says so


def test_tokens_without_text_are_an_answer(tmp_path: Path) -> None:
    status, outcome, _ = loadgen_runs.run_worker(
        tmp_path, {"silent_first": True, "early_stop_tokens": 2}, rows=4, min_duration_ms=1
    )
    assert status == 0
    assert outcome is not None
    assert outcome["counts"]["empty"] == 0
    assert {row["status"] for row in rows_of(tmp_path)} == {"ok"}
    assert {row["text"] for row in rows_of(tmp_path, "outputs")} == {""}


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_servers_get_equal_shares_in_order_of_issue(tmp_path: Path, scenario: str) -> None:
    with fakeserver.running(ttft_ms=5) as one, fakeserver.running(ttft_ms=5) as other:
        job = loadgen_runs.write_job(
            tmp_path, one.base_url, base_urls=[one.base_url, other.base_url], scenario=scenario
        )
        assert loadgen_runs.start_worker(job).wait(60) == 0
        assert [server.stats()["completed"] for server in (one, other)] == [16, 16]
    table = pq.read_table(tmp_path / "1" / "queries.parquet")
    assert str(table.schema.field("server").type) == "int16"
    assert table["server"].to_pylist() == [0, 1] * 16


def test_usage_is_compared_with_the_streamed_ids(tmp_path: Path) -> None:
    _, outcome, _ = loadgen_runs.run_worker(tmp_path, {"wrong_usage": True})
    assert outcome is not None
    assert outcome["usage_mismatches"] == 32


def test_server_without_ids_needs_a_tokenizer(tmp_path: Path) -> None:
    status, outcome, _ = loadgen_runs.run_worker(tmp_path, {"no_token_ids": True})
    assert status == 1
    assert outcome is not None
    assert "token_ids" in outcome["reason"]


def test_server_without_ids_and_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(2000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    status, outcome, _ = loadgen_runs.run_worker(
        tmp_path, {"no_token_ids": True}, tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert status == 0
    assert outcome is not None
    assert outcome["usage_mismatches"] == 0
    assert all(row["output_tokens"] == 16 for row in rows_of(tmp_path))


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
@pytest.mark.parametrize(
    ("token_id", "tokens_per_chunk"),
    [("4294967296", 1), ("4294967296", 16), ("-1", 1), ("1.5", 1), ("true", 1), ('"7"', 16)],
)
def test_ids_that_are_no_ids_fail_the_query_and_the_run_ends(
    tmp_path: Path, scenario: str, token_id: str, tokens_per_chunk: int
) -> None:
    status, outcome, stderr = loadgen_runs.run_worker(
        tmp_path,
        {"bad_token_id": token_id, "tokens_per_chunk": tokens_per_chunk},
        rows=4,
        scenario=scenario,
        min_duration_ms=1,
    )
    assert status == 1
    assert outcome is not None
    assert outcome["counts"]["failures_by_kind"] == {"malformed": 4}
    assert outcome["loadgen_finished"]
    assert "no int32" in outcome["reason"]
    assert "Traceback" not in stderr
    assert not parse_detail(tmp_path / "1" / "mlperf_log_detail.txt").errors
    assert {row["output_tokens"] for row in rows_of(tmp_path)} == {None}


def test_token_array() -> None:
    assert token_array([0, (1 << 31) - 1]).tolist() == [0, (1 << 31) - 1]
    for wrong in ([1 << 31], [-1], [-(1 << 40)], [True], [1.0], [None], ["1"]):
        with pytest.raises(ValueError, match="1 token ids are no int32"):
            token_array([5, *wrong])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("def fail(self, *_): raise OSError('bug')\nRun._report_first = fail", "bug"),
        ("def fail(self, *_): raise KeyError('bug')\nRun._count = fail", "bug"),
        # Queries that nobody works on.
        ("Run._submit = lambda self, queries: self.queries.extend(queries)", "no request for them"),
        # Requests that never end, whatever their timeout says.
        (
            "loadgen._STALL_MARGIN_S = 0.0\nopen_it = client.CompletionClient.open\n"
            "loadgen.CompletionClient.open = lambda urls, size, _: open_it(urls, size, 1e4)",
            "none of 4 open queries ended in 1 s",
        ),
    ],
    ids=["first", "done", "lost", "stalled"],
)
def test_faults_of_our_own_end_the_run_with_a_reason(
    tmp_path: Path, change: str, reason: str
) -> None:
    with fakeserver.running(hang_after=0 if "STALL" in change else -1) as server:
        job = loadgen_runs.write_job(
            tmp_path, server.base_url, 4, request_timeout_s=1.0, min_duration_ms=1
        )
        outcome = loadgen_runs.run_changed(job, change)
    assert outcome["state"] == "failed"
    assert reason in outcome["reason"]
    counts = outcome["counts"]
    assert counts["issued"] == 4 == counts["completed"] + counts["failed"]


def test_slow_requests_are_no_stall(tmp_path: Path) -> None:
    # All answers together take longer than the watchdog allows between two.
    with fakeserver.running(ttft_ms=800, max_concurrency=1) as server:
        job = loadgen_runs.write_job(
            tmp_path, server.base_url, 4, request_timeout_s=30.0, min_duration_ms=1
        )
        outcome = loadgen_runs.run_changed(job, "loadgen._STALL_MARGIN_S = -27.5")
    assert (outcome["state"], outcome["counts"]["completed"]) == ("complete", 4)


def test_accuracy_run_asks_for_no_duration(tmp_path: Path) -> None:
    _, outcome, _ = loadgen_runs.run_worker(tmp_path, {}, rows=4, mode="accuracy")
    assert outcome is not None
    assert outcome["settings"]["requested"]["min_duration_ms"] is None
    assert "duration" not in outcome["settings"]["user_conf"]


def test_queries_that_loadgen_did_not_make_have_no_schedule(tmp_path: Path) -> None:
    with fakeserver.running() as server:
        job = loadgen_runs.write_job(
            tmp_path, server.base_url, 4, scenario="Server", min_duration_ms=1
        )
        outcome = loadgen_runs.run_changed(
            job, "loadgen_output.scheduled_ns = lambda log, count: ([0], 'computed; it agrees')"
        )
    assert outcome["scheduled"] == "4 queries came, but LoadGen made 1"
    assert {row["scheduled_ns"] for row in rows_of(tmp_path)} == {None}


def test_lost_server_ends_the_run_soon(tmp_path: Path) -> None:
    # The Poisson schedule alone would last more than ten minutes.
    status, outcome, stderr = loadgen_runs.run_worker(
        tmp_path,
        {"die_after_requests": 10},
        scenario="Server",
        target_qps=20.0,
        min_queries=13_000,
    )
    assert status == 1
    assert outcome is not None
    assert outcome["state"] == "failed"
    assert "no connection to the server" in outcome["reason"]
    assert not outcome["loadgen_finished"]
    assert outcome["counts"]["completed"] == 10
    assert "giving up" in stderr
    assert outcome["client"]["wall_s"] < 60


def test_lost_server_ends_an_offline_run_at_once(tmp_path: Path) -> None:
    status, outcome, _ = loadgen_runs.run_worker(
        tmp_path, {"die_after_requests": 100, "ttft_ms": 1}, rows=500
    )
    assert status == 1
    assert outcome is not None
    counts = outcome["counts"]
    assert counts["issued"] == 500 == counts["completed"] + counts["failed"]
    assert counts["failures_by_kind"]["aborted"] > 300
    assert outcome["loadgen_finished"]


def test_sigterm_stops_a_run_and_leaves_its_outcome(tmp_path: Path) -> None:
    with fakeserver.running(hang_after=4) as server:
        job = loadgen_runs.write_job(
            tmp_path, server.base_url, scenario="Server", target_qps=20.0, min_queries=13_000
        )
        process = loadgen_runs.start_worker(job)
        deadline = time.monotonic() + 30
        while server.stats()["requests"] < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    outcome = json.loads((tmp_path / "1" / "outcome.json").read_text(encoding="utf-8"))
    assert outcome["state"] == "failed"
    assert "stopped by SIGTERM" in outcome["reason"]
    assert outcome["counts"]["completed"] == 4
    assert outcome["counts"]["issued"] == 4 + outcome["counts"]["failed"]
    assert "Traceback" not in stderr


def test_connection_limit_is_visible(tmp_path: Path) -> None:
    with fakeserver.running(ttft_ms=5) as server:
        job = loadgen_runs.write_job(tmp_path, server.base_url, max_connections=3)
        loadgen_runs.start_worker(job).communicate(timeout=60)
        assert server.stats()["most_running"] == 3
    outcome = json.loads((tmp_path / "1" / "outcome.json").read_text(encoding="utf-8"))
    assert outcome["client"]["most_in_flight"] == 3
    assert outcome["client"]["most_waiting"] == 29


def test_audit_config_reaches_loadgen(tmp_path: Path) -> None:
    audit = tmp_path / "audit.config"
    audit.write_text(
        "*.*.mode = 2\n*.*.accuracy_log_rng_seed = 720381539243781796\n"
        "*.*.accuracy_log_sampling_target = 100\n*.*.min_query_count = 100\n"
        "*.*.min_duration = 0\n*.*.sample_concatenate_permutation = 0\n",
        encoding="utf-8",
    )
    status, outcome, stderr = loadgen_runs.run_worker(
        tmp_path, {}, scenario="Server", target_qps=500.0, audit_config=str(audit)
    )
    assert status == 0, stderr
    assert outcome is not None
    assert outcome["counts"]["issued"] == 100
    log = json.loads((tmp_path / "1" / "mlperf_log_accuracy.json").read_text(encoding="utf-8"))
    assert len(log) == 100
    for entry in log:
        assert entry["data"].startswith(entry["token_data"])
        assert len(entry["token_data"]) >= 8
