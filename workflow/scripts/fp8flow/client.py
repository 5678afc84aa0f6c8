"""HTTP client of the measurements: streamed completions over asyncio, never retried.

Times are ``time.perf_counter_ns()`` of this process. A request ends in exactly one
:class:`Completion`, with an error kind or without:

``connect`` no connection; ``reset`` connection lost in mid-answer; ``timeout`` took longer than
allowed; ``http_<status>`` any status but 200; ``malformed`` an event that is not the dialect;
``server_error`` an error object in the stream; ``truncated`` the stream ended without finish reason
or ``[DONE]``; ``empty`` no output token at all; ``aborted`` given up because the run was;
``client_error`` anything else, with the exception as the detail.

An exception in a callback of the caller is no failure of a request: see :class:`CallbackError`.

Hundreds of streams bring an event each within milliseconds, and what the client needs for one
delays the time stamps of the others. So events are taken where the HTTP parser leaves them, without
waking a task for each, and between the first token and the last they are only collected.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fp8flow.errors import FlowError

if TYPE_CHECKING:
    import aiohttp

_DONE = b"[DONE]"
# In a JSON text this is a key or a whole string, never a part of a longer one.
_ERROR = b'"error"'
_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}
# Servers close idle connections after about 5 s; reusing one at that moment fails the request.
_KEEP_IDLE_S = 2.0
# The end of a stream follows [DONE] at once; a connection that stays open longer is closed.
_DRAIN_S = 1.0
_DETAIL_CHARACTERS = 300
# One event per output token: json.loads spends half its time on encoding and white space.
_decode = json.JSONDecoder().raw_decode


@dataclass(slots=True)
class Completion:
    """What became of one request.

    Attributes:
        sent_ns: when the request was handed to the HTTP client.
        first_token_ns: arrival of the first event with a token, that is with token ids or text;
            a token can be without text (special, or only a part of a character).
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

    @property
    def in_line(self) -> bool:
        """Tell whether the last data ended within a line."""
        return bool(self._rest)


class _Answer:
    """Collects the events of one stream into a :class:`Completion`."""

    __slots__ = ("_completion", "_late", "_on_done", "_on_first", "_parser", "_pieces", "ended")

    def __init__(
        self,
        completion: Completion,
        on_first: Callable[[Completion], None] | None,
        on_done: Callable[[Completion], None] | None,
    ) -> None:
        self._completion = completion
        self._on_first = on_first
        self._on_done = on_done
        self._parser = EventParser()
        self._late: list[bytes] = []
        self._pieces: list[str] = []
        self.ended = False

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream; after ``[DONE]`` they are ignored.

        What comes after the first token is parsed with the end of the stream, unless it may hold
        an error or is cut within a line.

        Raises:
            StreamError: if an event is not of the dialect, or an error object, or the answer is
                over and none.
            CallbackError: if a callback raises.
        """
        if self.ended:
            return
        self._late.append(data)
        if (
            self._completion.first_token_ns is None
            or _DONE in data
            or not data.endswith(b"\n")
            or self._parser.in_line
            or _ERROR in data
        ):
            self._take_late()

    def finish(self) -> None:
        """Take the end of the stream.

        Raises:
            StreamError, CallbackError: like :meth:`feed`.
        """
        if not self.ended:
            self._take_late()
        for payload in () if self.ended else self._parser.finish():
            self._take(payload, time.perf_counter_ns())
        if not self.ended:
            self._close(time.perf_counter_ns(), done=False)

    def fail(self, error: BaseException) -> None:
        """Let the request end with the error, or with one that came before and is in the stream.

        Raises:
            CallbackError: if the callback raises.
        """
        try:
            self._take_late()
        except StreamError as earlier:
            error = earlier
        if self.ended:
            return
        self._completion.error, self._completion.detail = classify(error)
        self._end(time.perf_counter_ns())

    def _take_late(self) -> None:
        now = time.perf_counter_ns()
        late, self._late = b"".join(self._late), []
        for payload in self._parser.feed(late):
            self._take(payload, now)
            if self.ended:
                return

    def _take(self, payload: bytes, now: int) -> None:
        """Add one event that was there at the time ``now``."""
        if payload == _DONE:
            self._close(now, done=True)
            return
        try:
            text = payload.decode("utf-8")
            event, end = _decode(text)
            if end != len(text):
                raise ValueError("more than one JSON value")
            choices = event.get("choices")
            if choices:
                self._take_choice(choices[0], now)
            elif "error" in event:
                raise StreamError("server_error", _shorten(str(event["error"])))
            usage = event.get("usage")
            if usage:
                self._completion.prompt_tokens = _count_of(usage, "prompt_tokens")
                self._completion.completion_tokens = _count_of(usage, "completion_tokens")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            shown = payload[:_DETAIL_CHARACTERS].decode("utf-8", "replace")
            raise StreamError("malformed", f"{error} in the event: {shown}") from error

    def _take_choice(self, choice: dict[str, Any], now: int) -> None:
        completion = self._completion
        ids, text, reason = choice.get("token_ids"), choice["text"], choice.get("finish_reason")
        if ids:
            if not isinstance(ids, list):
                raise TypeError("token_ids is no list")
            if completion.token_ids is None:
                completion.token_ids = ids
            else:
                completion.token_ids.extend(ids)
        if text:
            if not isinstance(text, str):
                raise TypeError("text is no string")
            self._pieces.append(text)
        if reason:
            if not isinstance(reason, str):
                raise TypeError("finish_reason is no string")
            completion.finish_reason = reason
        if completion.first_token_ns is None and (ids or text):
            completion.first_token_ns = now
            if self._on_first is not None:
                completion.text = text or ""
                _call(self._on_first, completion)

    def _close(self, now: int, done: bool) -> None:
        completion = self._completion
        if not done or completion.finish_reason is None:
            missing = "[DONE]" if not done else "a finish reason"
            raise StreamError("truncated", f"the stream ended without {missing}")
        if completion.first_token_ns is None:
            raise StreamError("empty", "the answer has no token")
        self._end(now)

    def _end(self, now: int) -> None:
        self.ended = True
        self._completion.text = "".join(self._pieces)
        self._completion.done_ns = now
        if self._on_done is not None:
            _call(self._on_done, self._completion)


def _count_of(usage: Mapping[str, Any], key: str) -> int:
    value = usage[key]
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{key} is no number of tokens")
    return value


def _call(callback: Callable[[Completion], None], completion: Completion) -> None:
    """Call ``callback`` with its exceptions told apart from those of the request."""
    try:
        callback(completion)
    except Exception as error:
        raise CallbackError(_shorten(f"{type(error).__name__}: {error}")) from error


def _shorten(text: str) -> str:
    return text if len(text) <= _DETAIL_CHARACTERS else text[:_DETAIL_CHARACTERS] + "..."


def classify(error: BaseException) -> tuple[str, str]:
    """Return (error kind, detail) of an exception that ended a request."""
    import aiohttp

    detail = _shorten(f"{type(error).__name__}: {error}")
    if isinstance(error, StreamError):
        return error.kind, str(error)
    if isinstance(error, asyncio.CancelledError):
        return "aborted", "given up with the run"
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


@cache
def _connector_class() -> type[aiohttp.TCPConnector]:
    """Return a connector whose connections tell a listener that something came."""
    import aiohttp
    from aiohttp.client_proto import ResponseHandler

    class Connection(ResponseHandler):
        listener: Callable[[], None] | None = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.listener is not None and data:
                self.listener()

        def resume_reading(self, resume_parser: bool = True) -> None:
            # Every read from a stream ends here, and aiohttp would run its parser again. Its
            # 3.14.3 has no second reason to pause, and no attribute for it.
            if self._reading_paused or getattr(self, "_buffer_paused", False):
                super().resume_reading(resume_parser)

        def connection_lost(self, exc: BaseException | None) -> None:
            super().connection_lost(exc)
            if self.listener is not None:
                self.listener()

    class Connector(aiohttp.TCPConnector):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            # aiohttp has no public place for this; the version is pinned.
            self._factory = partial(Connection, loop=self._loop)  # type: ignore[assignment]

    return Connector


class CompletionClient:
    """Streams completions from servers over one bounded pool of connections."""

    def __init__(
        self, session: aiohttp.ClientSession, base_urls: Sequence[str], timeout_s: float
    ) -> None:
        self._session = session
        self._urls = [f"{url.rstrip('/')}/v1/completions" for url in base_urls]
        self._timeout_s = timeout_s

    @classmethod
    @asynccontextmanager
    async def open(
        cls, base_urls: Sequence[str], max_connections: int, timeout_s: float
    ) -> AsyncIterator[CompletionClient]:
        """Open the pool.

        Args:
            base_urls: addresses of the servers, ``http://host:port``.
            max_connections: size of the pool, for all servers together.
            timeout_s: longest time of one request, from sending to the end of the stream.

        Raises:
            FlowError: if there is no address.
        """
        import aiohttp

        check_urls(base_urls)
        connector = _connector_class()(
            limit=max_connections, limit_per_host=0, keepalive_timeout=_KEEP_IDLE_S
        )
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(30.0, timeout_s)),
            headers=_HEADERS,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, base_urls, timeout_s)

    async def stream(
        self,
        body: bytes,
        server: int = 0,
        on_first: Callable[[Completion], None] | None = None,
        on_done: Callable[[Completion], None] | None = None,
    ) -> Completion:
        """Send one request and return what became of it; nothing is ever retried.

        The callbacks are called as soon as the data is there, before a task is woken.

        Args:
            body: see :func:`request_body`.
            server: index into the addresses.
            on_first: called at the first token, with the token ids and the text so far.
            on_done: called once, at ``[DONE]`` or on failure, before the connection is tidied up.

        Raises:
            CallbackError: if a callback raises; no other callback is called after that.
        """
        completion = Completion(sent_ns=time.perf_counter_ns())
        answer = _Answer(completion, on_first, on_done)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(self._urls[server], data=body) as response,
            ):
                await _require_success(response)
                await _receive(response, answer)
                await _drain(response)
        except CallbackError:
            raise
        except asyncio.CancelledError as error:
            answer.fail(error)
            raise
        except Exception as error:
            # What happens to the connection after the answer is no failure of the request.
            answer.fail(error)
        return completion


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        shown = (await response.content.read(4096)).decode("utf-8", "replace")
        raise StreamError(f"http_{response.status}", _shorten(shown) or response.reason or "")


async def _receive(response: aiohttp.ClientResponse, answer: _Answer) -> None:
    """Feed the stream to ``answer`` until that or the stream ends."""
    content = response.content
    over = asyncio.get_running_loop().create_future()

    def take() -> None:
        if over.done():
            return
        try:
            # Reading may let the parser go on with what it had to hold back.
            while data := content.read_nowait():
                answer.feed(data)
            if not answer.ended and content.at_eof():
                answer.finish()
        except Exception as error:
            over.set_exception(error)
        else:
            if answer.ended:
                over.set_result(None)

    # A response whose end came with its head has given its connection back already.
    protocol: Any = None if response.connection is None else response.connection.protocol
    try:
        if protocol is not None:
            protocol.listener = take
        take()
        await over
    finally:
        if protocol is not None and protocol.listener is take:
            protocol.listener = None


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of the stream, so that the connection goes back to the pool."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await response.content.readany():
                pass
    except TimeoutError:
        response.close()


def check_urls(base_urls: Sequence[str]) -> None:
    """Refuse anything but a list of at least one address.

    Raises:
        FlowError: naming what is wrong.
    """
    if isinstance(base_urls, str) or not base_urls or not all(base_urls):
        raise FlowError(
            f"base_urls is {base_urls!r}; give the address of each server, at least one, as in "
            '["http://127.0.0.1:8000"]'
        )


async def _stream_all(
    base_urls: Sequence[str], bodies: Sequence[bytes], max_connections: int, timeout_s: float
) -> list[Completion]:
    async with CompletionClient.open(base_urls, max_connections, timeout_s) as client:
        limit = asyncio.Semaphore(max_connections)

        async def one(number: int, body: bytes) -> Completion:
            async with limit:
                return await client.stream(body, number % len(base_urls))

        return list(await asyncio.gather(*(one(n, body) for n, body in enumerate(bodies))))


def run_requests(
    base_urls: Sequence[str], bodies: Sequence[bytes], *, max_connections: int, timeout_s: float
) -> list[Completion]:
    """Send requests outside a measurement (warm-up, probe); one completion per body, in order.

    The servers get the bodies in turn.
    """
    import uvloop

    return uvloop.run(_stream_all(base_urls, bodies, max_connections, timeout_s))
