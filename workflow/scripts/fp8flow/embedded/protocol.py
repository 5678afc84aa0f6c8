"""The /v1/completions dialect of the embedded server: requests in, JSON and SSE events out.

A subset of OpenAI's legacy completions API as vLLM extends it (token ids as the prompt,
``min_tokens``, ``top_k``, ``ignore_eos``, ``token_ids`` in the answer), greedy decoding only.
Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_TOKENS = 16  # OpenAI's default

# Fields whose only accepted values leave greedy decoding of one answer unchanged.
_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "stop": (None, [], ""),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "detokenize": (None, True),
    "skip_special_tokens": (None, True),
}
_FREE = frozenset(
    {
        "model",
        "prompt",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "user",
        "stream",
        "stream_options",
        "ignore_eos",
        "add_special_tokens",
        "return_token_ids",
    }
)


class RequestError(Exception):
    """A request that is refused, with its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = "NotFoundError" if self.status == 404 else "BadRequestError"
        return error_body(str(self), kind, self.status)


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "code": status}}


@dataclass(frozen=True)
class Limits:
    """What a request must fit in: token ids below ``vocabulary``, prompt + answer in tokens."""

    model_names: tuple[str, ...]
    vocabulary: int
    max_model_len: int


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request; ``prompt`` is token ids."""

    model: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def parse_request(
    body: Mapping[str, Any], limits: Limits, encode: Callable[[str, bool], list[int]]
) -> CompletionRequest:
    """Check a request; ``encode(text, add_special_tokens)`` turns a text prompt into ids.

    Raises:
        RequestError: 404 for another model, 400 for all else, naming field, value and choices.
    """
    model = body.get("model", limits.model_names[0])
    if model not in limits.model_names:
        known = ", ".join(limits.model_names)
        raise RequestError(f"model {model!r} is not served here; available: {known}", 404)
    _check_fields(body)
    _check_greedy(body)
    prompt = _prompt(body, limits, encode)
    max_tokens = _integer(body, "max_tokens", DEFAULT_MAX_TOKENS, 1)
    min_tokens = _integer(body, "min_tokens", 0, 0)
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens {min_tokens} exceeds max_tokens {max_tokens}")
    if len(prompt) + max_tokens > limits.max_model_len:
        raise RequestError(
            f"prompt ({len(prompt)} tokens) and max_tokens ({max_tokens}) exceed the "
            f"{limits.max_model_len} tokens that one request may have here"
        )
    stream = _boolean(body, "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise RequestError("stream_options must be an object")
    return CompletionRequest(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=_boolean(body, "ignore_eos"),
        stream=stream,
        include_usage=_boolean(options, "include_usage"),
    )


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _FIXED:
            if value not in _FIXED[name]:
                raise RequestError(f"{name} {value!r} is not supported; leave it out")
        elif name not in _FREE:
            raise RequestError(f"unknown field {name!r}; known: {', '.join(sorted(_FREE))}")


def _check_greedy(body: Mapping[str, Any]) -> None:
    """Accept temperature 0 or none, and any temperature with top_k 1, which is greedy as well."""
    top_k, temperature = body.get("top_k"), body.get("temperature")
    if top_k == 1 and not isinstance(top_k, bool):
        return
    if top_k not in (None, 0, -1):
        raise RequestError(f"top_k {top_k!r} is not supported: decoding is greedy, top_k is 1")
    if temperature not in (None, 0) or isinstance(temperature, bool):
        raise RequestError(f"temperature {temperature!r} is not supported: greedy only, send 0")


def _prompt(
    body: Mapping[str, Any], limits: Limits, encode: Callable[[str, bool], list[int]]
) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        special = body.get("add_special_tokens")
        prompt = encode(prompt, special is None or bool(special))
    if not isinstance(prompt, list) or any(type(i) is not int for i in prompt):
        raise RequestError("prompt must be one text or one list of token ids (integers)")
    if not prompt:
        raise RequestError("prompt is empty: send at least one token")
    wrong = next((i for i in prompt if not 0 <= i < limits.vocabulary), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong} is outside the vocabulary of {limits.vocabulary}")
    return prompt


def _integer(body: Mapping[str, Any], name: str, default: int, least: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise RequestError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise RequestError(f"{name} must be true or false, not {value!r}")
    return bool(value)


def completion(
    request_id: str, model: str, created_s: int, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a completion object, whole or one chunk of it."""
    head = {"id": request_id, "object": "text_completion", "created": created_s, "model": model}
    return head | {"choices": choices}


def choice(text: str, token_ids: list[int], finish_reason: str | None) -> dict[str, Any]:
    """Return the one choice; ``token_ids`` are those that ``text`` is the text of."""
    return {
        "index": 0,
        "text": text,
        "token_ids": token_ids,
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return token counts; an end-of-sequence token counts as a completion token."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def sse(payload: Mapping[str, Any] | str) -> str:
    """Return one server-sent event."""
    data = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return f"data: {data}\n\n"
