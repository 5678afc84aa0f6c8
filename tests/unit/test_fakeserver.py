"""The fake server does what its options say; other tests rely on it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import fakeserver


def post(url: str, **body: Any) -> tuple[int, str]:
    data = json.dumps({"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4} | body).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(text: str) -> list[Any]:
    payloads = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]


def test_stream_in_the_dialect_and_settings() -> None:
    with fakeserver.running(tokens=8) as server:
        _, text = post(server.base_url, stream=True)
        found = events(text)
        assert found[-1] == "[DONE]"
        assert found[-2]["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
        }
        choices = [event["choices"][0] for event in found[:-2]]
        assert [len(choice["token_ids"]) for choice in choices] == [1, 1, 1, 1]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
        assert json.loads(get(f"{server.base_url}/fp8flow/settings")[1])["prefix_reuse"] is False
        assert json.loads(get(f"{server.base_url}/v1/models")[1])["data"][0]["id"] == "fake"
        whole = json.loads(post(server.base_url)[1])
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert whole["choices"][0]["token_ids"] == ids
        assert server.stats()["completed"] == 2
        assert server.stats()["last_body"]["max_tokens"] == 4


def test_not_ready_before_its_time() -> None:
    with fakeserver.running(ready_after=0.5) as server:
        assert get(f"{server.base_url}/health")[0] == 503
        assert post(server.base_url)[0] == 503
        deadline = time.monotonic() + 10
        while get(f"{server.base_url}/health")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert post(server.base_url)[0] == 200


def test_dies_at_start_with_a_message() -> None:
    done = subprocess.run(
        fakeserver.command(die_at_start=True), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == fakeserver.EXIT_AT_START
    assert "cannot load the model" in done.stderr
    with (
        pytest.raises(RuntimeError, match="did not start"),
        fakeserver.running(die_at_start=True),
    ):
        pass


def test_dies_after_requests() -> None:
    with fakeserver.running(die_after_requests=1) as server:
        assert post(server.base_url)[0] == 200
        with pytest.raises((OSError, urllib.error.URLError)):
            post(server.base_url)
        assert server.process.wait(10) == fakeserver.EXIT_IN_SERVICE


@pytest.mark.parametrize("status", [429, 500, 503])
def test_fails_with_the_status(status: int) -> None:
    with fakeserver.running(fail_rate=1.0, fail_status=status) as server:
        assert post(server.base_url)[0] == status


def test_prefix_reuse_is_visible_in_usage() -> None:
    with fakeserver.running(prefix_reuse=True) as server:
        first = json.loads(post(server.base_url)[1])["usage"]
        again = json.loads(post(server.base_url)[1])["usage"]
        assert "prompt_tokens_details" not in first
        assert again["prompt_tokens_details"]["cached_tokens"] == 3
        assert json.loads(get(f"{server.base_url}/fp8flow/settings")[1])["prefix_reuse"] is True


def test_sigterm_is_obeyed_unless_told_otherwise() -> None:
    with fakeserver.running() as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
    with fakeserver.running(ignore_sigterm=True) as server:
        server.process.send_signal(signal.SIGTERM)
        assert post(server.base_url)[0] == 200
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0  # running() has killed it


def test_oracle_answers_by_prompt_digest_and_index(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    pq.write_table(
        pa.table({"index": [0, 1, 2], "token_ids": pa.array(prompts, pa.list_(pa.int32()))}),
        tmp_path / "samples.parquet",
    )
    lines = [
        {"prompt": [1, 2, 3], "token_ids": [70, 71], "text": "by prompt"},
        {"prompt_sha256": fakeserver.prompt_digest([4, 5, 6]), "token_ids": [72], "text": "hash"},
        {"index": 2, "token_ids": [73, 74, 75], "text": "by index"},
    ]
    oracle = tmp_path / "oracle.jsonl"
    oracle.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with fakeserver.running(
        oracle=str(oracle), dataset=str(tmp_path / "samples.parquet")
    ) as server:
        replies = [json.loads(post(server.base_url, prompt=p)[1])["choices"][0] for p in prompts]
    assert [reply["text"] for reply in replies] == ["by prompt", "hash", "by index"]
    assert [reply["token_ids"] for reply in replies] == [[70, 71], [72], [73, 74, 75]]


def test_concurrency_limit() -> None:
    from fp8flow.client import request_body, run_requests

    with fakeserver.running(max_concurrency=2, ttft_ms=20, tokens=2) as server:
        bodies = [request_body("fake", [i], 2, {}) for i in range(8)]
        done = run_requests([server.base_url], bodies, max_connections=8, timeout_s=10)
        assert [completion.error for completion in done] == [None] * 8
        # Four rounds of two: the last answer cannot come before the others are through.
        assert max(c.done_ns - c.sent_ns for c in done) >= 4 * 20e6
