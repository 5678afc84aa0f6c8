"""A command line taken apart by the flags that a contract knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from fp8flow.contract_data import (
    Command,
    Entry,
    Finding,
    command_of,
    did_you_mean,
    read_value,
    versions,
)

_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Given:
    """A command line, taken apart.

    Attributes:
        values: name of the flag (each of its names) -> value; ``on``/``off`` for a bare flag; keys
            of a JSON value as ``--flag.key``; defaults included.
        names: what was given, as opposed to left at its default.
        spelled: first name of a flag -> the name it was given by.
        positionals: arguments without a flag.
        stray: whether an unknown flag makes the count of positionals meaningless.
    """

    values: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    spelled: dict[str, str] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    stray: bool = False


def arguments_of(command: Command, argv: Sequence[str]) -> tuple[list[str] | None, list[Finding]]:
    """Return what follows the program and its subcommand (None: it is another program)."""
    words = [PurePath(argument).name or argument for argument in argv]
    entries: list[list[str]] = command.spec["entry"]
    for entry in entries:
        for start in range(len(words) - len(entry) + 1):
            if words[start : start + len(entry)] == entry:
                return list(argv[start + len(entry) :]), []
    for entry in entries:
        if len(entry) > 1 and entry[0] in words and not entry[0].startswith("-"):
            what = f"{entry[0]}: the word `{' '.join(entry[1:])}` is missing"
            fix = command.spec.get("missing_word", f"write `{' '.join(entry)} ...`")
            return list(argv[words.index(entry[0]) + 1 :]), [Finding(what, fix)]
    spelled = " or ".join(f"`{' '.join(entry)}`" for entry in entries)
    what = f"the command does not run {command.tool}: {' '.join(argv[:3])}"
    return None, [Finding(what, f"start it with {spelled}")]


def _is_value(argument: str) -> bool:
    return not argument.startswith("-") or bool(_NUMBER.fullmatch(argument))


def parse(command: Command, arguments: list[str]) -> Given:
    """Take a command line apart; what is wrong with it stands in ``findings``."""
    given = Given()
    for name, known in command.flags.items():
        if "default" in known:
            given.values[name] = known["default"]
    tokens = _spelled(command, arguments)
    last_bare = None
    while tokens:
        token = tokens.pop(0)
        if _is_value(token):
            _take_positional(command, given, token, last_bare)
            continue
        name, _, text = token.partition("=")
        texts = [text] if "=" in token else None
        entry = command.flags.get(name)
        if entry is None:
            _take_unknown(command, given, name, texts, tokens)
            last_bare = None
            continue
        bare = entry["type"] in ("bool", "flag")
        last_bare = name if bare else None
        _note_use(given, name, entry)
        if bare:
            _take_bare(given, name, entry, texts)
        else:
            _take_values(command, given, name, entry, _following(entry, texts, tokens))
    return given


def _spelled(command: Command, arguments: list[str]) -> list[str]:
    """Return the arguments in the one spelling that the flags are known by."""
    spec = command.spec
    tokens = list(arguments)
    if spec.get("optimization_level"):
        tokens = list(_optimization_levels(tokens))
    if spec.get("underscores"):
        tokens = [_dashes(token) for token in tokens]
    return _undotted(tokens) if spec.get("dotted") else tokens


def _optimization_levels(tokens: list[str]) -> Iterator[str]:
    """Spell vLLM's ``-O2``, ``-O=2`` and ``-O 2`` out."""
    for token in tokens:
        if token.startswith("-O"):
            yield "--optimization-level"
            if level := token[2:].removeprefix("="):
                yield level
        else:
            yield token


def _dashes(token: str) -> str:
    if not token.startswith("--"):
        return token
    name = re.match(r"[^=.]*", token)
    end = name.end() if name else 0
    return token[:end].replace("_", "-") + token[end:]


def _undotted(tokens: list[str]) -> list[str]:
    """Join ``--option.key value`` arguments to one JSON value for each option, as vLLM does."""
    rest: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    while tokens:
        token = tokens.pop(0)
        name, equals, text = token.partition("=")
        if _is_value(token) or "." not in name:
            rest.append(token)
            continue
        if not equals:
            text = tokens.pop(0) if tokens else ""
        flag, *keys = name.removesuffix("+").split(".")
        value: Any = text.split(",") if name.endswith("+") else _json_or_text(text)
        level = nested.setdefault(flag, {})
        for key in keys[:-1]:
            level = level.setdefault(key, {})
        level[keys[-1]] = value
    for flag, value in nested.items():
        rest += [flag, json.dumps(value)]
    return rest


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _take_positional(command: Command, given: Given, token: str, after: str | None) -> None:
    given.positionals.append(token)
    most = command.spec["positionals"]["max"]
    if len(given.positionals) <= most or given.stray:
        return
    if after:
        what = f"{command.tool}: {after} takes no value, but {token!r} follows it"
        fix = f"write {after} alone"
    else:
        what = f"{command.tool}: {token!r} belongs to no flag"
        fix = "remove it, or put its flag before it"
    given.findings.append(Finding(what, fix))


def _take_unknown(
    command: Command, given: Given, name: str, texts: list[str] | None, tokens: list[str]
) -> None:
    given.stray = True
    if texts is None and tokens and _is_value(tokens[0]):
        tokens.pop(0)
    given.findings.append(_unknown_flag(command, name))


def _unknown_flag(command: Command, name: str) -> Finding:
    known_in = [
        version
        for version in versions(command.tool)
        if version != command.version and name in command_of(command.tool, version).flags
    ]
    what = f"{command.tool} {command.version} has no flag {name}"
    hint = command.spec.get("hints", {}).get(name)
    if hint:
        return Finding(what, hint)
    if known_in:
        return Finding(what, f"remove it; it exists in {', '.join(known_in)}")
    return Finding(what + did_you_mean(name, command.flags), "correct or remove it")


def _note_use(given: Given, name: str, entry: Entry) -> None:
    first = given.spelled.setdefault(entry["names"][0], name)
    if entry["names"][0] in given.names and not entry.get("repeat"):
        what = f"{name} is given twice" + ("" if first == name else f" (also as {first})")
        given.findings.append(Finding(what, "give it once: the last one would win silently"))
    if entry.get("deprecated"):
        given.findings.append(Finding(f"{name} is deprecated", "remove it", "warning"))
    if "unverified" in entry:
        what = f"{name}: not certain that this version has it ({entry['unverified']})"
        given.findings.append(Finding(what, "remove it unless you need it", "warning"))
    given.names |= {*entry["names"], *entry.get("off", ())}


def _take_bare(given: Given, name: str, entry: Entry, texts: list[str] | None) -> None:
    if texts is not None:
        what = f"{name} takes no value, but has {texts[0]!r}"
        off = entry.get("off", [])
        fix = f"write {name} alone" + (f", or {off[0]}" if off else ", or leave it out")
        given.findings.append(Finding(what, fix))
    state = "off" if name in entry.get("off", ()) else "on"
    given.values.update(dict.fromkeys(entry["names"], state))


def _following(entry: Entry, texts: list[str] | None, tokens: list[str]) -> list[str]:
    if texts is not None:
        return texts
    most = len(tokens) if entry.get("nargs") in ("+", "*") else 1
    taken: list[str] = []
    while tokens and len(taken) < most and _is_value(tokens[0]):
        taken.append(tokens.pop(0))
    return taken


def _take_values(command: Command, given: Given, name: str, entry: Entry, texts: list[str]) -> None:
    if not texts or (texts == [""] and entry["type"] != "str"):
        if entry.get("nargs") not in ("?", "*"):
            given.findings.append(Finding(f"{name} has no value", f"write {name} VALUE"))
        return
    values = []
    for text in texts:
        value, findings = read_value(command, name, entry, text)
        given.findings += findings
        values.append(value)
    value = values if entry.get("nargs") in ("+", "*") else values[0]
    for alias in entry["names"]:
        given.values[alias] = value
        if isinstance(value, dict):
            leaves = dict(_leaves(alias, value))
            given.values.update(leaves)
            given.names |= set(leaves)


def _leaves(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{prefix}.{key}"
        yield name, item
        if isinstance(item, dict):
            yield from _leaves(name, item)
