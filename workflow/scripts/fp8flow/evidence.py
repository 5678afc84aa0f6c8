"""What a verdict is based on: the submission tree and the records it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.records import Record, read_record, verify_record
from fp8flow.rules import FAIL, PASS, UNPROVEN
from fp8flow.runs import build_run_result
from fp8flow.submission import Scenario, attempt_folder, group_scenarios

NOT_MEASURED = "not measured"
# Parts of a run's result that follow from the raw files of its attempt alone.
_RECOMPUTED = (
    "state",
    "counts",
    "duration_s",
    "throughput",
    "latency_ns",
    "limits_ns",
    "loadgen",
    "settings",
    "measured_from",
    "client",
)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: status, what was found, what was asked for; plain JSON types."""

    status: str
    measured: Any
    limit: Any


def found(good: bool, measured: Any, limit: Any) -> Finding:
    """Return pass or fail."""
    return Finding(PASS if good else FAIL, measured, limit)


def doubtful(finding: Finding, reason: str) -> Finding:
    """Return a pass as unproven, with the reason; what fails, fails for its own reason."""
    if finding.status != PASS:
        return finding
    return Finding(UNPROVEN, f"{finding.measured}; {reason}", finding.limit)


@dataclass
class Evidence:
    """Everything that the checks look at.

    Attributes:
        submission: record of the tree.
        scenarios: records of every scenario.
        problems: products that differ from their records.
        constants: of the rules file.
        recomputed: by scenario and mode, what differs when a run's result is computed again from
            the raw files of its attempt.
    """

    submission: Record
    scenarios: dict[str, Scenario]
    problems: list[str]
    constants: Mapping[str, Any]
    recomputed: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    _cache: dict[Path, Any] = field(default_factory=dict)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of the products that are in no tree: model, data sets, checkpoint, probe."""
        found_facts: Mapping[str, Any] = self.submission.result["facts"]
        return found_facts

    @property
    def division(self) -> str:
        """Division of the submission."""
        return str(self.submission.result["division"])

    @property
    def attested(self) -> list[str]:
        """Ids of the rules that the submitter attests where they cannot be proven."""
        return list(self.submission.result.get("attested") or ())

    @property
    def root(self) -> Path:
        """Folder ``<division>/<submitter>``."""
        return self.submission.root / str(self.submission.result["root"])

    def folder(self, scenario: str) -> Path:
        """Return the folder of a scenario; one that does not exist if the tree lacks it."""
        known = self.submission.result["scenarios"].get(scenario)
        return self.submission.root / known["folder"] if known else self.root / "results" / scenario

    def json_file(self, path: Path) -> dict[str, Any] | None:
        """Return a JSON object of the tree; None if it cannot be read."""
        if path not in self._cache:
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                data = None
            self._cache[path] = data if isinstance(data, dict) else None
        value: dict[str, Any] | None = self._cache[path]
        return value

    @property
    def system(self) -> dict[str, Any]:
        """Content of the systems JSON; empty if it cannot be read."""
        name = self.submission.result["system"]
        return self.json_file(self.root / "systems" / f"{name}.json") or {}


def _verified(path: Path, problems: list[str]) -> Record:
    try:
        return verify_record(path)
    except FlowError as error:
        record = read_record(path)
        lines = str(error).splitlines()
        problems.append(f"{path.parent.name}/{path.name}: {'; '.join(map(str.strip, lines[1:-1]))}")
        return record


def recomputed_differences(run: Record) -> list[str]:
    """Return which parts of a run's result its raw logs and queries do not confirm."""
    try:
        fresh = build_run_result(attempt_folder(run))
    except (FlowError, OSError, ValueError, KeyError, TypeError) as error:
        return [f"cannot be computed again: {error}"]
    fresh = json.loads(json.dumps(fresh))
    differing = [part for part in _RECOMPUTED if fresh.get(part) != run.result.get(part)]
    tokens, noted = fresh.get("tokens") or {}, run.result.get("tokens") or {}
    # The recount needs the tokenizer, and has rules of its own.
    names = {n for n in tokens.keys() | noted.keys() if not n.startswith("recount")}
    return differing + sorted(f"tokens.{n}" for n in names if tokens.get(n) != noted.get(n))


def gather(
    submission: Path, runs: Sequence[Path], accuracies: Sequence[Path], constants: Mapping[str, Any]
) -> Evidence:
    """Read and verify everything; what differs from its record is evidence, not an error.

    Args:
        submission: manifest of the tree.
        runs: run.json of performance and accuracy runs.
        accuracies: accuracy.json of every scenario.
        constants: content of the rules file.

    Raises:
        FlowError: if a record cannot be read at all, or a scenario is incomplete.
    """
    problems: list[str] = []
    tree = _verified(submission, problems)
    found_runs = [_verified(path, problems) for path in runs]
    scores = [_verified(path, problems) for path in accuracies]
    scenarios = group_scenarios(found_runs, scores)
    recomputed = {
        name: {
            "performance": recomputed_differences(scenario.performance),
            "accuracy": recomputed_differences(scenario.accuracy),
        }
        for name, scenario in scenarios.items()
    }
    return Evidence(tree, scenarios, problems, constants, recomputed)
