"""The verdict: every rule of the round with pass, fail, unproven or not applicable, and why.

An unproven rule blocks a submission as a failing one does, unless the submitter attests it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.evidence import Evidence, Finding
from fp8flow.log import get_logger
from fp8flow.rules import FAIL, NOT_APPLICABLE, UNPROVEN, Rule, RuleBook, blocks, unknown_ids
from fp8flow.scenario_checks import SCENARIO_CHECKS
from fp8flow.submission_checks import SUBMISSION_CHECKS

_WIDEST = 44

logger = get_logger(__name__)


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


def _entry(
    rule: Rule, scenario: str | None, finding: Finding, attested: Sequence[str]
) -> dict[str, Any]:
    names = {"id": rule.id, "title": rule.title, "scenario": scenario}
    said = finding.status == UNPROVEN and rule.id in attested
    return {
        **names,
        **asdict(finding),
        "attested": said,
        "source": rule.source,
        "fix": rule.fix,
    }


def _checked(rule: Rule, run: Callable[[], Finding]) -> Finding:
    """Return a check's finding; a check that cannot be made is a failing one, with the reason."""
    try:
        return run()
    except Exception as error:
        logger.exception("the rule %s could not be checked", rule.id)
        return Finding(FAIL, f"could not be checked: {type(error).__name__}: {error}", rule.limit)


def _judged(rule: Rule, evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Yield the outcome of a rule, for each scenario if it is a scenario's."""
    if rule.scope == "submission":
        finding = Finding(NOT_APPLICABLE, None, None)
        if rule.applies(evidence.division, None):
            finding = _checked(rule, partial(SUBMISSION_CHECKS[rule.id], evidence, rule.limit))
        yield _entry(rule, None, finding, evidence.attested)
        return
    for name, scenario in evidence.scenarios.items():
        finding = Finding(NOT_APPLICABLE, None, None)
        if rule.applies(evidence.division, name):
            run = partial(SCENARIO_CHECKS[rule.id], evidence, scenario, rule.limit)
            finding = _checked(rule, run)
        yield _entry(rule, name, finding, evidence.attested)


def judge(book: RuleBook, evidence: Evidence) -> dict[str, Any]:
    """Return the result of a verdict record.

    Returns:
        ``submittable``: whether no rule fails, or is unproven without being attested; ``rules``:
        id, title, scenario (None: of the whole submission), status (pass, fail, unproven,
        not_applicable), measured, limit, attested (unproven, and attested by the submitter),
        source, fix.

    Raises:
        FlowError: if the rules file and the checks do not fit together, or what is attested is no
            rule.
    """
    _known(book)
    if unknown := unknown_ids(book, evidence.attested):
        raise FlowError(
            f"submission.attested names {', '.join(unknown)}, which {book.round} has no rule for"
        )
    rules = [entry for rule in book.rules for entry in _judged(rule, evidence)]
    return {
        "submittable": bool(rules) and not any(map(blocks, rules)),
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


def unproven_ids(result: Mapping[str, Any]) -> list[str]:
    """Return the ids of the unproven rules, attested or not, each once, in order."""
    found = (rule["id"] for rule in result["rules"] if rule["status"] == UNPROVEN)
    return list(dict.fromkeys(found))


def table(result: Mapping[str, Any]) -> str:
    """Return the verdict as text: one line for each rule that is not met."""
    rules: Sequence[Mapping[str, Any]] = result["rules"]
    failing = [rule for rule in rules if blocks(rule)]
    attested = sum(bool(rule.get("attested")) for rule in rules)
    applicable = sum(rule["status"] != NOT_APPLICABLE for rule in rules)
    head = "SUBMITTABLE" if result["submittable"] else "NOT SUBMITTABLE"
    words = f"{head}: {applicable - len(failing)} of {applicable} rules that apply are met"
    lines = [words + (f", {attested} of them only attested" if attested else "")]
    if not failing:
        return lines[0]
    names = ("id", "scenario", "status", "measured", "limit")
    rows: list[tuple[str, ...]] = [("rule", "scenario", "status", "found", "asked for")]
    rows += [tuple(_short(rule[name]) for name in names) for rule in failing]
    widths = [max(len(row[k]) for row in rows) for k in range(len(names))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "What to do about each is in the verdict, under fix."])
