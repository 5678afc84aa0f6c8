"""What the contracts of the engines know, and single values held against it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

FOLDER: Final = Path(__file__).resolve().parents[3] / "resources" / "contracts"
TOOLS: Final = {
    "trtllm-build": "trtllm",
    "trtllm-serve": "trtllm",
    "quantize.py": "trtllm",
    "vllm serve": "vllm",
    "sglang": "sglang",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SI_SIZE = re.compile(r"(\d+(?:\.\d+)?)(k|[KMGT](?=i)|[MGT])(i?)")
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}
_LISTED: Final = 12

Severity = Literal["error", "warning"]
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a command line or a settings file.

    Attributes:
        what: what is wrong, with the flag or key and its value.
        fix: what to do about it.
        severity: ``error``: the tool refuses it, or the run would not be what was asked for;
            ``warning``: it works, but probably not as meant, or the facts are not certain.
    """

    what: str
    fix: str
    severity: Severity = "error"


@dataclass(frozen=True)
class Command:
    """What one version of a tool accepts on its command line."""

    tool: str
    version: str
    engine: str
    spec: Mapping[str, Any]
    flags: Mapping[str, Entry]
    rules: Sequence[Entry]


def versions(tool: str) -> tuple[str, ...]:
    """Return the versions of a tool that the contracts know.

    Raises:
        KeyError: the tool has no contract.
    """
    return tuple(document(TOOLS[tool])["versions"])


@cache
def document(name: str) -> dict[str, Any]:
    """Return the facts about one engine."""
    facts: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return facts


def applies(entry: Entry, version: str) -> bool:
    """Tell whether an entry is meant for a version; without ``versions`` it is for all."""
    return version in entry.get("versions", (version,))


@cache
def command_of(tool: str, version: str) -> Command:
    """Return what a version of a tool accepts."""
    name = TOOLS[tool]
    spec = document(name)["commands"][tool]
    entries = [entry for entry in spec["flags"] if applies(entry, version)]
    flags = {name: entry for entry in entries for name in (*entry["names"], *entry.get("off", ()))}
    rules = [rule for rule in spec["rules"] if applies(rule, version)]
    return Command(tool, version, name, spec, flags, rules)


@dataclass(frozen=True)
class Keys:
    """Which keys count: those of a version and, for TensorRT-LLM, of one of its two paths."""

    engine: str
    version: str
    path: str | None = None
    unknown: Severity = "error"


@cache
def keys_of(engine: str, version: str, name: str) -> dict[str, Entry]:
    """Return the keys of one group of settings."""
    entries = document(engine)["configs"][name]
    return {entry["key"]: entry for entry in entries if applies(entry, version)}


def unknown_version(tool: str, version: str) -> Finding:
    """Return the finding about a version that no contract knows."""
    known = ", ".join(versions(tool))
    return Finding(
        f"{tool}: nothing is known about version {version}",
        f"set engine.version to one of: {known}",
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean x?)``, or nothing."""
    spelled = {name.replace("_", "-").lower(): name for name in known}
    close = difflib.get_close_matches(word.replace("_", "-").lower(), spelled, n=1, cutoff=0.6)
    return f" (did you mean {spelled[close[0]]}?)" if close else ""


def _size(text: str) -> int:
    """Read ``1k`` (1000), ``1K`` (1024) and plain numbers, as vLLM does."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return int(text)
    number, unit = match.groups()
    if unit.islower():
        return int(float(number) * 1000 ** _POWERS[unit])
    return int(int(number) * 1024 ** _POWERS[unit.lower()])


def _si_size(text: str) -> int:
    """Read ``1k`` (1000), ``1M``, ``1Ki`` (1024), ``1Mi`` and plain numbers, as SGLang does."""
    match = _SI_SIZE.fullmatch(text)
    if match is None:
        return int(text)
    number, unit, binary = match.groups()
    power = _POWERS[unit.lower()]
    return int(number) * 1024**power if binary else int(float(number) * 1000**power)


def _size_or_auto(text: str) -> int:
    return -1 if text.lower() == "auto" else _size(text)


_READERS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "size": (_size, "a whole number, or one such as 8k or 8K"),
    "si_size": (_si_size, "a whole number, or one such as 8k or 8Ki"),
    "size_or_auto": (_size_or_auto, "a whole number, one such as 8k or 8K, or auto"),
    "json": (json.loads, "JSON"),
    "config": (json.loads, "a JSON object"),
    "str": (str, "text"),
}


def read_value(command: Command, name: str, entry: Entry, text: str) -> tuple[Any, list[Finding]]:
    """Return a flag's value and what is wrong with it."""
    reader, wanted = _READERS[entry["type"]]
    try:
        value = reader(text)
    except ValueError:
        return None, [Finding(f"{name} {text}: not {wanted}", f"give {name} {wanted}")]
    if entry["type"] == "config":
        if not isinstance(value, dict):
            return None, [Finding(f"{name} {text}: not {wanted}", f"give {name} {wanted}")]
        keys = Keys(command.engine, command.version)
        return value, list(mapping_findings(keys, entry["config"], value, name))
    return value, list(range_findings(name, entry, value))


def range_findings(name: str, entry: Entry, value: Any) -> Iterator[Finding]:
    """Yield what choices and bounds have against one value."""
    choices = entry.get("choices")
    if choices is not None and not _chosen(entry, value):
        close = did_you_mean(str(value), map(str, choices))
        shown = ", ".join(map(str, choices[:_LISTED])) + (", ..." if len(choices) > _LISTED else "")
        severity: Severity = "warning" if entry.get("open") else "error"
        spelled = json.dumps(value) if isinstance(value, bool) else value
        yield Finding(
            f"{name}: {spelled} is not a choice{close}", f"choose from: {shown}", severity
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    bounds = (
        ("ge", lambda limit: value >= limit, "at least"),
        ("gt", lambda limit: value > limit, "above"),
        ("le", lambda limit: value <= limit, "at most"),
        ("lt", lambda limit: value < limit, "below"),
    )
    for bound, holds, words in bounds:
        if bound in entry and not holds(entry[bound]):
            what = f"{name}: {value} is out of range"
            yield Finding(what, f"it must be {words} {entry[bound]}")


def _chosen(entry: Entry, value: Any) -> bool:
    fold = entry.get("fold")
    if fold == "upper":
        value = str(value).upper()
    elif fold == "lower":
        value = str(value).lower().replace("-", "_")
    return any(value == choice and type(value) is type(choice) for choice in entry["choices"])


def mapping_findings(
    keys: Keys, config: str, data: Mapping[str, Any], place: str
) -> Iterator[Finding]:
    """Yield what a set of known keys has against a mapping, and its mappings in turn."""
    known = keys_of(keys.engine, keys.version, config)
    for key, value in data.items():
        name = f"{place}.{key}" if place else str(key)
        entry = known.get(key)
        if entry is None or entry.get("path", keys.path) != keys.path:
            yield _unknown_key(keys, config, name, str(key), entry)
            continue
        yield from _key_findings(keys, name, entry, value)
    for key, entry in known.items():
        if entry.get("required") and key not in data:
            yield Finding(f"{place}: the key {key} is missing", f"add {key}")


def _unknown_key(keys: Keys, config: str, name: str, key: str, entry: Entry | None) -> Finding:
    if entry is not None:
        if entry["path"] == "pytorch":
            return Finding(
                f"{name} belongs to the PyTorch backend, the engine backend refuses it",
                "remove it, or set engine.path: pytorch",
            )
        return Finding(
            f"{name} belongs to the engine backend, the PyTorch backend refuses it",
            "remove it, or set engine.path: engine",
        )
    for renamed in document(keys.engine).get("yaml", {}).get("renamed", ()):
        if renamed["key"] == key and applies(renamed, keys.version):
            return Finding(f"{keys.version} has no key {name}", f"it is now {renamed['now']}")
    elsewhere = [
        version
        for version in document(keys.engine)["versions"]
        if version != keys.version and key in keys_of(keys.engine, version, config)
    ]
    what = f"{keys.version} has no key {name}"
    if keys.unknown == "warning":
        what = f"the key {name} is not known for {keys.version} (the list is not complete)"
    if elsewhere:
        return Finding(what, f"remove it; it exists in {', '.join(elsewhere)}", keys.unknown)
    known = keys_of(keys.engine, keys.version, config)
    return Finding(what + did_you_mean(key, known), "correct or remove it", keys.unknown)


def _key_findings(keys: Keys, name: str, entry: Entry, value: Any) -> Iterator[Finding]:
    types = entry["types"]
    if value is None and ("null" in types or keys.engine != "trtllm"):
        return
    if not any(_is_type(kind, value, entry) for kind in types):
        wanted = " or ".join(_TYPE_WORDS.get(kind, kind) for kind in types)
        what = f"{name}: {json.dumps(value, default=str)} is not {wanted}"
        yield Finding(what, f"give {name} {wanted}")
        return
    if "config" in entry and isinstance(value, Mapping):
        yield from mapping_findings(keys, entry["config"], value, name)
        return
    if "enum" not in types:
        yield from range_findings(name, entry, value)


_TYPE_WORDS: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "null": "null",
    "enum": "one of its names",
}
_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "dict": (dict,),
    "any": (object,),
}


def _is_type(kind: str, value: Any, entry: Entry) -> bool:
    if kind == "list":
        return _is_list(value, entry.get("items"))
    if kind == "enum":
        return _is_member(value, entry)
    if isinstance(value, bool) and kind not in ("bool", "any"):
        return False
    return isinstance(value, _PYTHON_TYPES.get(kind, ()))


def _is_list(value: Any, items: str | None) -> bool:
    return isinstance(value, list) and (
        items is None or all(_is_type(items, item, {}) for item in value)
    )


def _is_member(value: Any, entry: Entry) -> bool:
    named = isinstance(value, str) and value.upper() in entry["members"]
    return named or (not isinstance(value, bool) and value in entry.get("choices", ()))
