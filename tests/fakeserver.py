"""A fake inference server in the request dialect of fp8flow, for faults and timing in tests.

It answers at once with made-up tokens, at the pace asked for, and can fail in every way a real
server does. Run it as a program (``python tests/fakeserver.py --port 8123 --ttft-ms 20``) or, in a
test, as a child process::

    with fakeserver.running(ttft_ms=20, tokens=48) as server:
        server.base_url, server.process, server.stats()

Every option of the program is a keyword of :func:`running` and a field of :class:`Options`.

Routes: POST /v1/completions (streaming or not), GET /health, /v1/models, /fp8flow/settings, and
GET /fake/stats, which tells what the server has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

EOS_ID = 2
FIRST_WORD_ID = 10
VOCABULARY = 1000
EXIT_AT_START = 3
EXIT_IN_SERVICE = 9


@dataclass
class Options:
    """What the server does; the defaults are a well-behaved, fast server."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=0, metadata={"help": "port; 0 takes a free one and prints it"})
    model: str = field(default="fake", metadata={"help": "model name in /v1/models"})
    ttft_ms: float = field(default=0.0, metadata={"help": "time to the first token"})
    tpot_ms: float = field(default=0.0, metadata={"help": "time per further token"})
    tokens: int = field(default=48, metadata={"help": "length of an answer unless capped"})
    tokens_per_chunk: int = field(default=1, metadata={"help": "tokens in one SSE event"})
    early_stop_tokens: int = field(default=0, metadata={"help": "end with an EOS at this length"})
    max_concurrency: int = field(default=0, metadata={"help": "requests served at a time"})
    ready_after: float = field(default=0.0, metadata={"help": "seconds of 503 before ready"})
    die_at_start: bool = field(default=False, metadata={"help": "exit before listening"})
    die_after_requests: int = field(default=-1, metadata={"help": "exit at the request after N"})
    hang_after: int = field(default=-1, metadata={"help": "no answer to requests after N"})
    hang_mid_stream: bool = field(default=False, metadata={"help": "stop after the first token"})
    fail_rate: float = field(default=0.0, metadata={"help": "share answered with fail_status"})
    fail_status: int = field(default=500, metadata={"help": "HTTP status of those: 429, 500, 503"})
    reset_rate: float = field(default=0.0, metadata={"help": "share cut off in mid-stream"})
    garbage: bool = field(default=False, metadata={"help": "an SSE event that is not JSON"})
    stream_error: bool = field(default=False, metadata={"help": "an error object in the stream"})
    empty_text: bool = field(default=False, metadata={"help": "answer is one EOS without text"})
    no_output: bool = field(default=False, metadata={"help": "answer has no tokens at all"})
    truncate: bool = field(default=False, metadata={"help": "stream ends early, no [DONE]"})
    no_done: bool = field(default=False, metadata={"help": "full answer but no [DONE]"})
    role_only_first: bool = field(default=False, metadata={"help": "first event has no text"})
    silent_first: bool = field(default=False, metadata={"help": "first token has no text"})
    prompt_token_ids: bool = field(
        default=False, metadata={"help": "the first event repeats the prompt's ids, as vLLM's does"}
    )
    no_token_ids: bool = field(default=False, metadata={"help": "stream text only"})
    no_usage: bool = field(default=False, metadata={"help": "no usage in the stream"})
    bad_token_id: str = field(
        default="", metadata={"help": "JSON value in place of an answer's last token id"}
    )
    stay_open: bool = field(
        default=False, metadata={"help": "the stream does not end after [DONE]"}
    )
    wrong_usage: bool = field(default=False, metadata={"help": "usage says one token too many"})
    fragment: bool = field(default=False, metadata={"help": "write the stream in odd pieces"})
    crlf: bool = field(default=False, metadata={"help": "CRLF line ends and comment lines"})
    ignore_sigterm: bool = field(default=False, metadata={"help": "TERM has no effect"})
    prefix_reuse: bool = field(
        default=False, metadata={"help": "reuse of prefixes: faster repeats, reported in usage"}
    )
    oracle: str = field(
        default="",
        metadata={
            "help": "JSONL of answers: one of prompt (ids), prompt_sha256 or index (with "
            "--dataset), and token_ids and text"
        },
    )
    dataset: str = field(default="", metadata={"help": "samples.parquet, for index in the oracle"})
    seed: int = field(default=0, metadata={"help": "seed of the random faults"})


def prompt_digest(prompt: list[int] | str) -> str:
    """Return the SHA-256 of a prompt: of its text, or of its ids as little-endian int32."""
    if isinstance(prompt, str):
        return hashlib.sha256(prompt.encode()).hexdigest()
    return hashlib.sha256(b"".join(int(i).to_bytes(4, "little") for i in prompt)).hexdigest()


def word(token_id: int) -> str:
    """Return the text of one made-up token; splitting at blanks gives the tokens back."""
    return "" if token_id == EOS_ID else f" w{token_id}"


@dataclass
class Answer:
    """Tokens of one answer; ``pieces[i]`` is the text that token ``ids[i]`` adds."""

    ids: list[int]
    pieces: list[str]
    finish_reason: str


def read_oracle(options: Options) -> dict[str, tuple[list[int], str]]:
    """Return ``{prompt digest: (token ids, text)}`` of the oracle file."""
    if not options.oracle:
        return {}
    digests: dict[int, str] = {}
    if options.dataset:
        import pyarrow.parquet as pq

        table = pq.read_table(options.dataset, columns=["index", "token_ids"])
        digests = {row["index"]: prompt_digest(row["token_ids"]) for row in table.to_pylist()}
    found = {}
    for line in Path(options.oracle).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "prompt" in row:
            key = prompt_digest(row["prompt"])
        else:
            key = row.get("prompt_sha256") or digests[row["index"]]
        found[key] = (row["token_ids"], row["text"])
    return found


class FakeServer:
    """State and handlers; one per process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.oracle = read_oracle(options)
        self.started = time.monotonic()
        self.limit = asyncio.Semaphore(options.max_concurrency or 1 << 30)
        self.seen_prompts: set[str] = set()
        self.counts = {"requests": 0, "completed": 0, "running": 0, "most_running": 0}
        self.last_body: dict[str, Any] = {}
        self.prompts_digest: list[str] = []

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/fp8flow/settings", self.settings)
        app.router.add_get("/fake/stats", self.stats)
        return app

    def ready(self) -> bool:
        """Tell whether loading is over."""
        return time.monotonic() - self.started >= self.options.ready_after

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready() else 503)

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self.options.model, "object": "model"}]}
        )

    async def settings(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "backend": "fake",
                "prefix_reuse": self.options.prefix_reuse,
                "allow_block_sharing": self.options.prefix_reuse,
                "max_batch_size": self.options.max_concurrency or None,
            }
        )

    async def stats(self, _request: web.Request) -> web.Response:
        return web.json_response(
            self.counts | {"last_body": self.last_body, "prompts": self.prompts_digest}
        )

    def answer(self, digest: str, max_tokens: int) -> Answer:
        """Return what the model says to a prompt; equal prompts get equal answers."""
        options = self.options
        if digest in self.oracle:
            ids, text = self.oracle[digest]
            cut = ids[:max_tokens]
            pieces = [text] + [""] * (len(cut) - 1) if cut else []
            return Answer(cut, pieces, "length" if len(cut) >= max_tokens else "stop")
        if options.no_output:
            return Answer([], [], "stop")
        if options.empty_text:
            return Answer([EOS_ID], [""], "stop")
        start = int(digest[:8], 16)
        length = min(options.tokens, max_tokens)
        ids = [FIRST_WORD_ID + (start + 7 * i) % VOCABULARY for i in range(length)]
        if 0 < options.early_stop_tokens < length:
            ids = [*ids[: options.early_stop_tokens - 1], EOS_ID]
            length = -1
        reason = "length" if length == max_tokens else "stop"
        pieces = [word(i) for i in ids]
        if options.silent_first:
            pieces[0] = ""
        return Answer(ids, pieces, reason)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        options = self.options
        body = await request.json()
        self.counts["requests"] += 1
        number = self.counts["requests"]
        if 0 <= options.die_after_requests < number:
            print("fakeserver: dying as asked", file=sys.stderr, flush=True)
            os._exit(EXIT_IN_SERVICE)
        self.last_body = body
        self.counts["running"] += 1
        self.counts["most_running"] = max(self.counts["most_running"], self.counts["running"])
        try:
            if 0 <= options.hang_after < number:
                await asyncio.sleep(1e6)
            if not self.ready():
                return web.json_response({"error": {"message": "loading"}}, status=503)
            if self.random.random() < options.fail_rate:
                message = {"error": {"message": "failing as asked", "code": options.fail_status}}
                return web.json_response(message, status=options.fail_status)
            async with self.limit:
                response = await self._generate(request, body)
            self.counts["completed"] += 1
            return response
        finally:
            self.counts["running"] -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        digest = prompt_digest(body["prompt"])
        if len(self.prompts_digest) < 100_000:
            self.prompts_digest.append(digest)
        cached = self.options.prefix_reuse and digest in self.seen_prompts
        self.seen_prompts.add(digest)
        answer = self.answer(digest, int(body.get("max_tokens", 16)))
        if self.options.bad_token_id and answer.ids:
            answer.ids[-1] = json.loads(self.options.bad_token_id)
        await self._pause(self.options.ttft_ms * (0.1 if cached else 1.0))
        usage: dict[str, Any] = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": len(answer.ids) + (1 if self.options.wrong_usage else 0),
        }
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        if cached:
            usage["prompt_tokens_details"] = {"cached_tokens": len(body["prompt"])}
        if not body.get("stream"):
            return await self._whole(answer, usage)
        return await self._stream(request, answer, usage, body["prompt"])

    async def _pause(self, milliseconds: float) -> None:
        if milliseconds > 0:
            await asyncio.sleep(milliseconds / 1e3)

    async def _whole(self, answer: Answer, usage: dict[str, Any]) -> web.Response:
        await self._pause(self.options.tpot_ms * max(0, len(answer.ids) - 1))
        choice = self._choice("".join(answer.pieces), answer.ids, answer.finish_reason)
        return web.json_response({"object": "text_completion", "choices": [choice], "usage": usage})

    def _choice(self, text: str, ids: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
        if not self.options.no_token_ids:
            choice["token_ids"] = ids
        return choice

    def _event(self, payload: dict[str, Any]) -> bytes:
        end = "\r\n" if self.options.crlf else "\n"
        comment = f": keep-alive{end}{end}" if self.options.crlf else ""
        return f"{comment}data: {json.dumps(payload, ensure_ascii=False)}{end}{end}".encode()

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if not self.options.fragment:
            await response.write(data)
            return
        for start in range(0, len(data), 7):
            await response.write(data[start : start + 7])
            await asyncio.sleep(0)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._event(
            {"id": "cmpl-fake", "object": "text_completion", "model": self.options.model}
            | {"choices": [choice]}
        )

    async def _stream(
        self,
        request: web.Request,
        answer: Answer,
        usage: dict[str, Any],
        prompt: list[int] | str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.options.role_only_first:
            await self._write(response, self._chunk(self._choice("", [], None)))
            await self._pause(self.options.tpot_ms)
        # A client that is gone, or that we have cut off, is no error of this server.
        with contextlib.suppress(ConnectionError):
            await self._write_tokens(request, response, answer, prompt)
            if not self.options.truncate:
                await self._write_end(response, usage)
            if self.options.stay_open:
                await asyncio.sleep(1e6)
            await response.write_eof()
        return response

    async def _write_tokens(
        self,
        request: web.Request,
        response: web.StreamResponse,
        answer: Answer,
        prompt: list[int] | str,
    ) -> None:
        options = self.options
        step = max(1, options.tokens_per_chunk)
        reset_at = len(answer.ids) // 2 if self.random.random() < options.reset_rate else -1
        for start in range(0, max(1, len(answer.ids)), step):
            if start:
                await self._pause(options.tpot_ms * step)
            if options.truncate and start >= max(1, len(answer.ids) // 2):
                return
            if 0 <= reset_at <= start:
                self._reset(request)
                return
            ids = answer.ids[start : start + step]
            last = start + step >= len(answer.ids)
            reason = answer.finish_reason if last else None
            text = "".join(answer.pieces[start : start + step])
            choice = self._choice(text, ids, reason)
            if options.prompt_token_ids:
                choice["prompt_token_ids"] = None if start else prompt
            await self._write(response, self._chunk(choice))
            await self._fault_after_first(response)

    async def _fault_after_first(self, response: web.StreamResponse) -> None:
        if self.options.garbage:
            await self._write(response, b"data: {not json\n\n")
        if self.options.stream_error:
            await self._write(response, self._event({"error": {"message": "out of memory"}}))
        if self.options.hang_mid_stream:
            await asyncio.sleep(1e6)

    def _reset(self, request: web.Request) -> None:
        """Close with a reset (RST) instead of an orderly end."""
        transport = request.transport
        if transport is not None:
            raw = transport.get_extra_info("socket")
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()

    async def _write_end(self, response: web.StreamResponse, usage: dict[str, Any]) -> None:
        end = b""
        if not self.options.no_usage:
            end += self._event({"object": "text_completion", "choices": [], "usage": usage})
        if not self.options.no_done:
            end += b"data: [DONE]\r\n\r\n" if self.options.crlf else b"data: [DONE]\n\n"
        if end:
            await self._write(response, end)


async def _serve(options: Options) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if options.ignore_sigterm else stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    runner = web.AppRunner(FakeServer(options).app(), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port, backlog=4096)
    await site.start()
    port = runner.addresses[0][1]
    print(f"fakeserver: listening on http://{options.host}:{port}", flush=True)
    await stop.wait()
    await runner.cleanup()


def _parse(argv: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for entry in dataclasses.fields(Options):
        flag = "--" + entry.name.replace("_", "-")
        text = f"{entry.metadata['help']} (default: {entry.default})"
        if isinstance(entry.default, bool):
            parser.add_argument(
                flag, type=_boolean, nargs="?", const=True, default=entry.default, help=text
            )
        else:
            parser.add_argument(flag, type=type(entry.default), default=entry.default, help=text)
    return Options(**vars(parser.parse_args(argv)))


def _boolean(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise argparse.ArgumentTypeError(f"true or false, not {text}")
    return text.lower() == "true"


def command(**options: Any) -> list[str]:
    """Return the argv of a server with these options."""
    Options(**options)  # an unknown option is an error here, not in the child
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
    return [sys.executable, str(Path(__file__).resolve()), *flags]


@dataclass
class Running:
    """A server in a child process."""

    base_url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.base_url.rsplit(":", 1)[1])

    def stats(self) -> dict[str, Any]:
        """Return what the server has seen so far."""
        with urllib.request.urlopen(f"{self.base_url}/fake/stats", timeout=10) as reply:
            found: dict[str, Any] = json.load(reply)
            return found


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Running]:
    """Run a server in a child process on a free port and stop it at the end."""
    process = subprocess.Popen(command(**options), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "listening on" not in line:
            raise RuntimeError(f"fakeserver did not start (exit code {process.wait(10)})")
        yield Running(line.rsplit(" ", 1)[1].strip(), process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def main(argv: list[str] | None = None) -> int:
    """Run the server until TERM or INT."""
    options = _parse(argv)
    if options.die_at_start:
        print("fakeserver: RuntimeError: cannot load the model", file=sys.stderr, flush=True)
        return EXIT_AT_START
    asyncio.run(_serve(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
