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
from fp8flow.errors import FlowError

DIGEST = fakeserver.prompt_digest([1, 2, 3])


def one(server: dict[str, Any], timeout_s: float = 10.0, max_tokens: int = 8) -> Completion:
    with fakeserver.running(**server) as running:
        body = request_body("fake", [1, 2, 3], max_tokens, {})
        return run_requests([running.base_url], [body], max_connections=2, timeout_s=timeout_s)[0]


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
        {"silent_first": True},
        {"silent_first": True, "no_token_ids": True},
        {"prompt_token_ids": True},
        {"prompt_token_ids": True, "tokens_per_chunk": 5, "fragment": True},
    ],
)
def test_answer_is_whole(server: dict[str, Any]) -> None:
    completion = one({"tokens": 8, **server})
    assert completion.error is None
    assert (completion.token_ids is None) == ("no_token_ids" in server)
    ids = fakeserver.FakeServer(fakeserver.Options(tokens=8)).answer(DIGEST, 8).ids
    assert completion.token_ids in (None, ids)
    heard = ids[1:] if "silent_first" in server else ids
    assert completion.text == "".join(map(fakeserver.word, heard))
    assert completion.finish_reason == "length"
    assert completion.completion_tokens == (None if "no_usage" in server else 8)
    assert completion.first_token_ns is not None
    assert completion.sent_ns < completion.first_token_ns <= completion.done_ns


def test_event_without_token_is_not_the_first_token() -> None:
    completion = one({"role_only_first": True, "tpot_ms": 60, "tokens": 2}, max_tokens=4)
    assert completion.first_token_ns is not None
    # The event without text came one tpot earlier.
    assert completion.first_token_ns - completion.sent_ns >= 60e6


@pytest.mark.parametrize("ids", [True, False])
def test_first_token_may_be_without_text(ids: bool) -> None:
    # Two tokens, 60 ms apart, of which the first is without text.
    server = {"silent_first": True, "tpot_ms": 60, "tokens": 2, "no_token_ids": not ids}
    firsts: list[tuple[list[int] | None, str]] = []

    async def ask(base_url: str) -> Completion:
        async with CompletionClient.open([base_url], 1, 10.0) as opened:
            return await opened.stream(
                request_body("fake", [1, 2, 3], 8, {}),
                on_first=lambda c: firsts.append((c.token_ids and list(c.token_ids), c.text)),
            )

    with fakeserver.running(**server) as running:
        completion = asyncio.run(ask(running.base_url))
    assert completion.first_token_ns is not None
    after_first_ns = completion.done_ns - completion.first_token_ns
    if ids:
        assert completion.token_ids is not None
        assert after_first_ns >= 59e6
        assert firsts == [(completion.token_ids[:1], "")]
    else:
        assert completion.first_token_ns - completion.sent_ns >= 59e6
        assert firsts == [(None, completion.text)]


def test_eos_only_answer_is_an_answer() -> None:
    completion = one({"empty_text": True})
    assert (completion.error, completion.token_ids) == (None, [fakeserver.EOS_ID])
    assert completion.text == ""
    assert completion.first_token_ns is not None


def events(*payloads: Any) -> bytes:
    texts = (p if isinstance(p, str) else json.dumps(p) for p in payloads)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def token(text: str, ids: list[int], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}]}


def test_text_that_looks_like_the_end_or_an_error_is_text() -> None:
    answer = client._Answer(completion := Completion(), None, None)
    for text in ("a", " [DONE]", '"error"', "\n\ndata: [DONE]\n\n"):
        answer.feed(events(token(text, [7])))
    assert not answer.ended
    answer.feed(events(token(".", [8], "stop"), "[DONE]"))
    assert answer.ended
    assert completion.text == 'a [DONE]"error"\n\ndata: [DONE]\n\n.'
    assert completion.token_ids == [7, 7, 7, 7, 8]


@given(st.data())
def test_answer_does_not_depend_on_where_reads_are_cut(data: st.DataObject) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    stream = events(token("a", [1]), token("\u00e9", [2, 3]), token("c", [4], "length"), usage)
    stream += events("[DONE]")
    answer, start = client._Answer(completion := Completion(), None, None), 0
    while start < len(stream):
        assert not answer.ended or b"[DONE]" in stream[:start]
        size = data.draw(st.integers(1, len(stream) - start))
        answer.feed(stream[start : start + size])
        start += size
    assert answer.ended
    assert (completion.text, completion.token_ids) == ("a\u00e9c", [1, 2, 3, 4])
    assert (completion.prompt_tokens, completion.completion_tokens) == (3, 4)


@pytest.mark.parametrize("payload", ["{} {}", "{}x", "[DONE] ", "", "null", "[]"])
def test_payloads_are_one_json_object(payload: str) -> None:
    answer = client._Answer(Completion(), None, None)
    answer.feed(events(token("a", [1])))
    with pytest.raises(client.StreamError) as caught:
        answer.feed(events(payload, "[DONE]"))
    assert caught.value.kind == ("truncated" if "DONE" in payload else "malformed")


def test_error_in_the_stream_is_reported_at_once() -> None:
    completion = one({"stream_error": True, "hang_mid_stream": True}, timeout_s=30.0)
    assert completion.error == "server_error"
    assert completion.done_ns - completion.sent_ns < 20e9


def test_fault_that_came_before_a_timeout_is_the_error() -> None:
    answer = client._Answer(completion := Completion(), None, None)
    answer.feed(events(token("a", [1])))
    answer.feed(events("{not json"))
    answer.fail(TimeoutError())
    assert completion.error == "malformed"


def test_requests_go_to_the_servers_in_turn() -> None:
    with fakeserver.running(tokens=2) as one, fakeserver.running(tokens=2) as other:
        bodies = [request_body("fake", [i], 4, {}) for i in range(10)]
        urls = [one.base_url, other.base_url + "/"]
        done = run_requests(urls, bodies, max_connections=3, timeout_s=10)
        prompts = [server.stats()["prompts"] for server in (one, other)]
    assert [completion.error for completion in done] == [None] * 10
    for first, seen in enumerate(prompts):
        assert sorted(seen) == sorted(fakeserver.prompt_digest([i]) for i in range(first, 10, 2))


def test_long_answer_in_one_piece_is_taken_whole() -> None:
    # More than the HTTP client's buffer holds, so that it pauses and goes on.
    completion = one({"tokens": 40_000, "tokens_per_chunk": 40_000}, max_tokens=40_000)
    assert completion.error is None
    assert len(completion.token_ids or ()) == 40_000


@pytest.mark.parametrize("urls", [[], "http://127.0.0.1:1", [""]])
def test_addresses_are_checked(urls: Any) -> None:
    with pytest.raises(FlowError, match="base_urls"):
        run_requests(urls, [b"{}"], max_connections=1, timeout_s=5)


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
    answer = client._Answer(Completion(), None, None)
    with pytest.raises(client.StreamError) as caught:
        answer.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("name", ["on_first", "on_done"])
@pytest.mark.parametrize("error", [ValueError, OverflowError])
def test_error_of_a_callback_is_not_swallowed(name: str, error: type[Exception]) -> None:
    def fail(_: Completion) -> None:
        raise error("my own fault")

    async def ask(base_url: str) -> None:
        async with CompletionClient.open([base_url], 1, 10.0) as opened:
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
        async with CompletionClient.open([base_url], 1, 10.0) as opened:
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
            asyncio.wait_for(client._stream_all([server.base_url], bodies, 1, 60.0), timeout=20.0)
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
    done = run_requests([f"http://127.0.0.1:{port}"], [body], max_connections=1, timeout_s=5)
    assert done[0].error == "connect"


def test_connections_are_bounded_reused_and_nothing_is_retried() -> None:
    with fakeserver.running(ttft_ms=5, tokens=2, fail_rate=0.5, seed=3) as server:
        bodies = [request_body("fake", [i], 4, {}) for i in range(40)]
        done = run_requests([server.base_url], bodies, max_connections=4, timeout_s=10)
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


def test_connection_works_without_the_attribute_that_older_aiohttp_lacks() -> None:
    """Its 3.14.3, which the lock of a GPU environment pins, has no ``_buffer_paused``."""

    async def resume() -> None:
        connector = client._connector_class()(limit=1)
        connection = connector._factory()
        if hasattr(connection, "_buffer_paused"):
            del connection._buffer_paused
        connection.resume_reading()
        await connector.close()

    asyncio.run(resume())
