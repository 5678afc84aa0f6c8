"""What the backends of GPU engines share: option lists, answers of servers, lines of logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fp8flow.errors import FlowError

OPTIONS = "engine.serve.options"
WORKFLOW = "the workflow sets it"
# Models are local folders; no server has a reason to ask a hub for anything, or to be counted.
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
# Engines spell the precision that the checkpoint declares as FP8 in two ways.
_KV_DTYPES = {"fp8_e4m3": "fp8"}
_OPTION_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class Sample(NamedTuple):
    """One value of a Prometheus page."""

    name: str
    labels: dict[str, str]
    value: float


def parse_prometheus(text: str) -> list[Sample]:
    """Return the samples of a page in Prometheus' text format 0.0.4, comments left out.

    Raises:
        FlowError: naming the first line that is not of that format.
    """
    lines = (line.strip() for line in text.split("\n"))
    return [_sample(line) for line in lines if line and not line.startswith("#")]


def _sample(line: str) -> Sample:
    found = _SAMPLE.fullmatch(line)
    try:
        if found is None:
            raise ValueError("no name and value")
        return Sample(found[1], dict(_labels(found[2] or "")), float(found[3]))
    except ValueError as error:
        raise FlowError(
            f"the server's metrics are not in Prometheus' text format ({error}): {line[:200]!r}"
        ) from error


def _labels(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text.rstrip()):
        label = _LABEL.match(text, at)
        if label is None:
            raise ValueError(f"labels {text!r}")
        yield label[1], re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), label[2])
        at = label.end()


def option_flags(
    options: Mapping[str, Any], owners: Mapping[str, str], negated: bool = False
) -> list[str]:
    """Return the arguments of options that have no setting of their own.

    A list becomes several values of one flag, a mapping becomes JSON, true the bare flag.

    Args:
        options: name without dashes -> value.
        owners: names that may not be given -> the setting to use instead.
        negated: whether false means ``--no-<name>``; else it is refused.

    Raises:
        FlowError: for a name with an owner, or a name or value that no command line can hold.
    """
    argv: list[str] = []
    for name, value in sorted(options.items()):
        place = f"{OPTIONS}: {name}"
        if not _OPTION_NAME.fullmatch(name):
            raise FlowError(f"{place}: write names in lower case with '-', without leading dashes")
        owner = owners.get(name.removeprefix("no-"))
        if owner is not None:
            raise FlowError(f"{place}: {instead(owner)}")
        argv += _flag(name, value, negated, place)
    return argv


def instead(owner: str) -> str:
    """Return what to do with an option that a setting, or the workflow, owns."""
    return f"{owner}; leave it out" if owner == WORKFLOW else f"set {owner} instead"


def _flag(name: str, value: Any, negated: bool, place: str) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False and negated:
        return [f"--no-{name}"]
    if value is False or value is None:
        raise FlowError(f"{place}: {value!r} is no value; leave it out, or give true for a flag")
    if isinstance(value, Mapping):
        return [f"--{name}", compact_json(value)]
    values = [str(item) for item in (value if isinstance(value, list) else [value])]
    if not values or not all(values):
        raise FlowError(f"{place}: is empty")
    return [f"--{name}", *values]


def setting_flags(serve: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
    """Return the arguments of settings that have a value.

    Args:
        serve: the section ``engine.serve``.
        flags: setting -> flag without dashes.
    """
    return [
        word
        for key, flag in flags.items()
        if serve[key] is not None
        for word in (f"--{flag}", str(serve[key]))
    ]


def startup_log(log: str) -> str:
    """Return what a server logged before it answered; what comes later must change no settings."""
    return log.partition("Application startup complete")[0]


def compact_json(value: Any) -> str:
    """Return ``value`` as JSON in one line, keys sorted, so that equal settings look equal."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def exact_length_fields(min_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Return the fields for the length of an answer that vLLM, SGLang and TensorRT-LLM share.

    Every answer of exactly ``max_tokens`` needs no minimum once the end token is ignored; a minimum
    would make the engines mask end tokens in the logits of every step.
    """
    return {"ignore_eos": True} if min_tokens == max_tokens else {"min_tokens": min_tokens}


def engine_version(name: str, pages: Mapping[str, Any], path: str) -> dict[str, str]:
    """Return ``engine`` ("name version") and, for a special build, ``engine_build``.

    Raises:
        FlowError: if the page does not tell the version.
    """
    version = page(pages, path).get("version")
    if not isinstance(version, str) or not version:
        raise FlowError(f"the server's {path} tells no version: is it a {name} server?")
    public, _, build = version.partition("+")
    return {"engine": f"{name} {public}"} | ({"engine_build": build} if build else {})


def page(pages: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a JSON object that was read.

    Raises:
        FlowError: if there is none.
    """
    answer = pages.get(path)
    if not isinstance(answer, dict):
        raise FlowError(
            f"the server's {path} holds no settings: is another program listening on its port?"
        )
    return answer


def model_length(pages: Mapping[str, Any], path: str = "/v1/models") -> dict[str, int]:
    """Return ``max_model_len`` if the list of models tells it."""
    answer = pages.get(path)
    cards = answer.get("data") if isinstance(answer, dict) else None
    lengths = [card.get("max_model_len") for card in cards or [] if isinstance(card, dict)]
    return {"max_model_len": lengths[0]} if lengths and isinstance(lengths[0], int) else {}


def common_kv_dtype(text: str) -> str:
    """Return the common name of a KV cache precision."""
    return _KV_DTYPES.get(text, text)


def log_fact(pattern: re.Pattern[str], log: str) -> str | None:
    """Return the first group of the last match in the log, None without one."""
    found = pattern.findall(log)
    return found[-1] if found else None
