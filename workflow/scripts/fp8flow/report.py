"""The HTML report: one page that needs no network, made from the records of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fp8flow import report_data as data
from fp8flow import report_sections as sections
from fp8flow.records import Record
from fp8flow.report_data import DASH, Measurement, ReportInputs, anchor, gate, slug, value_text
from fp8flow.rules import UNPROVEN, blocks

TEMPLATES = Path(__file__).parents[3] / "resources" / "report"

PAGE = "index.html"


def render(inputs: ReportInputs, title: str) -> str:
    """Return the page.

    Args:
        inputs: the records.
        title: heading and document title.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # only ever given what report_plots drew
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))  # noqa: S704 - ours
    page = environment.get_template("index.html.j2").render(
        title=title, style=style, dash=DASH, **context(inputs)
    )
    return "\n".join(line.rstrip() for line in page.splitlines() if line.strip()) + "\n"


def context(inputs: ReportInputs) -> dict[str, Any]:
    """Return everything that the template shows."""
    measurements = data.collect(inputs.runs, inputs.accuracies)
    rules = data.sorted_rules(inputs.verdict)
    return {
        "banner": banner(inputs, rules),
        "about": about(inputs),
        "tiles": [tile(measurement, rules) for measurement in measurements],
        "summary": [summary_row(measurement, rules) for measurement in measurements],
        "rouge_names": list(data.ROUGE.values()),
        "rules": [rule_view(rule) for rule in rules],
        "rule_scenarios": rule_scenarios(rules),
        "rule_counts": rule_counts(rules),
        "runs": [
            sections.run_view(inputs, m, m.performance)
            for m in measurements
            if m.performance is not None
        ],
        "accuracies": [sections.accuracy_view(inputs, m, rules) for m in measurements],
        "statistics": list(sections.STATISTICS),
        "checkpoint": sections.checkpoint_view(inputs),
        "graph": sections.graph(inputs),
        "products": [sections.product_row(inputs, record) for record in inputs.records],
        "verdict_link": inputs.link(inputs.verdict.path),
    }


def rule_counts(rules: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of rules by status, the unproven ones only if there are any."""
    counts = Counter(rule["status"] for rule in rules)
    return {s: counts[s] for s in data.STATUS_ORDER if s != UNPROVEN or counts[s]}


def banner(inputs: ReportInputs, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the verdict in one sentence, and why."""
    failing: dict[str, dict[str, Any]] = {}
    for position, rule in enumerate(rules, 1):
        if blocks(rule):
            entry = {"title": rule.get("title") or rule["id"], "row": position, "scenarios": []}
            entry = failing.setdefault(str(rule["id"]), entry)
            entry["scenarios"] += [rule["scenario"]] if rule.get("scenario") else []
    applicable = sum(rule["status"] != "not_applicable" for rule in rules)
    submittable = bool(inputs.verdict.result["submittable"])
    settings = [record.spec.get("settings", {}) for record in (inputs.model, inputs.dataset)]
    demo = (
        str(settings[0].get("model", {}).get("source", "")).startswith("package:")
        and settings[1].get("dataset", {}).get("source") == "demo"
    )
    return {
        "submittable": submittable,
        "failing": list(failing.values()),
        "failures": sum(map(blocks, rules)),
        "applicable": applicable,
        "demo": demo and not submittable,
    }


def about(inputs: ReportInputs) -> list[tuple[str, str]]:
    """Return what was measured, where and when."""
    runs = [run for run in inputs.runs if run.data.get("host")] or [inputs.verdict]
    hosts = sorted({str(run.data["host"].get("hostname", DASH)) for run in runs})
    cpus = sorted({str(run.data["host"].get("cpu_count", DASH)) for run in runs})
    names = {run.spec.get("settings", {}).get("model", {}).get("name") for run in runs}
    model = ", ".join(sorted(str(name) for name in names if name)) or DASH
    submission = inputs.verdict.spec.get("settings", {}).get("submission", {})
    benchmark = " ".join(
        str(submission[key]) for key in ("benchmark", "round", "division") if submission.get(key)
    )
    return [
        ("Model", model),
        ("Benchmark", benchmark or DASH),
        ("Host", f"{', '.join(hosts)} ({', '.join(cpus)} CPUs)"),
        ("Finished", finished_at(inputs.records)),
    ]


def finished_at(records: Sequence[Record]) -> str:
    """Return when the newest record was complete; the page's own time would change every byte."""
    ends = [
        datetime.fromisoformat(r.data["started_at"]) + timedelta(seconds=r.data["duration_s"])
        for r in records
    ]
    return max(ends).strftime("%Y-%m-%d %H:%M UTC")


def summary_row(
    measurement: Measurement, rules: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the cells of one line of the summary table."""
    run, accuracy = measurement.performance, measurement.accuracy
    return {
        "anchor": anchor(measurement),
        "variant": measurement.variant,
        "scenario": measurement.scenario,
        "tokens_per_s": data.throughput(run, "output_tokens_per_s"),
        "samples_per_s": data.throughput(run, "samples_per_s"),
        "ttft": data.latency(run, "ttft"),
        "tpot": data.latency(run, "tpot"),
        "ttft_limit": _limit_text(run, "ttft"),
        "tpot_limit": _limit_text(run, "tpot"),
        "rouge": [
            data.rouge(accuracy, metric, gate(rules, measurement.scenario, metric))
            for metric in data.ROUGE
        ],
        "state": data.run_state(run),
        "accuracy_state": data.accuracy_state(measurement.accuracy_run, accuracy),
    }


def _limit_text(record: Record | None, kind: str) -> str:
    limit_ns = data.limit_of(record, kind)
    return "" if limit_ns is None else data.milliseconds(limit_ns)


def tile(measurement: Measurement, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the key figures of one measurement, with bars for what has a limit."""
    run = measurement.performance
    return {
        **summary_row(measurement, rules),
        "title": measurement.title,
        "bars": [bar for kind in ("ttft", "tpot") if (bar := latency_bar(run, kind)) is not None],
    }


def latency_bar(record: Record | None, kind: str) -> dict[str, Any] | None:
    """Return a latency as a share of its limit; None without a value."""
    cell = data.latency(record, kind)
    if record is None or cell.text == DASH:
        return None
    value_ns = record.result["latency_ns"][kind]["p99"]
    limit_ns = data.limit_of(record, kind)
    return {
        "label": f"{kind.upper()} p99",
        "value": cell.text,
        "state": cell.state,
        "limit": None if limit_ns is None else data.milliseconds(limit_ns),
        "share": None if limit_ns is None else round(min(100.0, 100 * value_ns / limit_ns), 1),
    }


def rule_view(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule of the verdict as text."""
    return {
        "id": str(rule["id"]),
        "title": str(rule.get("title") or rule["id"]),
        "scenario": str(rule.get("scenario") or ""),
        "group": slug(str(rule.get("scenario") or "")) or "all",
        "status": rule["status"],
        "measured": value_text(rule.get("measured"))
        + ("; attested by the submitter" if rule.get("attested") else ""),
        "limit": value_text(rule.get("limit")),
        "fix": str(rule.get("fix") or "") if blocks(rule) else "",
        "source": str(rule.get("source") or ""),
    }


def rule_scenarios(rules: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """Return slug, name and number of rules of each scenario; the tree as a whole comes first."""
    counts = Counter(str(rule.get("scenario") or "") for rule in rules)
    ordered = sorted(counts, key=lambda name: (name != "", *data.scenario_rank(name)))
    return [
        (
            slug(name) or "all",
            name or "Submission",
            sum((r.get("scenario") or "") == name for r in rules),
        )
        for name in ordered
    ]
