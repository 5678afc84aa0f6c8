"""What the report and the summary show, taken from the records; no layout here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8flow.records import Record
from fp8flow.report_plots import Queries

if TYPE_CHECKING:
    from fp8flow.report_plots import Floats

DASH = "–"  # noqa: RUF001 - an en dash stands for "not measured"
NOT_MEASURED = "not measured"  # as verdicts have it
SCENARIO_ORDER = ("Offline", "Server", "Interactive")
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
STATUS_ORDER = ("fail", "unproven", "pass", "not_applicable")
_NS_PER_MS = 1e6
_NO_ACCURACY = "no accuracy record for this scenario"


@dataclass(frozen=True)
class Cell:
    """One shown value.

    Attributes:
        text: value as shown, without unit.
        title: why there is none, or what exactly it is.
        state: ``good``, ``bad`` or empty.
    """

    text: str
    title: str = ""
    state: str = ""


@dataclass(frozen=True)
class Measurement:
    """What was measured for one variant in one scenario; None where there is no record."""

    variant: str
    scenario: str
    performance: Record | None = None
    accuracy_run: Record | None = None
    accuracy: Record | None = None

    @property
    def title(self) -> str:
        """Variant and scenario, for headings."""
        return f"{self.scenario}, {self.variant}"

    @property
    def records(self) -> list[Record]:
        """The records that exist."""
        return [r for r in (self.performance, self.accuracy_run, self.accuracy) if r is not None]


def collect(runs: Sequence[Record], accuracies: Sequence[Record]) -> list[Measurement]:
    """Sort records, which lie at ``<variant>/<scenario>/<mode>/``, into measurements.

    Variants keep the order in which they come; scenarios have the benchmark's order.
    """
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in runs:
        part = "performance" if record.result.get("mode") == "performance" else "accuracy_run"
        found.setdefault(_place(record), {})[part] = record
    for record in accuracies:
        found.setdefault(_place(record), {})["accuracy"] = record
    variants = list(dict.fromkeys(variant for variant, _ in found))
    order = sorted(found, key=lambda key: (variants.index(key[0]), scenario_rank(key[1])))
    return [
        Measurement(
            *key,
            performance=found[key].get("performance"),
            accuracy_run=found[key].get("accuracy_run"),
            accuracy=found[key].get("accuracy"),
        )
        for key in order
    ]


def _place(record: Record) -> tuple[str, str]:
    folders = record.path.absolute().parts
    return folders[-4], folders[-3]


def scenario_rank(scenario: str) -> tuple[int, str]:
    """Return a sort key that puts scenarios into the benchmark's order."""
    known = scenario in SCENARIO_ORDER
    return (SCENARIO_ORDER.index(scenario) if known else len(SCENARIO_ORDER), scenario)


def number(value: float, digits: int = 2) -> str:
    """Return a number with thousands separators and ``digits`` decimals."""
    return f"{value:,.{digits}f}"


def milliseconds(value_ns: float) -> str:
    """Return nanoseconds as milliseconds, with decimals only where they mean something."""
    value_ms = value_ns / _NS_PER_MS
    return number(value_ms, 2 if value_ms < 10 else 1 if value_ms < 1000 else 0)


def throughput(record: Record | None, key: str) -> Cell:
    """Return tokens/s (``output_tokens_per_s``) or samples/s (``samples_per_s``) of a run."""
    if record is None:
        return Cell(DASH, "no performance run")
    value = (record.result.get("throughput") or {}).get(key)
    if value is None:
        return Cell(DASH, why_not(record, key))
    return Cell(number(value), str(record.result["throughput"].get("definition", "")))


def why_not(record: Record, what: str) -> str:
    """Return why a run record lacks a value."""
    if record.result.get("reason"):
        return f"not measured: {record.result['reason']}"
    return f"not measured: the run record has no {what.replace('_', ' ')}"


def latency(record: Record | None, kind: str, statistic: str = "p99") -> Cell:
    """Return a latency in ms; its state says how it compares with the limit, if there is one.

    Args:
        record: a run record.
        kind: ``ttft``, ``tpot`` or ``latency``.
        statistic: key of the run record's percentiles.
    """
    if record is None:
        return Cell(DASH, "no performance run")
    value_ns = ((record.result.get("latency_ns") or {}).get(kind) or {}).get(statistic)
    if value_ns is None:
        return Cell(DASH, why_not(record, f"{kind.upper()} {statistic}"))
    limit_ns = limit_of(record, kind)
    if limit_ns is None or statistic not in ("p99", "early_stopping_p99"):
        return Cell(milliseconds(value_ns))
    state = "good" if value_ns < limit_ns else "bad"
    return Cell(milliseconds(value_ns), f"limit {milliseconds(limit_ns)} ms", state)


def limit_of(record: Record | None, kind: str) -> int | None:
    """Return the p99 limit of a run in ns; None where its scenario has none."""
    limits = (record.result.get("limits_ns") if record else None) or {}
    return limits.get(kind)


def rouge(record: Record | None, metric: str, gate: float | None = None, digits: int = 2) -> Cell:
    """Return a ROUGE score and, with a gate, whether it passes."""
    if record is None:
        return Cell(DASH, _NO_ACCURACY)
    value = record.result.get(metric)
    if value is None:
        return Cell(DASH, str(record.result.get("reason") or "not measured: no answer was scored"))
    state = "" if gate is None else "good" if value >= gate else "bad"
    return Cell(
        number(value, digits), "" if gate is None else f"gate {number(gate, digits)}", state
    )


def run_state(record: Record | None) -> Cell:
    """Return whether a run completed, and why not."""
    if record is None:
        return Cell("missing", "there is no record of this run", "bad")
    result = record.result
    if result.get("state") != "complete":
        return Cell(str(result.get("state", "unknown")), str(result.get("reason") or ""), "bad")
    if failed := (result.get("counts") or {}).get("failed"):
        return Cell("complete", f"{failed:,} queries failed", "bad")
    loadgen = result.get("loadgen") or {}
    if loadgen.get("valid") is False:
        why = str(loadgen.get("invalid_reason") or "it gives no reason").strip()
        return Cell("invalid", f"LoadGen says INVALID: “{why}”", "bad")
    return Cell("complete", "", "good")


def sorted_rules(verdict: Record) -> list[dict[str, Any]]:
    """Return the rules of a verdict: failing first, then passing, then not applicable."""
    rules: list[dict[str, Any]] = list(verdict.result.get("rules", []))
    return sorted(rules, key=lambda rule: _status_rank(rule.get("status", "")))


def _status_rank(status: str) -> int:
    return STATUS_ORDER.index(status) if status in STATUS_ORDER else -1


def load_queries(run: Record) -> Queries | None:
    """Read the per-query times of a run; None if it has none.

    Raises:
        FlowError: if a column is missing.
    """
    name = next((name for name in run.data["files"] if name.endswith("queries.parquet")), None)
    if name is None:
        return None
    return read_queries(run.root / name)


def read_queries(path: Path) -> Queries | None:
    """Read queries.parquet; None if it has no rows."""
    import numpy as np
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if table.num_rows == 0:
        return None
    times = {
        name: table[f"{name}_ns"].to_numpy().astype(np.float64)
        for name in ("scheduled", "issued", "first_token", "done")
        if f"{name}_ns" in table.column_names
    }
    start = times["issued"]
    if "scheduled" in times:
        start = np.where(np.isnan(times["scheduled"]), start, times["scheduled"])
    failed = np.array([status == "failed" for status in table["status"].to_pylist()])
    failed |= np.isnan(times["done"])
    end = np.where(np.isnan(times["done"]), start, times["done"])
    # An answer without text counts its end as its first token, as in the run record.
    first = np.where(np.isnan(times["first_token"]) & ~failed, end, times["first_token"])
    order = np.argsort(start, kind="stable")
    zero = start[order[0]]
    tokens = np.nan_to_num(table["output_tokens"].to_numpy().astype(np.float64))
    start_s, first_s, end_s = ((column[order] - zero) / 1e9 for column in (start, first, end))
    return Queries(start_s, first_s, end_s, tokens[order], failed[order])


@dataclass(frozen=True)
class SampleScores:
    """Scores of the answered samples of an accuracy run; arrays of shape (samples,).

    Attributes:
        scores: F-measure times 100 by metric name as shown.
        tokens: output tokens.
    """

    scores: dict[str, Floats]
    tokens: Floats


def load_sample_scores(accuracy: Record) -> SampleScores | None:
    """Read the scores of single samples; None if there are none."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    files = accuracy.data["files"]
    name = next((name for name in files if name.endswith("accuracy_samples.parquet")), None)
    if name is None:
        return None
    table = pq.read_table(accuracy.root / name)
    table = table.filter(pc.not_equal(table["state"], "missing"))
    if table.num_rows == 0:
        return None
    scores = {
        label: 100 * table[metric].to_numpy().astype(np.float64) for metric, label in ROUGE.items()
    }
    return SampleScores(scores, table["output_tokens"].to_numpy().astype(np.float64))


def accuracy_state(run: Record | None, accuracy: Record | None) -> Cell:
    """Return whether the accuracy run and its scoring are complete, and why not."""
    state = run_state(run)
    if state.state == "bad" or accuracy is None:
        return state
    if accuracy.result.get("state", "complete") != "complete":
        return Cell(str(accuracy.result["state"]), str(accuracy.result.get("reason") or ""), "bad")
    return state


@dataclass
class Node:
    """One product in the picture of what was made from what.

    Attributes:
        name: path of the record below the results folder.
        record: the record; None if only its digest is known.
        parents: names of the products it was made from.
        layer: 0 for sources, else one more than its deepest parent.
    """

    name: str
    record: Record | None
    parents: set[str] = field(default_factory=set)
    layer: int = 0


def provenance(records: Iterable[Record], results: Path) -> list[Node]:
    """Return the products by layer, each with what it was directly made from.

    An edge that a longer path already implies is left out. An input whose record is not among
    ``records`` appears under the name its consumer gave it.
    """
    nodes: dict[str, Node] = {}
    by_digest: dict[str, list[str]] = {}  # equal outcomes have equal digests
    for record in records:
        name = os.path.relpath(record.path.absolute(), results.absolute())
        nodes[name] = Node(name, record)
        by_digest.setdefault(record.digest, []).append(name)
    for node in list(nodes.values()):
        inputs: Mapping[str, str] = node.record.data["inputs"] if node.record else {}
        for label, digest in inputs.items():
            sources = by_digest.setdefault(digest, [label])
            for parent in set(sources) - {node.name}:
                nodes.setdefault(parent, Node(parent, None))
                node.parents.add(parent)
    for node in nodes.values():
        node.layer = _depth(node.name, nodes)
    direct = {name: _direct_parents(node, nodes) for name, node in nodes.items()}
    for name, parents in direct.items():
        nodes[name].parents = parents
    return sorted(nodes.values(), key=lambda node: node.layer)


def _ancestors(name: str, nodes: Mapping[str, Node]) -> Iterator[str]:
    for parent in nodes[name].parents:
        yield parent
        yield from _ancestors(parent, nodes)


def _depth(name: str, nodes: Mapping[str, Node]) -> int:
    parents = nodes[name].parents
    return 1 + max(_depth(parent, nodes) for parent in parents) if parents else 0


def _direct_parents(node: Node, nodes: Mapping[str, Node]) -> set[str]:
    implied = {name for parent in node.parents for name in _ancestors(parent, nodes)}
    return node.parents - implied


@dataclass(frozen=True)
class ReportInputs:
    """The records that the page is made from.

    Attributes:
        results: folder of all products; the page names records relative to it.
        folder: folder of the page; its links are relative to it.
        calibration: None when nothing was calibrated.
    """

    results: Path
    folder: Path
    model: Record
    dataset: Record
    checkpoint: Record
    verdict: Record
    runs: Sequence[Record] = ()
    accuracies: Sequence[Record] = ()
    calibration: Record | None = None

    @property
    def records(self) -> list[Record]:
        """All records, sources first."""
        shared = [self.model, self.dataset, self.calibration, self.checkpoint]
        found = [record for record in shared if record is not None]
        return [*found, *self.runs, *self.accuracies, self.verdict]

    def link(self, path: Path) -> str:
        """Return a link that stays right when the results folder moves."""
        relative = os.path.relpath(path.absolute(), self.folder.absolute())
        return Path(relative).as_posix()

    def name(self, record: Record) -> str:
        """Return the path of a record below the results folder."""
        return Path(os.path.relpath(record.path.absolute(), self.results.absolute())).as_posix()


def anchor(measurement: Measurement) -> str:
    """Return the id of a measurement's section; letters, digits and dashes."""
    return slug(f"{measurement.variant}-{measurement.scenario}")


def slug(text: str) -> str:
    """Return ``text`` as an id for HTML and SVG."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def gate(rules: Sequence[Mapping[str, Any]], scenario: str, metric: str) -> float | None:
    """Return the smallest passing value of an accuracy metric, as the verdict has it."""
    for rule in rules:
        same_scenario = rule.get("scenario") in (scenario, None)
        if same_scenario and str(rule["id"]).lower().endswith(metric.lower()):
            return smallest_passing(rule.get("limit"))
    return None


def smallest_passing(limit: Any) -> float | None:
    """Return the number in a limit such as 38.39, ``>= 38.39`` or reference and share of it."""
    if isinstance(limit, Mapping) and {"reference", "least"} <= limit.keys():
        return float(limit["reference"] * limit["least"])
    if isinstance(limit, int | float) and not isinstance(limit, bool):
        return float(limit)
    match = re.search(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?", str(limit))
    return float(match[0].replace(",", "")) if match else None


def value_text(value: Any) -> str:
    """Return a measured value or limit as text, one key a line; a dash for none."""
    if value is None or value in ("", [], {}, NOT_MEASURED):
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4f}".rstrip("0").rstrip(".")
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {value_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(value_text(item) for item in value)
    return str(value)
