"""The parts of the report that show one product each: runs, accuracy, checkpoint, provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8flow import report_data as data
from fp8flow import report_plots as plots
from fp8flow.records import Record
from fp8flow.report_data import (
    DASH,
    Cell,
    Measurement,
    ReportInputs,
    anchor,
    gate,
    slug,
    value_text,
)

STATISTICS = ("mean", "min", "p50", "p90", "p95", "p97", "p99", "p99.9", "max")

_ROUGE_DIGITS = 4  # as the reference rounds
_EARLY_STOPPING = "early_stopping_p99"

_NODE_WIDTH, _NODE_HEIGHT, _GAP_X, _GAP_Y = 172, 46, 18, 34


@dataclass(frozen=True)
class Figure:
    """A plot with the words that say what it shows."""

    title: str
    caption: str
    svg: str


@dataclass
class RunView:
    """One run as the page shows it."""

    anchor: str
    title: str
    state: Cell
    reasons: list[str] = field(default_factory=list)
    facts: list[tuple[str, Cell]] = field(default_factory=list)
    percentiles: list[tuple[str, list[Cell]]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    no_figures: str = ""
    details: list[tuple[str, str]] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)


def run_view(inputs: ReportInputs, measurement: Measurement, run: Record) -> RunView:
    """Return the section of one performance run."""
    view = RunView(anchor(measurement), measurement.title, data.run_state(run))
    view.reasons = run_reasons(run)
    view.facts = run_facts(run)
    view.percentiles = percentile_rows(run)
    queries = data.load_queries(run)
    if queries is None:
        view.no_figures = "No query of this run was recorded, so there is nothing to plot."
    else:
        view.figures = run_figures(view.anchor, run, queries)
    for key in ("settings", "server", "loadgen", "workload"):
        if run.result.get(key):
            text = json.dumps(run.result[key], indent=2, ensure_ascii=False, sort_keys=True)
            view.details.append((key, text))
    view.files = [(inputs.name(run), inputs.link(run.path))]
    view.files += [(name, inputs.link(run.root / name)) for name in sorted(run.data["files"])]
    return view


def run_reasons(run: Record) -> list[str]:
    """Return everything that is wrong with a run, in its own words."""
    result = run.result
    counts = result.get("counts") or {}
    reasons = [str(result["reason"])] if result.get("reason") else []
    kinds = counts.get("failures_by_kind") or {}
    reasons += [f"{count:,} queries failed: {kind}" for kind, count in sorted(kinds.items())]
    if counts.get("first_failure"):
        reasons.append(f"First failure: {counts['first_failure']}")
    if counts.get("empty"):
        reasons.append(f"{counts['empty']:,} answers were empty")
    loadgen = result.get("loadgen") or {}
    if loadgen.get("valid") is False:
        why = loadgen.get("invalid_reason")
        reasons.append("LoadGen says the result is INVALID" + (f": {why}" if why else ""))
    reasons += [
        f"Client and LoadGen disagree: {text}" for text in result.get("disagreements") or []
    ]
    return reasons + [f"LoadGen: {text}" for text in loadgen.get("errors") or []]


def run_facts(run: Record) -> list[tuple[str, Cell]]:
    """Return counts and conditions of a run with their units."""
    result = run.result
    counts, tokens = result.get("counts") or {}, result.get("tokens") or {}
    client, settings = result.get("client") or {}, result.get("settings") or {}
    duration, least = result.get("duration_s"), result.get("min_duration_s")
    share = client.get("cpu_share_of_one_core")
    return [
        ("Output tokens/s", data.throughput(run, "output_tokens_per_s")),
        ("Samples/s", data.throughput(run, "samples_per_s")),
        ("Queries completed", _of(counts.get("completed"), counts.get("issued"))),
        ("Queries failed", _plain(counts.get("failed"), 0, bad=bool(counts.get("failed")))),
        ("Measured duration", _plain(duration, 1, " s")),
        ("Minimum duration", _plain(least, 1, " s")),
        ("Output tokens", _plain(tokens.get("output_total"), 0)),
        ("Output tokens per query", _plain(tokens.get("output_mean"), 1)),
        ("Longest output allowed", _plain(settings.get("max_output_tokens"), 0, " tokens")),
        ("Client CPU", _plain(None if share is None else 100 * share, 0, " % of one core")),
        ("Attempt", _plain(result.get("attempt"), 0)),
        ("Settings", Cell(str(settings.get("source", DASH)), str(settings.get("why") or ""))),
    ]


def _plain(value: float | None, digits: int, unit: str = "", *, bad: bool = False) -> Cell:
    if value is None:
        return Cell(DASH, "not measured")
    return Cell(data.number(value, digits) + unit, "", "bad" if bad else "")


def _of(part: int | None, whole: int | None) -> Cell:
    if part is None or whole is None:
        return Cell(DASH, "not measured")
    return Cell(f"{part:,} of {whole:,}", "", "" if part == whole else "bad")


def percentile_rows(run: Record) -> list[tuple[str, list[Cell]]]:
    """Return TTFT, TPOT and latency in ms: statistics in order, early-stopping estimate last."""
    rows = []
    for kind, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("latency", "Latency")):
        cells = [data.latency(run, kind, statistic) for statistic in STATISTICS]
        estimate = data.latency(run, kind, _EARLY_STOPPING)
        if estimate.text == DASH:
            estimate = Cell(DASH, "too few queries for an early-stopping estimate, or none made")
        rows.append((label, [*cells, estimate]))
    return rows


def run_figures(name: str, run: Record, queries: plots.Queries) -> list[Figure]:
    """Return the plots of a run."""
    figures = []
    for kind, values in (("ttft", queries.ttft_ms), ("tpot", queries.tpot_ms)):
        if len(values):
            figures.append(_distribution(f"{name}-{kind}", run, kind, values))
    tokens_per_s = (run.result.get("throughput") or {}).get("output_tokens_per_s")
    figures.append(
        Figure(
            "Throughput over time",
            "Output tokens per second, and the requests behind them. Only first and last token "
            "of a query are timed; the ones between count as evenly spread.",
            plots.throughput(f"{name}-throughput", queries, tokens_per_s),
        )
    )
    count = len(queries.start_s)
    shown = (
        ""
        if count <= plots.SHOWN_QUERIES
        else (f" {plots.SHOWN_QUERIES} of {count:,} are shown, the failed and slowest among them.")
    )
    figures.append(
        Figure(
            "Timeline",
            f"Each line is one query: waiting for its first token, then generating.{shown}",
            plots.timeline(f"{name}-timeline", queries),
        )
    )
    if run.result.get("scenario") == "Offline":
        figures += [_distribution(f"{name}-latency", run, "latency", 1e3 * queries.latency_s)]
    else:
        figures.append(
            Figure(
                "Latency against start",
                "A rising cloud means that queries arrive faster than they are answered.",
                plots.latency_over_time(f"{name}-latency", queries),
            )
        )
    good = queries.tokens[~queries.failed]
    if len(good):
        most = (run.result.get("settings") or {}).get("max_output_tokens")
        figures.append(
            Figure(
                "Output length",
                "Output tokens per query; a heap at the cap means that answers were cut off.",
                plots.histogram(
                    f"{name}-tokens", good, "output tokens",
                    None if most is None else ("cap", float(most)),
                ),
            )
        )  # fmt: skip
    return figures


_DISTRIBUTION_TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "latency": "Latency, start to last token",
}


def _distribution(name: str, run: Record, kind: str, values: plots.Floats) -> Figure:
    percentiles = (run.result.get("latency_ns") or {}).get(kind) or {}
    p99_ns, limit_ns = percentiles.get("p99"), data.limit_of(run, kind)
    p99_ms = None if p99_ns is None else p99_ns / 1e6
    limit_ms = None if limit_ns is None else limit_ns / 1e6
    words = f"p99 {data.latency(run, kind).text} ms"
    words += f", limit {data.milliseconds(limit_ns)} ms" if limit_ns else "; no limit here"
    if start := percentiles.get("from"):
        words += f"; from the {start} time"
    if percentiles.get("source") == "loadgen":
        words += ", by LoadGen"
    words += "."
    label = f"{kind if kind == 'latency' else kind.upper()} (ms)"
    svg = plots.ecdf(name, values, label, p99_ms, limit_ms)
    return Figure(_DISTRIBUTION_TITLES[kind], f"Share of queries at or below: {words}", svg)


def accuracy_view(
    inputs: ReportInputs, measurement: Measurement, rules: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the accuracy of one measurement: scores with gates, counts, plots."""
    record, run = measurement.accuracy, measurement.accuracy_run
    result = record.result if record else {}
    responses = result.get("responses") or {}
    scores = []
    for metric, label in data.ROUGE.items():
        smallest = gate(rules, measurement.scenario, metric)
        cell = data.rouge(record, metric, smallest, _ROUGE_DIGITS)
        margin = DASH
        if smallest is not None and result.get(metric) is not None:
            margin = f"{result[metric] - smallest:+,.{_ROUGE_DIGITS}f}"
        gate_text = DASH if smallest is None else data.number(smallest, _ROUGE_DIGITS)
        scores.append({"label": label, "cell": cell, "gate": gate_text, "margin": margin})
    queries = data.load_queries(run) if run else None
    samples = data.load_sample_scores(record) if record else None
    reasons = run_reasons(run) if run else ["There is no accuracy run."]
    if result.get("reason"):
        reasons.append(f"Scoring: {result['reason']}")
    return {
        "anchor": f"{anchor(measurement)}-accuracy",
        "title": measurement.title,
        "state": data.accuracy_state(run, record),
        "reasons": reasons,
        "scores": scores,
        "counts": [
            (key.replace("_", " "), value_text(responses.get(key)))
            for key in ("expected", "scored", "missing", "empty", "duplicates")
        ],
        "gen_len": value_text(result.get("gen_len")),
        "figures": accuracy_figures(anchor(measurement), samples, queries),
        "files": [(inputs.name(r), inputs.link(r.path)) for r in (run, record) if r is not None],
    }


def accuracy_figures(
    name: str, samples: data.SampleScores | None, queries: plots.Queries | None
) -> list[Figure]:
    """Return the plots of an accuracy run; the first goes beside the table of scores."""
    figures = []
    if samples is not None:
        svg = plots.score_histograms(f"{name}-rouge", samples.scores)
        caption = "How the scores of single samples spread; the metric is their mean."
        figures.append(Figure("ROUGE by sample", caption, svg))
    if queries is not None and len(good := queries.tokens[~queries.failed]):
        svg = plots.histogram(f"{name}-accuracy-tokens", good, "output tokens")
        figures.append(Figure("Output length", "Output tokens per answer.", svg))
    if samples is not None:
        label = data.ROUGE["rouge1"]
        svg = plots.score_by_length(
            f"{name}-rouge-length", samples.tokens, samples.scores[label], label
        )
        caption = "Each dot is one sample; a column of dots at the cap was cut off."
        figures.append(Figure("ROUGE-1 against output length", caption, svg))
    return figures


_SCALES = {
    "weight_scale": "Weight scales",
    "input_scale": "Activation scales",
    "k_scale": "K cache scales",
    "v_scale": "V cache scales",
}


def checkpoint_view(inputs: ReportInputs) -> dict[str, Any]:
    """Return what there is to say about the quantized checkpoint, and what it was made from."""
    result = inputs.checkpoint.result
    return {
        "name": inputs.name(inputs.checkpoint),
        "link": inputs.link(inputs.checkpoint.path),
        "facts": checkpoint_facts(inputs),
        "notes": scale_notes(result),
        "figures": scale_figures(result),
        "modules": [
            (title, list(names))
            for key, title in (("quantized", "Quantized modules"), ("unquantized", "Not quantized"))
            if (names := (result.get("modules") or {}).get(key))
        ],
    }


def checkpoint_facts(inputs: ReportInputs) -> list[tuple[str, Cell]]:
    """Return precision and size of the checkpoint, and the rows of both data sets."""
    result, settings = inputs.checkpoint.result, inputs.checkpoint.spec.get("settings", {})
    claims, modules = result.get("claims") or {}, result.get("modules") or {}
    calibration = inputs.calibration.result if inputs.calibration else {}
    size, data_set = result.get("bytes"), inputs.dataset.result
    allowed = calibration.get("allowed_in_closed")
    return [
        ("Method", _word(settings.get("quantization", {}).get("method"))),
        ("Weights and activations", _word(claims.get("quant_algo"), "not quantized")),
        ("KV cache", _word(claims.get("kv_cache_quant_algo"), "not quantized")),
        ("Quantized modules", _plain(modules.get("quantized_count"), 0)),
        ("Parameters", _plain(result.get("parameters"), 0)),
        ("Weights on disk", _plain(None if size is None else size / 1e6, 1, " MB")),
        ("Evaluation rows", _plain(data_set.get("rows"), 0)),
        ("Calibration rows", _plain(calibration.get("rows"), 0)),
        (
            "Calibration allowed in Closed",
            Cell(value_text(allowed), str(calibration.get("reason") or "no calibration")),
        ),
    ]


def _word(value: Any, otherwise: str = "not in the record") -> Cell:
    return Cell(str(value)) if value else Cell(DASH, otherwise)


def scale_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Return plots of the scales by decoder layer; constant ones are said in words instead."""
    scales = result.get("scales") or {}
    layers = scales.get("layers") or []
    figures = []
    for kind, title in _SCALES.items():
        rows = [
            (entry["layer"], spread["min"], spread["median"], spread["max"])
            for entry in layers
            if (spread := entry.get(kind))
        ]
        if rows and not _constant(scales, kind):
            svg = plots.layer_ranges(f"scales-{slug(kind)}", rows, kind.replace("_", " "))
            caption = f"{title} by decoder layer: smallest, median and largest over its modules."
            figures.append(Figure(title, caption, svg))
    saturated = [
        (entry["layer"], 100 * entry["saturation"])
        for entry in layers
        if entry.get("saturation") is not None
    ]
    if saturated:
        svg = plots.layer_bars("scales-saturation", saturated, "weights at the limit (%)")
        caption = "Share of FP8 weights whose magnitude is 448, the largest that E4M3 has."
        figures.append(Figure("Saturated weights", caption, svg))
    return figures


def _constant(scales: Mapping[str, Any], kind: str) -> bool:
    total = (scales.get("total") or {}).get(kind) or {}
    return bool(total) and total["min"] == total["max"]


def scale_notes(result: Mapping[str, Any]) -> list[str]:
    """Return sentences on scales that are absent or all the same."""
    scales = result.get("scales") or {}
    if not any((scales.get("total") or {}).get(kind) for kind in _SCALES):
        return ["The checkpoint holds no scales: nothing in it is quantized."]
    notes = []
    for kind, title in _SCALES.items():
        total = (scales.get("total") or {}).get(kind)
        if not total:
            notes.append(f"{title}: none in the checkpoint.")
        elif _constant(scales, kind):
            notes.append(f"{title}: all {total['count']:,} are {total['min']:g}.")
    return notes


def product_row(inputs: ReportInputs, record: Record) -> dict[str, Any]:
    """Return the provenance of one product."""
    tools = record.data.get("tools") or {}
    host = record.data.get("host") or {}
    return {
        "name": inputs.name(record),
        "link": inputs.link(record.path),
        "rule": record.data["rule"],
        "digest": record.digest,
        "tools": ", ".join(f"{name} {version}" for name, version in sorted(tools.items())) or DASH,
        "host": host.get("hostname", DASH),
        "host_title": ", ".join(f"{key} {value}" for key, value in sorted(host.items())),
        "started": str(record.data["started_at"]).replace("T", " ").replace("+00:00", " UTC"),
        "duration": data.number(record.data["duration_s"], 1),
    }


def graph(inputs: ReportInputs) -> dict[str, Any]:
    """Return boxes and lines of the provenance picture, in SVG units, sources on top."""
    nodes = data.provenance(inputs.records, inputs.results)
    layers = [[n for n in nodes if n.layer == k] for k in range(nodes[-1].layer + 1)]
    width = max(len(layer) for layer in layers) * (_NODE_WIDTH + _GAP_X) + _GAP_X
    boxes = {}
    for depth, layer in enumerate(layers):
        used = len(layer) * (_NODE_WIDTH + _GAP_X) - _GAP_X
        for position, node in enumerate(layer):
            x = (width - used) / 2 + position * (_NODE_WIDTH + _GAP_X)
            boxes[node.name] = _box(inputs, node, x, _GAP_X + depth * (_NODE_HEIGHT + _GAP_Y))
    edges = [
        _edge(boxes[parent], boxes[node.name]) for node in nodes for parent in sorted(node.parents)
    ]
    height = len(layers) * (_NODE_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _GAP_X
    return {"boxes": list(boxes.values()), "edges": edges, "width": width, "height": height}


def _box(inputs: ReportInputs, node: data.Node, x: float, y: float) -> dict[str, Any]:
    parts = node.name.removesuffix(".json").removesuffix("/manifest").split("/")
    record = node.record
    return {
        "x": x,
        "y": y,
        "width": _NODE_WIDTH,
        "height": _NODE_HEIGHT,
        "label": f"{parts[1]}, {parts[0]}" if len(parts) > 3 else "/".join(parts),
        "detail": record.data["rule"] if record else "input",
        "title": f"{node.name}, digest {record.digest}" if record else f"{node.name} (not shown)",
        "link": inputs.link(record.path) if record else None,
        "state": "bad" if record and record.result.get("state") == "failed" else "",
    }


def _edge(parent: Mapping[str, Any], child: Mapping[str, Any]) -> str:
    start_x, start_y = parent["x"] + _NODE_WIDTH / 2, parent["y"] + _NODE_HEIGHT
    end_x, end_y = child["x"] + _NODE_WIDTH / 2, child["y"]
    middle = (start_y + end_y) / 2
    return (
        f"M{start_x:g} {start_y:g}C{start_x:g} {middle:g} {end_x:g} {middle:g} {end_x:g} {end_y:g}"
    )
