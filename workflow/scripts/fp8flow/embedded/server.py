"""The HTTP server: the application of ``transformers serve`` with our engine and routes.

transformers 5.24's /v1/completions takes text only, returns no token ids and is started through a
command line that cannot switch prefix sharing off. Its application is used, with request ids and
the life of the engine tied to its own. Its routes are not: nothing but the measurement may use the
server, so there are /v1/completions, /v1/models, /health and /fp8flow/settings, all ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tokenizers.decoders import DecodeStream
from transformers.cli.serving.server import build_server

from fp8flow.embedded import protocol
from fp8flow.embedded.engine import Engine, EngineDeadError
from fp8flow.log import get_logger

LOG = get_logger(__name__)
_WATCH_S = 1.0


class _OneModel:
    """What the application of ``transformers serve`` needs of its model manager: the end."""

    def __init__(self, engine: Engine) -> None:
        self.shutdown = engine.stop


class Answer:
    """The text and ids of one request as they come in."""

    def __init__(self, engine: Engine, request: protocol.CompletionRequest) -> None:
        self.engine, self.request = engine, request
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stream = DecodeStream([], skip_special_tokens=True)

    def add(self, output: Any) -> dict[str, Any]:
        """Take a GenerationOutput and return the choice with what is new."""
        new = output.generated_tokens[len(self.ids) :]
        self.ids.extend(new)
        tokenizer = self.engine.tokenizer._tokenizer
        text = "".join(self._stream.step(tokenizer, token) or "" for token in new)
        if output.is_finished():
            self.finish_reason = self._reason()
            text += self._rest(self.text + text)
        self.text += text
        return protocol.choice(text, new, self.finish_reason)

    def _reason(self) -> str:
        ended = not self.request.ignore_eos and self.ids and self.ids[-1] in self.engine.eos_ids
        return "stop" if ended else "length"

    def _rest(self, sent: str) -> str:
        """Return what the stream holds back: an answer cut inside a character."""
        whole: str = self.engine.tokenizer._tokenizer.decode(self.ids, skip_special_tokens=True)
        return whole[len(sent) :] if whole.startswith(sent) else ""

    def usage(self) -> dict[str, int]:
        """Return the token counts so far."""
        return protocol.usage(len(self.request.prompt), len(self.ids))


class Completions:
    """POST /v1/completions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        options = engine.options
        self.limits = protocol.Limits(
            model_names=tuple(dict.fromkeys((options.served_model_name, str(options.model)))),
            vocabulary=engine.model.get_input_embeddings().num_embeddings,
            max_model_len=engine.max_model_len,
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text prompt."""
        encoded = self.engine.tokenizer(text, add_special_tokens=add_special_tokens)
        return list(encoded["input_ids"])

    async def __call__(self, http: Request) -> Response:
        """Answer one request; refusals are 400 or 404, a dead engine is 500."""
        try:
            body = protocol.parse_body(await http.body())
            request = protocol.parse_request(body, self.limits, self.encode)
        except protocol.RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        outputs = self.outputs(request, request_id)
        try:
            first = await anext(outputs)  # a failure before the first token is an HTTP status
        except EngineDeadError as error:
            return _failure(str(error))
        if request.stream:
            events = self.events(request, request_id, first, outputs)
            return StreamingResponse(events, media_type="text/event-stream")
        return await self.whole(http, request, request_id, first, outputs)

    async def outputs(
        self, request: protocol.CompletionRequest, request_id: str
    ) -> AsyncIterator[Any]:
        """Yield a GenerationOutput per step; leaving early cancels the request.

        Raises:
            EngineDeadError: when the engine fails the request or dies.
        """
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.engine.submit(
            request_id,
            request.prompt,
            request.max_tokens,
            request.min_tokens,
            request.ignore_eos,
            queue.put_nowait,
        )
        finished = False
        try:
            while not finished:
                output = await self._next(queue)
                if output.error is not None:
                    finished = True
                    raise EngineDeadError(output.error)
                finished = output.is_finished()
                yield output
            self.engine.count(completed=1, output_tokens=len(output.generated_tokens))
        except EngineDeadError:
            finished = True
            self.engine.count(failed=1)
            raise
        finally:
            if not finished:
                self.engine.cancel(request_id)

    async def _next(self, queue: asyncio.Queue[Any]) -> Any:
        """Return the next output; look at the thread when none comes."""
        while True:
            try:
                return await asyncio.wait_for(queue.get(), _WATCH_S)
            except TimeoutError:
                reason = self.engine.death()
                if reason is not None and queue.empty():
                    raise EngineDeadError(reason) from None

    async def events(
        self,
        request: protocol.CompletionRequest,
        request_id: str,
        first: Any,
        outputs: AsyncIterator[Any],
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed answer."""
        answer, created_s = Answer(self.engine, request), int(time.time())

        def event(choices: list[dict[str, Any]], **extra: Any) -> str:
            head = protocol.completion(request_id, request.model, created_s, choices)
            return protocol.sse(head | extra)

        async with contextlib.aclosing(outputs):  # type: ignore[type-var]
            try:
                yield event([answer.add(first)])
                async for output in outputs:
                    yield event([answer.add(output)])
            except EngineDeadError as error:
                yield protocol.sse(protocol.error_body(str(error), "InternalServerError", 500))
                return
        if request.include_usage:
            yield event([], usage=answer.usage())
        yield protocol.sse("[DONE]")

    async def whole(
        self,
        http: Request,
        request: protocol.CompletionRequest,
        request_id: str,
        first: Any,
        outputs: AsyncIterator[Any],
    ) -> Response:
        """Return the answer in one piece; a client that went away cancels it."""
        answer, created_s = Answer(self.engine, request), int(time.time())
        answer.add(first)
        async with contextlib.aclosing(outputs):  # type: ignore[type-var]
            try:
                async for output in outputs:
                    answer.add(output)
                    if await http.is_disconnected():
                        return Response(status_code=499)
            except EngineDeadError as error:
                return _failure(str(error))
        choice = protocol.choice(answer.text, answer.ids, answer.finish_reason)
        body = protocol.completion(request_id, request.model, created_s, [choice])
        return JSONResponse(body | {"usage": answer.usage()})


def _failure(message: str) -> JSONResponse:
    body = protocol.error_body(message, "InternalServerError", 500)
    return JSONResponse(body, status_code=500)


def build_app(engine: Engine) -> FastAPI:
    """Return the application; the engine must have been started, and stops at its end."""
    manager: Any = _OneModel(engine)
    unused: Any = None  # handlers and state of routes that are taken out
    app = build_server(manager, unused, unused, unused, unused, unused, generation_state=unused)
    app.router.routes.clear()
    _add_routes(app, engine)
    return app


def _add_routes(app: FastAPI, engine: Engine) -> None:
    app.add_api_route("/v1/completions", Completions(engine).__call__, methods=["POST"])

    async def health() -> JSONResponse:
        reason = engine.death()
        if reason is not None:
            return JSONResponse({"status": "unhealthy", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def models() -> JSONResponse:
        entry = {"object": "model", "created": 0, "owned_by": "fp8flow"}
        entry |= {"id": engine.options.served_model_name, "max_model_len": engine.max_model_len}
        return JSONResponse({"object": "list", "data": [entry]})

    async def settings() -> JSONResponse:
        return JSONResponse(engine.settings())

    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/fp8flow/settings", settings, methods=["GET"])


def serve(engine: Engine, host: str, port: int, stop_grace_s: int) -> None:
    """Serve until SIGTERM or SIGINT; open requests get ``stop_grace_s`` seconds to finish."""
    import uvicorn

    engine.start()
    try:
        config = uvicorn.Config(
            build_app(engine),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=stop_grace_s,
        )
        LOG.info("listening on http://%s:%d", host, port)
        uvicorn.Server(config).run()
    finally:
        engine.stop()
