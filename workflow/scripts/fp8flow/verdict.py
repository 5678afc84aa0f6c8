"""The verdict: every rule of the round with pass, fail or not applicable, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.evidence import FAIL, NOT_APPLICABLE, Evidence, Finding
from fp8flow.rules import Rule, RuleBook
from fp8flow.scenario_checks import SCENARIO_CHECKS
from fp8flow.submission_checks import SUBMISSION_CHECKS

_WIDEST = 44


def _known(book: RuleBook) -> None:
    """Check that the file and the code have the same rules.

    Raises:
        FlowError: naming rules without a check, and checks without a rule.
    """
    checks = {"scenario": SCENARIO_CHECKS.keys(), "submission": SUBMISSION_CHECKS.keys()}
    for scope, known in checks.items():
        listed = {rule.id for rule in book.rules if rule.scope == scope}
        if listed != set(known):
            raise FlowError(
                f"the rules of {book.round} and the checks differ in the {scope} scope: "
                f"{', '.join(sorted(listed ^ set(known)))}"
            )


def _entry(rule: Rule, scenario: str | None, finding: Finding) -> dict[str, Any]:
    names = {"id": rule.id, "title": rule.title, "scenario": scenario}
    return {**names, **asdict(finding), "source": rule.source, "fix": rule.fix}


def _judged(rule: Rule, evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Yield the outcome of a rule, for each scenario if it is a scenario's."""
    if rule.scope == "submission":
        finding = Finding(NOT_APPLICABLE, None, None)
        if rule.applies(evidence.division, None):
            finding = SUBMISSION_CHECKS[rule.id](evidence, rule.limit)
        yield _entry(rule, None, finding)
        return
    for name, scenario in evidence.scenarios.items():
        finding = Finding(NOT_APPLICABLE, None, None)
        if rule.applies(evidence.division, name):
            finding = SCENARIO_CHECKS[rule.id](evidence, scenario, rule.limit)
        yield _entry(rule, name, finding)


def judge(book: RuleBook, evidence: Evidence) -> dict[str, Any]:
    """Return the result of a verdict record.

    Returns:
        ``submittable``: whether no rule fails; ``rules``: id, title, scenario (None: of the
        whole submission), status (pass, fail, not_applicable), measured, limit, source, fix.

    Raises:
        FlowError: if the rules file and the checks do not fit together.
    """
    _known(book)
    rules = [entry for rule in book.rules for entry in _judged(rule, evidence)]
    return {
        "submittable": bool(rules) and all(rule["status"] != FAIL for rule in rules),
        "round": book.round,
        "rules": rules,
    }


def _short(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def failing_ids(result: Mapping[str, Any]) -> list[str]:
    """Return the ids of the failing rules, each once, in order."""
    failing = (rule["id"] for rule in result["rules"] if rule["status"] == FAIL)
    return list(dict.fromkeys(failing))


def table(result: Mapping[str, Any]) -> str:
    """Return the verdict as text: one line for each rule that is not met."""
    rules: Sequence[Mapping[str, Any]] = result["rules"]
    failing = [rule for rule in rules if rule["status"] == FAIL]
    applicable = sum(rule["status"] != NOT_APPLICABLE for rule in rules)
    head = "SUBMITTABLE" if result["submittable"] else "NOT SUBMITTABLE"
    lines = [f"{head}: {applicable - len(failing)} of {applicable} rules that apply are met"]
    if not failing:
        return lines[0]
    names = ("id", "scenario", "measured", "limit")
    rows: list[tuple[str, ...]] = [("rule", "scenario", "found", "asked for")]
    rows += [tuple(_short(rule[name]) for name in names) for rule in failing]
    widths = [max(len(row[k]) for row in rows) for k in range(len(names))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "What to do about each is in the verdict, under fix."])
