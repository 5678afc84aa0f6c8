"""Load jobs on the fake server, with real LoadGen; slow parts run as processes of their own."""

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fakebackend
import fakeserver
from fakebackend import FakeBackend, make_inputs, make_spec, start_job
from fp8flow import guard
from fp8flow.errors import FlowError
from fp8flow.load_job import Task, job_settings, report_earlier_attempts, run_load_job
from fp8flow.loadgen import LoadJob
from fp8flow.ports import port_is_free
from fp8flow.probe import reuse_proof, run_probe
from fp8flow.records import verify_record
from fp8flow.serve import Resources, serve, warm_up
from fp8flow.workload import read_workload, warm_up_prompts

RESOURCES = Resources(threads=1, ready_timeout_s=20.0, stop_grace_s=2.0)


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(tmp_path / "locks"))


def wait_until(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def is_alive(pid):
    return guard.parent_pids().get(pid, (0, "Z"))[1] not in "ZX"


def measure(folder, mode="performance", backend=None, **changes):
    """Run a load job in this process; return its record."""
    checkpoint, dataset = make_inputs(folder)
    output = folder / "run" / "run.json"
    backend = backend or FakeBackend()
    spec = make_spec(mode, **changes)
    return run_load_job(Task(spec, checkpoint, dataset, output, backend, RESOURCES), mode)


def probe(folder, backend):
    checkpoint, dataset = make_inputs(folder)
    output = folder / "server" / "probe.json"
    return run_probe(Task(make_spec("probe"), checkpoint, dataset, output, backend, RESOURCES))


def failure(folder, attempt=1):
    return json.loads((folder / "run" / "attempts" / str(attempt) / "failure.json").read_text())


def test_a_complete_run(tmp_path):
    measure(tmp_path)
    record = verify_record(tmp_path / "run" / "run.json")
    result = record.result
    assert (result["state"], result["reason"], result["attempt"]) == ("complete", None, 1)
    assert result["counts"]["completed"] == result["counts"]["issued"] == 32
    assert result["tokens"]["recount_mismatches"] == 0
    assert result["settings"]["source"] == "explicit"
    assert "32 rows" in result["settings"]["why"]
    assert result["server"]["prefix_reuse"] is False
    assert result["server"]["settings"]["backend"] == "fake"
    assert result["server"]["settings_after"] == result["server"]["settings"]
    assert result["server"]["warmup_requests"] == 3
    assert result["server"]["memory"]["peak_rss_bytes"] > 5e6
    names = {Path(name).name for name in record.data["files"]}
    assert {"server.log", "loadgen.log", "job.json", "queries.parquet", "outcome.json"} <= names
    assert all(name.startswith("attempts/1/") for name in record.data["files"])
    assert set(record.data["inputs"]) == {"checkpoint", "dataset"}
    port = int(re.search(r"--port=(\d+)", " ".join(result["server"]["argv"]))[1])
    assert port_is_free("127.0.0.1", port)
    assert not (tmp_path / "run" / "attempts" / "1" / "failure.json").exists()


def test_an_accuracy_run_of_server(tmp_path):
    result = measure(tmp_path, "accuracy", scenario="Server", target_qps=200.0).result
    assert result["state"] == "complete"
    assert (result["mode"], result["scenario"]) == ("accuracy", "Server")
    assert result["limits_ns"] == {"ttft": 2_000_000_000, "tpot": 100_000_000}


def test_failed_queries_are_data(tmp_path):
    """The program says so loudly and exits with 0; the record says failed."""
    output, _ = run_to_end(start_job(tmp_path, fake={"fail_rate": 0.3}, warmup_requests=0))
    result = verify_record(tmp_path / "run" / "run.json").result
    assert result["state"] == "failed"
    assert 0 < result["counts"]["failed"] < result["counts"]["issued"] == 32
    assert result["counts"]["failures_by_kind"] == {"http_500": result["counts"]["failed"]}
    assert "THE RUN FAILED" in output and "http_500" in output


def run_to_end(process, expected=0):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == expected, output
    return output, process


def test_the_server_dies_in_the_run(tmp_path):
    process = start_job(tmp_path, fake={"die_after_requests": 20, "ttft_ms": 20})
    output, _ = run_to_end(process, expected=1)
    assert re.search(r"the server died in the run \(\d+ queries issued, \d+ completed", output)
    assert "exited with status 9" in output and "dying as asked" in output
    assert not (tmp_path / "run" / "run.json").exists()
    assert failure(tmp_path)["reason"].startswith("the server died in the run")
    assert {"server.log", "loadgen.log"} <= set(failure(tmp_path)["logs"])


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        ({"die_at_start": True}, "died before it was ready: it exited with status 3"),
        ({"die_after_requests": 0}, "died in the first request: it exited with status 9"),
        ({"die_after_requests": 1}, "died in the warm-up: it exited with status 9"),
        ({"no_output": True}, "the first request: 1 of 1 requests failed; first: empty"),
        ({"prefix_reuse": True}, "says that it reuses prefixes of earlier prompts"),
        ({"says_reuse": "unknown"}, "says that it reuses prefixes"),
        ({"says_reuse": "nothing"}, "does not say whether it reuses prefixes"),
        ({"told": {"engine": "fake 2"}}, 'engine: asked for "fake 2", effective null'),
        ({"told": {"prefix_reuse": 1}}, "prefix_reuse: asked for 1, effective false"),
    ],
)
def test_nothing_is_measured_on_a_server_that_does_not_work(tmp_path, fake, expected):
    with pytest.raises(FlowError, match=re.escape(expected)) as raised:
        measure(tmp_path, backend=FakeBackend(**fake))
    assert not (tmp_path / "run" / "run.json").exists()
    assert not (tmp_path / "run" / "attempts" / "1" / "outcome.json").exists()
    assert failure(tmp_path)["reason"] == str(raised.value)


HITS = [{"counters": {"prefix_hit_tokens": n}} for n in (0, 7)]


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (HITS, "prefix_hit_tokens: 7"),
        ([{}, {"prefix_reuse": True}], "says that it reuses prefixes"),
        ([{"threads": 2}, {"threads": 1}], "(threads was 2 and is 1), so what was measured"),
        ([{}, {"extra": 1}], "(extra was null and is 1)"),
    ],
)
def test_a_server_that_reused_or_changed_in_the_run_gives_no_record(tmp_path, readings, expected):
    with pytest.raises(FlowError, match=re.escape(expected)) as raised:
        measure(tmp_path, backend=FakeBackend(readings=readings))
    assert "what was measured does not count" in str(raised.value)
    assert (tmp_path / "run" / "attempts" / "1" / "outcome.json").exists()
    assert not (tmp_path / "run" / "run.json").exists()
    assert failure(tmp_path)["reason"] == str(raised.value)


def test_counters_may_change_and_both_readings_are_kept(tmp_path):
    counters = [{"prefix_hit_tokens": 0, "received": n} for n in (0, 36)]
    backend = FakeBackend(readings=[{"counters": found} for found in counters])
    server = measure(tmp_path, backend=backend).result["server"]
    found = [server[key]["counters"] for key in ("settings", "settings_after")]
    assert found == counters


def strings(value, where=""):
    """Yield (where, text) of every text in a record."""
    if isinstance(value, str):
        yield where, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in () if isinstance(value, str) else pairs:
        if isinstance(inner, (str, dict, list)):
            yield from strings(inner, f"{where}/{key}")


def test_facts_name_no_place_on_the_machine_but_in_the_command_line(tmp_path):
    result = measure(tmp_path).result
    found = {
        where
        for section in ("server", "workload")
        for where, text in strings(result[section], section)
        if text.startswith("/") or str(tmp_path) in text
    }
    assert all(re.match(r"server/(servers/0/)?argv/", where) for where in found)
    assert result["server"]["argv"][0] == Path(result["server"]["argv"][0]).name


def test_the_server_does_not_see_the_launcher_of_a_cluster(tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "KEPT"):
        monkeypatch.setenv(name, "1")
    checkpoint, dataset = make_inputs(tmp_path)
    workload = read_workload(checkpoint, dataset, "fake")
    with serve(FakeBackend(), workload, {}, RESOURCES, tmp_path, 30.0) as serving:
        raw = Path(f"/proc/{serving.server.process.pid}/environ").read_text()
    seen = dict(line.split("=", 1) for line in raw.split("\0") if line)
    assert not [key for key in seen if key.startswith(("SLURM", "PMI", "OMPI"))]
    assert (seen["KEPT"], seen["OMP_NUM_THREADS"]) == ("1", "1")


def started_in_the_run(folder, **changes):
    """Start a job with a long run; return it with its processes once queries are under way."""
    changes = {"scenario": "Server", "min_duration_ms": 120_000, "target_qps": 20.0} | changes
    job = start_job(folder, fake={"ttft_ms": 5}, **changes)
    attempts = folder / "run" / "attempts"

    def under_way():
        logs = list(attempts.glob("*/mlperf_log_detail.txt"))
        return logs and len(guard.descendants(job.pid)) == 4

    assert wait_until(under_way), job.communicate()
    time.sleep(0.3)
    tree = guard.descendants(job.pid)
    return job, tree, port_of(folder)


def port_of(folder):
    newest = max((folder / "run" / "attempts").iterdir(), key=lambda path: int(path.name))
    text = (newest / "server.log").read_text()
    return int(re.search(r"http://127\.0\.0\.1:(\d+)", text)[1])


def pid_of(tree, program):
    """Return the process of the tree that runs a program; its guard has the name as well."""
    commands = {p: Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0") for p in tree}
    found = [p for p, c in commands.items() if len(c) > 1 and c[1].endswith(program.encode())]
    assert len(found) == 1, commands
    return found[0]


def test_a_killed_job_leaves_nothing_and_the_next_one_continues(tmp_path):
    """The next one is there already, and waits for the accelerator until the last is gone."""
    job, tree, port = started_in_the_run(tmp_path)
    waiting = start_job(tmp_path)
    line = waiting.stdout.readline()
    assert "waiting for the accelerator cpu" in line and f"process {job.pid} in" in line
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    assert wait_until(lambda: not any(map(is_alive, tree)))
    assert port_is_free("127.0.0.1", port)
    output, _ = run_to_end(waiting)
    assert re.search("found 1 earlier attempt.*1 was interrupted; starting a new one", output)
    assert verify_record(tmp_path / "run" / "run.json").result["attempt"] == 2


def test_a_stopped_job_stops_at_once_and_says_so(tmp_path):
    job, tree, port = started_in_the_run(tmp_path)
    os.kill(job.pid, signal.SIGTERM)
    output, _ = run_to_end(job, expected=128 + signal.SIGTERM)
    assert "stopped by SIGTERM" in output
    assert not any(map(is_alive, tree))
    assert port_is_free("127.0.0.1", port)
    assert failure(tmp_path)["reason"] == "stopped by SIGTERM"
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_load_generator_is_killed(tmp_path, signum):
    job, tree, port = started_in_the_run(tmp_path)
    os.kill(pid_of(tree, "loadgen_worker.py"), signum)
    output, _ = run_to_end(job, expected=1)
    how = "was killed by SIGKILL" if signum == signal.SIGKILL else "exited with status 1"
    assert f"the load generator {how}" in output
    assert not any(map(is_alive, tree))
    assert port_is_free("127.0.0.1", port)
    assert not (tmp_path / "run" / "run.json").exists()
    assert failure(tmp_path)["reason"].startswith("the load generator")


def test_the_server_is_killed(tmp_path):
    job, tree, port = started_in_the_run(tmp_path)
    os.kill(pid_of(tree, "fakeserver.py"), signal.SIGKILL)
    output, _ = run_to_end(job, expected=1)
    assert "the server died in the run" in output and "was killed by SIGKILL" in output
    assert not any(map(is_alive, tree))
    assert port_is_free("127.0.0.1", port)
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_input_that_was_changed_is_refused_before_anything_starts(tmp_path):
    checkpoint, dataset = make_inputs(tmp_path)
    (checkpoint.parent / "config.json").write_text('{"a": 1}')
    output = tmp_path / "run" / "run.json"
    with pytest.raises(FlowError, match=r"config\.json has 8 bytes, not 2"):
        run_load_job(
            Task(make_spec(), checkpoint, dataset, output, FakeBackend(), RESOURCES), "performance"
        )
    assert not (tmp_path / "run").exists()


def test_the_warm_up_asks_for_nothing_that_is_in_the_set(tmp_path):
    checkpoint, dataset = make_inputs(tmp_path)
    workload = read_workload(checkpoint, dataset, "fake")
    with serve(FakeBackend(), workload, {}, RESOURCES, tmp_path, 30.0) as serving:
        warm_up(serving, make_spec(warmup_requests=5).settings["harness"])
        seen = serving.server.get_page("/fake/stats", "json")["prompts"]
    assert len(seen) == len(set(seen)) == 6  # one for the first token
    assert not set(seen) & {fakeserver.prompt_digest(p.tolist()) for p in workload.prompts}


prompt_lists = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=20
)


@given(prompt_lists, st.integers(0, 20))
def test_warm_up_prompts(lists, count):
    prompts = [np.array(ids, dtype=np.int32) for ids in lists]
    made = [tuple(prompt.tolist()) for prompt in warm_up_prompts(prompts, count)]
    assert len(set(made)) == len(made) == count
    assert not set(made) & set(map(tuple, lists))
    vocabulary = {token for ids in lists for token in ids}
    assert {token for prompt in made for token in prompt} <= vocabulary
    # What was asked for the first token are the first of any number of prompts.
    assert made[:3] == [tuple(p.tolist()) for p in warm_up_prompts(prompts, min(count, 3))]


def test_prompts_are_read_as_they_are(tmp_path):
    import pyarrow.parquet as pq

    checkpoint, dataset = make_inputs(tmp_path, rows=7, length=5)
    workload = read_workload(checkpoint, dataset, "fake")
    expected = pq.read_table(dataset.parent / "samples.parquet")["token_ids"].to_pylist()
    assert [prompt.tolist() for prompt in workload.prompts] == expected


class _Serving:
    """What job_settings looks at."""

    def __init__(self, rows, checkpoint, streams_token_ids, source="hub"):
        self.dataset = SimpleNamespace(result={"source": source})
        self.backend = FakeBackend()
        self.backend.streams_token_ids = streams_token_ids
        self.workload = self.served = self
        self.base_urls, self.model_name = ["http://127.0.0.1:1"], "fake"
        self.prompts = range(rows)
        self.samples = Path("samples.parquet")
        self.tokenizer = checkpoint


@pytest.mark.parametrize(
    ("rows", "changes", "official", "why"),
    [
        (13_368, {}, True, ""),
        (13_368, {"ttft_limit_ms": 500.0}, False, "ttft_limit_ms set in the configuration"),
        (32, {}, False, "the data set has 32 rows; the benchmark's has 13368"),
    ],
)
@pytest.mark.parametrize("mode", ["performance", "accuracy"])
def test_settings_are_official_only_for_the_official_set(
    tmp_path, rows, changes, official, why, mode
):
    spec = make_spec(mode, "Server", **changes)
    serving = _Serving(rows, tmp_path, streams_token_ids=mode == "performance")
    settings = job_settings(spec, mode, serving, tmp_path)
    (tmp_path / "job.json").write_text(json.dumps(settings))
    job = LoadJob.read(tmp_path / "job.json")
    assert (job.official, job.why) == (official, why)
    assert (job.scenario, job.mode, job.max_connections) == ("Server", mode, 16)
    expected = None if mode == "performance" else tmp_path / "tokenizer.json"
    assert job.tokenizer == expected


def test_random_tokens_are_never_official(tmp_path):
    serving = _Serving(13_368, tmp_path, streams_token_ids=True, source="synthetic")
    settings = job_settings(make_spec("performance", "Server"), "performance", serving, tmp_path)
    assert settings["official"] is False
    assert settings["why"] == "the data set is made of random tokens"


def test_earlier_attempts_are_told_in_one_line(tmp_path, caplog):
    caplog.set_level("INFO")
    report_earlier_attempts(tmp_path)
    assert caplog.messages == []
    for number in (2, 10, 9):
        (tmp_path / "attempts" / str(number)).mkdir(parents=True)
    (tmp_path / "attempts" / "10" / "failure.json").write_text('{"reason": "no luck\\nat all"}')
    report_earlier_attempts(tmp_path)
    (tmp_path / "attempts" / "11").mkdir()
    (tmp_path / "attempts" / "11" / "outcome.json").write_text('{"state": "complete"}')
    report_earlier_attempts(tmp_path)
    first, second = caplog.messages
    assert "found 3 earlier attempt(s)" in first and "10 failed (no luck)" in first
    assert "found 4 earlier attempt(s)" in second and "11 complete" in second


def test_probe(tmp_path):
    probe(tmp_path, FakeBackend(ttft_ms=5))
    result = verify_record(tmp_path / "server" / "probe.json").result
    assert result["parity"] == {"prompts": 20, "mismatches": 0, "without_token_ids": 0}
    # Nothing is counted, and the fake server is as fast with a short prompt as with a long one.
    assert result["prefix_reuse_proof"] == "not shown"
    assert result["reuse"]["prefix_reuse"] is None
    assert result["server"]["settings_after"]["prefix_reuse"] is False
    assert result["reuse"]["servers"] == ["not shown"]
    assert max(result["reuse"]["short_prompt_tokens"]) == 4
    assert len(result["reuse"]["ttft_short_ns"]) == 9
    assert len(result["reuse"]["ttft_first_ns"]) == 9
    assert result["reuse"]["cached_tokens"] is None and result["reuse"]["cached_tokens_reason"]
    assert result["deterministic"] is True
    assert result["server"]["startup_s"] > 0
    assert result["server"]["memory"]["rss_bytes"] > 5e6


def test_probe_finds_reuse_whatever_the_settings_say(tmp_path):
    """The fake server reuses, which makes repetitions faster, but says that it does not."""
    backend = FakeBackend(says_reuse=False, prefix_reuse=True, ttft_ms=60)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(FlowError, match=r"takes 0\.\d+ of the time.*own count: None"),
    ):
        patch.setattr("fp8flow.probe.cached_tokens", lambda *_: None)
        probe(tmp_path, backend)
    assert not (tmp_path / "server" / "probe.json").exists()
    assert (tmp_path / "server" / "attempts" / "1" / "failure.json").exists()


def test_probe_believes_the_counter_of_the_engine(tmp_path):
    with pytest.raises(FlowError, match="cached tokens by its own count: 7"):
        probe(tmp_path, FakeBackend(readings=HITS))


def test_probe_without_a_hit_counted(tmp_path):
    result = probe(tmp_path, FakeBackend(readings=HITS[:1])).result
    assert result["prefix_reuse_proof"] == result["reuse"]["prefix_reuse_proof"] == "off, counted"
    assert (result["reuse"]["prefix_reuse"], result["reuse"]["cached_tokens"]) == (False, 0)


@pytest.mark.parametrize(
    ("cached", "repeated", "short", "proof"),
    [
        (0, [100, 101, 99], [90, 90, 90], "off, counted"),
        (0, [20, 20, 20], [5, 5, 5], "reused"),
        (3, [100, 101, 99], [5, 5, 5], "reused"),
        (None, [20, 21, 22], [5, 5, 5], "reused"),
        (None, [100, 101, 99], [5, 5, 5], "off, by time"),
        (None, [100, 101, 99], [90, 90, 90], "not shown"),
        (None, [70, 70, 70], [5, 5, 5], "not shown"),
        (None, [40, 40, 120], [5, 5, 5], "not shown"),
    ],
)
def test_what_shows_that_prefixes_are_not_reused(cached, repeated, short, proof):
    """Times in ms; the first times of the long prompts were about 100."""
    found = reuse_proof(cached, [100, 95, 104], repeated, short)
    assert found == proof


def test_probe_believes_the_cached_tokens_in_usage(tmp_path):
    """Answers are as slow the second time, but the server says that it took them from a cache."""
    backend = FakeBackend(says_reuse=False, prefix_reuse=True)
    with pytest.raises(FlowError, match="cached tokens by its own count: 20"):
        probe(tmp_path, backend)


def test_probe_compares_token_counts(tmp_path):
    with pytest.raises(FlowError, match=r"20 differences; first: sample 0: 8 output tokens, usage"):
        probe(tmp_path, FakeBackend(wrong_usage=True))


def test_probe_needs_usage(tmp_path):
    with pytest.raises(FlowError, match="20 input tokens, usage says None"):
        probe(tmp_path, FakeBackend(no_usage=True))


@pytest.mark.parametrize("mode", ["performance", "probe"])
def test_help_of_the_programs(mode, capsys):
    with pytest.raises(SystemExit):
        fakebackend.main([mode, "--help"])
    text = capsys.readouterr().out
    for option in ("--checkpoint", "--dataset", "--output", "--threads", "--ready-timeout-s"):
        assert option in text
