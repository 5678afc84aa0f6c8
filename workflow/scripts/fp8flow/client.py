"""HTTP client of the measurements: streamed completions over asyncio, never retried.

Times are ``time.perf_counter_ns()`` of this process. A request ends in exactly one
:class:`Completion`, with an error kind or without:

``connect`` no connection; ``reset`` connection lost in mid-answer; ``timeout`` took longer than
allowed; ``http_<status>`` any status but 200; ``malformed`` an event that is not the dialect;
``server_error`` an error object in the stream; ``truncated`` the stream ended without finish reason
or ``[DONE]``; ``empty`` no output token at all; ``aborted`` given up because the run was;
``client_error`` anything else, with the exception as the detail.

An exception in a callback of the caller is no failure of a request: see :class:`CallbackError`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

_DONE = b"[DONE]"
_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}
# Servers close idle connections after about 5 s; reusing one at that moment fails the request.
_KEEP_IDLE_S = 2.0
# The end of a stream follows [DONE] at once; a connection that stays open longer is closed.
_DRAIN_S = 1.0
_DETAIL_CHARACTERS = 300
# One event per output token: json.loads spends half its time on guessing the encoding.
_decode = json.JSONDecoder().decode


@dataclass(slots=True)
class Completion:
    """What became of one request.

    Attributes:
        sent_ns: when the request was handed to the HTTP client.
        first_token_ns: arrival of the first event with text that is not empty.
        done_ns: arrival of ``[DONE]``, or the moment the request failed.
        token_ids: output token ids as streamed; None when the server streams none.
        text: output text.
        prompt_tokens: input tokens by the server's count.
        completion_tokens: output tokens by the server's count.
        finish_reason: ``stop``, ``length``, ...
        error: error kind (see the module), None for an answer.
        detail: what exactly went wrong.
    """

    sent_ns: int = 0
    first_token_ns: int | None = None
    done_ns: int = 0
    token_ids: list[int] | None = None
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    detail: str | None = None


class StreamError(Exception):
    """A stream that is not an answer; ``kind`` is the error kind."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class CallbackError(Exception):
    """A callback of the caller raised, which says nothing about the request; see the cause."""


class EventParser:
    """Incremental parser of server-sent events, as far as completion streams use them.

    Bytes may be cut anywhere, also inside a character or between CR and LF. Comments and fields
    other than ``data`` are skipped. A ``data`` line is one event: servers of this API never spread
    a payload over several lines.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that ``data`` completes."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def finish(self) -> list[bytes]:
        """Return the payload of a last line without line end, if there is one."""
        return self.feed(b"\n") if self._rest else []


class _StreamReader:
    """Collects the events of one stream into a :class:`Completion`."""

    __slots__ = ("_completion", "_on_first", "_pieces")

    def __init__(
        self, completion: Completion, on_first: Callable[[Completion], None] | None
    ) -> None:
        self._completion = completion
        self._on_first = on_first
        self._pieces: list[str] = []

    def take(self, payload: bytes) -> None:
        """Add one event.

        Raises:
            StreamError: if it is not an event of the dialect, or an error object.
        """
        try:
            event = _decode(payload.decode("utf-8"))
            choices = event.get("choices")
            if choices:
                self._take_choice(choices[0])
            elif "error" in event:
                raise StreamError("server_error", _shorten(str(event["error"])))
            usage = event.get("usage")
            if usage:
                self._completion.prompt_tokens = _count_of(usage, "prompt_tokens")
                self._completion.completion_tokens = _count_of(usage, "completion_tokens")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            shown = payload[:_DETAIL_CHARACTERS].decode("utf-8", "replace")
            raise StreamError("malformed", f"{error} in the event: {shown}") from error

    def _take_choice(self, choice: dict[str, Any]) -> None:
        completion = self._completion
        ids = choice.get("token_ids")
        if ids:
            if not isinstance(ids, list):
                raise TypeError("token_ids is no list")
            if completion.token_ids is None:
                completion.token_ids = ids
            else:
                completion.token_ids.extend(ids)
        text = choice["text"]
        if text:
            if not isinstance(text, str):
                raise TypeError("text is no string")
            self._pieces.append(text)
            if completion.first_token_ns is None:
                completion.first_token_ns = time.perf_counter_ns()
                if self._on_first is not None:
                    completion.text = text
                    self._on_first(completion)
        reason = choice.get("finish_reason")
        if reason:
            if not isinstance(reason, str):
                raise TypeError("finish_reason is no string")
            completion.finish_reason = reason

    def close(self, done: bool) -> None:
        """Complete the answer.

        Raises:
            StreamError: if there is no finish reason or no ``[DONE]``, or no token came.
        """
        completion = self._completion
        completion.text = "".join(self._pieces)
        if not done or completion.finish_reason is None:
            missing = "[DONE]" if not done else "a finish reason"
            raise StreamError("truncated", f"the stream ended without {missing}")
        if not completion.token_ids and not completion.text:
            raise StreamError("empty", "the answer has no token")

    def keep_partial_text(self) -> None:
        """Leave what came so far in the completion."""
        self._completion.text = "".join(self._pieces)


def _count_of(usage: Mapping[str, Any], key: str) -> int:
    value = usage[key]
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{key} is no number of tokens")
    return value


def _guarded(callback: Callable[[Completion], None]) -> Callable[[Completion], None]:
    """Return ``callback`` with its exceptions told apart from those of the request."""

    def call(completion: Completion) -> None:
        try:
            callback(completion)
        except Exception as error:
            raise CallbackError(_shorten(f"{type(error).__name__}: {error}")) from error

    return call


def _shorten(text: str) -> str:
    return text if len(text) <= _DETAIL_CHARACTERS else text[:_DETAIL_CHARACTERS] + "..."


def classify(error: BaseException) -> tuple[str, str]:
    """Return (error kind, detail) of an exception that ended a request."""
    import aiohttp

    detail = _shorten(f"{type(error).__name__}: {error}")
    if isinstance(error, StreamError):
        return error.kind, str(error)
    if isinstance(error, TimeoutError):
        return "timeout", detail
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect", detail
    if isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError)):
        return "reset", detail
    return "client_error", detail


def request_body(
    model: str, prompt: Sequence[int] | str, max_tokens: int, fields: Mapping[str, Any]
) -> bytes:
    """Return the JSON body of a streamed, greedy completion request.

    Args:
        model: served model name.
        prompt: token ids, or text.
        max_tokens: longest answer, tokens.
        fields: what the backend needs beyond the common fields; wins over them.
    """
    body = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        **fields,
    }
    return json.dumps(body, separators=(",", ":")).encode("utf-8")


class CompletionClient:
    """Streams completions from one server over a bounded pool of connections."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    @classmethod
    @asynccontextmanager
    async def open(
        cls, base_url: str, max_connections: int, timeout_s: float
    ) -> AsyncIterator[CompletionClient]:
        """Open the pool; ``base_url`` is ``http://host:port``.

        Args:
            base_url: address of the server.
            max_connections: size of the pool.
            timeout_s: longest time of one request, from sending to the end of the stream.
        """
        import aiohttp

        connector = aiohttp.TCPConnector(
            limit=max_connections, limit_per_host=0, keepalive_timeout=_KEEP_IDLE_S
        )
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(30.0, timeout_s)),
            headers=_HEADERS,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, f"{base_url.rstrip('/')}/v1/completions")

    async def stream(
        self,
        body: bytes,
        on_first: Callable[[Completion], None] | None = None,
        on_done: Callable[[Completion], None] | None = None,
    ) -> Completion:
        """Send one request and return what became of it; nothing is ever retried.

        Args:
            body: see :func:`request_body`.
            on_first: called at the first text, with the token ids so far.
            on_done: called once, at ``[DONE]`` or on failure, before the connection is tidied up.

        Raises:
            CallbackError: if a callback raises; no other callback is called after that.
        """
        completion = Completion(sent_ns=time.perf_counter_ns())
        finished = False

        def finish() -> None:
            nonlocal finished
            finished = True
            completion.done_ns = time.perf_counter_ns()
            if on_done is not None:
                _guarded(on_done)(completion)

        reader = _StreamReader(completion, None if on_first is None else _guarded(on_first))
        try:
            async with self._session.post(self._url, data=body) as response:
                await _read_answer(response, reader)
                finish()
                await _drain(response)
        except asyncio.CancelledError:
            if not finished:
                reader.keep_partial_text()
                completion.error, completion.detail = "aborted", "given up with the run"
                finish()
            raise
        except CallbackError:
            raise
        except Exception as error:
            # What happens to the connection after the answer is no failure of the request.
            if not finished:
                completion.error, completion.detail = classify(error)
                reader.keep_partial_text()
                finish()
        return completion


async def _read_answer(response: aiohttp.ClientResponse, reader: _StreamReader) -> None:
    if response.status != 200:
        shown = (await response.content.read(4096)).decode("utf-8", "replace")
        raise StreamError(f"http_{response.status}", _shorten(shown) or response.reason or "")
    parser = EventParser()
    read = response.content.readany
    while data := await read():
        for payload in parser.feed(data):
            if payload == _DONE:
                reader.close(done=True)
                return
            reader.take(payload)
    for payload in parser.finish():
        if payload == _DONE:
            reader.close(done=True)
            return
        reader.take(payload)
    reader.close(done=False)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of the stream, so that the connection goes back to the pool."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await response.content.readany():
                pass
    except TimeoutError:
        response.close()


async def _stream_all(
    base_url: str, bodies: Sequence[bytes], max_connections: int, timeout_s: float
) -> list[Completion]:
    async with CompletionClient.open(base_url, max_connections, timeout_s) as client:
        limit = asyncio.Semaphore(max_connections)

        async def one(body: bytes) -> Completion:
            async with limit:
                return await client.stream(body)

        return list(await asyncio.gather(*map(one, bodies)))


def run_requests(
    base_url: str, bodies: Sequence[bytes], *, max_connections: int, timeout_s: float
) -> list[Completion]:
    """Send requests outside a measurement (warm-up, probe); one completion per body, in order."""
    return asyncio.run(_stream_all(base_url, bodies, max_connections, timeout_s))
