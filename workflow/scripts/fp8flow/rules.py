"""The rules of an MLPerf Inference round, read from ``resources/mlperf/<round>.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError

FOLDER = Path(__file__).resolve().parents[3] / "resources" / "mlperf"
SCOPES = ("submission", "scenario")
# Unproven: nothing speaks against it, but nothing here shows it; the submitter can attest it.
PASS, FAIL, UNPROVEN, NOT_APPLICABLE = "pass", "fail", "unproven", "not_applicable"
_ID = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")
_REQUIRED = ("id", "title", "scope", "source", "fix")
_OPTIONAL = ("limit", "scenarios", "divisions")


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: stable name in kebab-case.
        title: what is asked for, in a few words.
        scope: ``submission`` (judged once) or ``scenario`` (for each scenario).
        source: where the rule is written.
        fix: what to do when it is not met.
        limit: what the check compares with; its form belongs to the check.
        scenarios: the scenarios it applies to; None: all.
        divisions: the divisions it applies to; None: all.
    """

    id: str
    title: str
    scope: str
    source: str
    fix: str
    limit: Any = None
    scenarios: tuple[str, ...] | None = None
    divisions: tuple[str, ...] | None = None

    def applies(self, division: str, scenario: str | None) -> bool:
        """Tell whether the rule applies to a division and, if it is given, a scenario."""
        if self.divisions is not None and division not in self.divisions:
            return False
        return scenario is None or self.scenarios is None or scenario in self.scenarios


@dataclass(frozen=True)
class RuleBook:
    """All rules of a round, in their order, and the constants of the file."""

    round: str
    rules: tuple[Rule, ...]
    data: Mapping[str, Any]


def blocks(entry: Mapping[str, Any]) -> bool:
    """Tell whether an entry of a verdict keeps a submission from being submittable."""
    status = entry["status"]
    return status not in (PASS, NOT_APPLICABLE, UNPROVEN) or (
        status == UNPROVEN and not entry.get("attested")
    )


def unknown_ids(book: RuleBook, names: Iterable[str]) -> list[str]:
    """Return the names that are no rule of the round."""
    return sorted(set(names) - {rule.id for rule in book.rules})


def rules_file(round_name: str) -> Path:
    """Return the file of a round that fp8flow ships."""
    return FOLDER / f"{round_name}.yaml"


def load_rules(path: Path) -> RuleBook:
    """Read the rules of a round.

    Raises:
        FlowError: if the file cannot be read, or a rule is incomplete, unknown or double.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FlowError(f"cannot read the rules {path}: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise FlowError(f"{path} must be a mapping with a list of rules")
    rules = tuple(_rule(path, entry) for entry in data["rules"])
    ids = [rule.id for rule in rules]
    if double := sorted({name for name in ids if ids.count(name) > 1}):
        raise FlowError(f"{path}: double rule ids: {', '.join(double)}")
    return RuleBook(str(data.get("round")), rules, data)


def _rule(path: Path, entry: Any) -> Rule:
    if not isinstance(entry, dict):
        raise FlowError(f"{path}: {entry!r} is no rule")
    name = entry.get("id")
    where = f"{path}, rule {name!r}"
    if not isinstance(name, str) or not _ID.match(name):
        raise FlowError(f"{where}: the id must be in kebab-case")
    if missing := [key for key in _REQUIRED if not entry.get(key)]:
        raise FlowError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(entry.keys() - {*_REQUIRED, *_OPTIONAL}):
        raise FlowError(f"{where} has unknown keys: {', '.join(unknown)}")
    if entry["scope"] not in SCOPES:
        raise FlowError(f"{where}: scope is {entry['scope']!r}; allowed: {', '.join(SCOPES)}")
    values: dict[str, Any] = {key: " ".join(str(entry[key]).split()) for key in _REQUIRED}
    for key in ("scenarios", "divisions"):
        values[key] = tuple(entry[key]) if key in entry else None
    return Rule(**values, limit=entry.get("limit"))
