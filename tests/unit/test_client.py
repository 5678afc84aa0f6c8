"""The streaming client: parsing, first-token rule, and every kind of failure by its name."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fakeserver
from fp8flow.client import Completion, EventParser, request_body, run_requests


def one(server: dict[str, Any], timeout_s: float = 10.0, max_tokens: int = 8) -> Completion:
    with fakeserver.running(**server) as running:
        body = request_body("fake", [1, 2, 3], max_tokens, {})
        return run_requests(running.base_url, [body], max_connections=2, timeout_s=timeout_s)[0]


PAYLOADS = st.lists(
    st.text(
        alphabet=st.characters(exclude_characters="\r\n", codec="utf-8"),
        min_size=1,
        max_size=20,
    ).map(lambda text: json.dumps({"t": text}, ensure_ascii=False)),
    max_size=6,
)


@given(PAYLOADS, st.sampled_from(["\n", "\r\n"]), st.data())
def test_parser_does_not_depend_on_where_reads_are_cut(
    payloads: list[str], end: str, data: st.DataObject
) -> None:
    stream = "".join(f": note{end}event: x{end}data: {p}{end}{end}" for p in payloads).encode()
    parser, found, start = EventParser(), [], 0
    while start < len(stream):
        size = data.draw(st.integers(1, len(stream) - start))
        found += parser.feed(stream[start : start + size])
        start += size
    assert [payload.decode() for payload in found] == payloads
    assert parser.finish() == []


def test_parser_gives_a_last_line_without_end() -> None:
    parser = EventParser()
    assert parser.feed(b"data:[DO") == []
    assert parser.feed(b"NE]") == []
    assert parser.finish() == [b"[DONE]"]


@pytest.mark.parametrize(
    "server",
    [
        {},
        {"crlf": True, "fragment": True},
        {"role_only_first": True},
        {"tokens_per_chunk": 3},
        {"no_usage": True},
    ],
)
def test_answer_is_whole(server: dict[str, Any]) -> None:
    completion = one({"tokens": 8, **server})
    assert completion.error is None
    assert completion.token_ids is not None
    assert len(completion.token_ids) == 8
    assert completion.text == "".join(fakeserver.word(i) for i in completion.token_ids)
    assert completion.finish_reason == "length"
    assert completion.completion_tokens == (None if "no_usage" in server else 8)
    assert completion.first_token_ns is not None
    assert completion.sent_ns < completion.first_token_ns <= completion.done_ns


def test_first_token_is_the_first_text_not_the_first_event() -> None:
    completion = one({"role_only_first": True, "tpot_ms": 60, "tokens": 2}, max_tokens=4)
    assert completion.first_token_ns is not None
    # The event without text came one tpot earlier.
    assert completion.first_token_ns - completion.sent_ns >= 60e6


def test_eos_only_answer_is_an_answer_without_first_token() -> None:
    completion = one({"empty_text": True})
    assert (completion.error, completion.token_ids) == (None, [fakeserver.EOS_ID])
    assert (completion.text, completion.first_token_ns) == ("", None)


def test_text_without_ids() -> None:
    completion = one({"no_token_ids": True, "tokens": 3})
    assert completion.error is None
    assert completion.token_ids is None
    assert completion.completion_tokens == 3


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ({"fail_rate": 1.0, "fail_status": 429}, "http_429"),
        ({"fail_rate": 1.0, "fail_status": 500}, "http_500"),
        ({"ready_after": 1e6}, "http_503"),
        ({"reset_rate": 1.0}, "reset"),
        ({"die_after_requests": 0}, "reset"),
        ({"garbage": True}, "malformed"),
        ({"stream_error": True}, "server_error"),
        ({"truncate": True}, "truncated"),
        ({"no_done": True}, "truncated"),
        ({"no_output": True}, "empty"),
        ({"hang_after": 0}, "timeout"),
        ({"hang_mid_stream": True}, "timeout"),
    ],
)
def test_failures_have_names(server: dict[str, Any], kind: str) -> None:
    completion = one({"tokens": 8, **server}, timeout_s=1.0 if kind == "timeout" else 10.0)
    assert completion.error == kind
    assert completion.detail is not None
    assert completion.done_ns > completion.sent_ns


def test_message_of_the_server_is_kept() -> None:
    completion = one({"fail_rate": 1.0})
    assert completion.detail is not None
    assert "failing as asked" in completion.detail


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = request_body("fake", [1], 4, {})
    done = run_requests(f"http://127.0.0.1:{port}", [body], max_connections=1, timeout_s=5)
    assert done[0].error == "connect"


def test_connections_are_bounded_reused_and_nothing_is_retried() -> None:
    with fakeserver.running(ttft_ms=5, tokens=2, fail_rate=0.5, seed=3) as server:
        bodies = [request_body("fake", [i], 4, {}) for i in range(40)]
        done = run_requests(server.base_url, bodies, max_connections=4, timeout_s=10)
        stats = server.stats()
    assert stats["requests"] == 40
    assert stats["most_running"] <= 4
    assert {c.error for c in done} == {None, "http_500"}
    assert sum(c.error is None for c in done) == stats["completed"]


def test_fields_of_the_backend_win() -> None:
    body = json.loads(request_body("m", [5, 6], 7, {"top_k": 1, "temperature": 0.5}))
    assert body == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_k": 1,
    }
