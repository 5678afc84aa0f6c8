"""The streaming client: parsing, first-token rule, and every kind of failure by its name."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fakeserver
from fp8flow import client
from fp8flow.client import (
    CallbackError,
    Completion,
    CompletionClient,
    EventParser,
    request_body,
    run_requests,
)


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


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"text": 5, "finish_reason": None}]},
        {"choices": [{"text": "a", "finish_reason": 1}]},
        {"choices": [{"text": "a", "token_ids": 7}]},
        {"choices": [{"text": "a", "token_ids": "78"}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1.5}},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1 << 40}},
    ],
)
def test_events_of_wrong_types_are_malformed(event: dict[str, Any]) -> None:
    reader = client._StreamReader(Completion(), None)
    with pytest.raises(client.StreamError) as caught:
        reader.take(json.dumps(event).encode())
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("name", ["on_first", "on_done"])
@pytest.mark.parametrize("error", [ValueError, OverflowError])
def test_error_of_a_callback_is_not_swallowed(name: str, error: type[Exception]) -> None:
    def fail(_: Completion) -> None:
        raise error("my own fault")

    async def ask(base_url: str) -> None:
        async with CompletionClient.open(base_url, 1, 10.0) as opened:
            await opened.stream(request_body("fake", [1], 4, {}), **{name: fail})

    with (
        fakeserver.running(tokens=4) as server,
        pytest.raises(CallbackError, match="my own fault") as caught,
    ):
        asyncio.run(ask(server.base_url))
    assert isinstance(caught.value.__cause__, error)


def test_error_of_on_done_after_a_failure_is_not_swallowed() -> None:
    def fail(completion: Completion) -> None:
        raise ValueError(completion.error)

    async def ask(base_url: str) -> None:
        async with CompletionClient.open(base_url, 1, 10.0) as opened:
            await opened.stream(request_body("fake", [1], 4, {}), on_done=fail)

    with (
        fakeserver.running(fail_rate=1.0) as server,
        pytest.raises(CallbackError, match="http_500"),
    ):
        asyncio.run(ask(server.base_url))


def test_stream_that_stays_open_after_its_end_is_closed() -> None:
    # Two requests over one connection: the second needs the first to let it go.
    with fakeserver.running(tokens=4, stay_open=True) as server:
        bodies = [request_body("fake", [i], 4, {}) for i in range(2)]
        done = asyncio.run(
            asyncio.wait_for(client._stream_all(server.base_url, bodies, 1, 60.0), timeout=20.0)
        )
    assert [completion.error for completion in done] == [None, None]


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
