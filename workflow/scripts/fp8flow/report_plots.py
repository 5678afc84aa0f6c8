"""The report's plots: static SVG whose colours are CSS variables, so that it follows the page.

Matplotlib draws with placeholder colours; afterwards each becomes a ``var(--...)`` of the page's
style sheet, ids that nothing refers to are dropped and the rest get the figure's name, so that
many figures fit into one page and equal data give equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Floats = np.ndarray[Any, np.dtype[np.float64]]

# Placeholder -> CSS variable.
COLOURS = {
    "#010101": "var(--ink)",
    "#010102": "var(--muted)",
    "#010103": "var(--grid)",
    "#010104": "var(--blue)",
    "#010105": "var(--orange)",
    "#010106": "var(--red)",
    "#010107": "var(--green)",
}
INK, MUTED, GRID, BLUE, ORANGE, RED, GREEN = COLOURS

SHOWN_QUERIES = 200
_ECDF_POINTS = 400
_BIN_WIDTHS_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_MAX_BINS = 80

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.visible": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 2,
    "legend.borderaxespad": 0.2,
    "figure.facecolor": "none",
}


@dataclass(frozen=True)
class Queries:
    """Per-query times of one run, in seconds from its first query, in order of start.

    All arrays have the shape (queries,).

    Attributes:
        start_s: scheduled time where LoadGen schedules, else issue time.
        first_s: first token; NaN where there was none.
        end_s: last token, or the moment the query failed.
        tokens: output tokens.
        failed: whether the query failed.
    """

    start_s: Floats
    first_s: Floats
    end_s: Floats
    tokens: Floats
    failed: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def duration_s(self) -> float:
        """From the first start to the last end."""
        return float(self.end_s.max())

    @property
    def ttft_ms(self) -> Floats:
        """Time to first token of the queries that did not fail."""
        return 1e3 * (self.first_s - self.start_s)[~self.failed]

    @property
    def latency_s(self) -> Floats:
        """Start to last token of the queries that did not fail."""
        return (self.end_s - self.start_s)[~self.failed]

    @property
    def tpot_ms(self) -> Floats:
        """Time per output token after the first, of the queries with at least two tokens."""
        chosen = ~self.failed & (self.tokens > 1)
        span_s = (self.end_s - self.first_s)[chosen]
        return 1e3 * span_s / (self.tokens[chosen] - 1)


def ecdf(
    name: str, values: Floats, label: str, p99: float | None, limit: float | None = None
) -> str:
    """Draw the share of queries at or below each value, with p50, p99 and the limit.

    Args:
        name: unique in the page; prefix of all ids.
        values: one per query, in the unit that ``label`` names.
        label: axis label with unit.
        p99: the 99th percentile as the run record has it.
        limit: largest allowed p99.
    """

    def draw(figure: Figure) -> None:
        import numpy as np

        axes = figure.subplots()
        shares = np.linspace(0, 100, min(_ECDF_POINTS, len(values)))
        axes.step(np.percentile(values, shares), shares, where="post", color=BLUE, linewidth=1.8)
        unit = label.rsplit(" ", 1)[-1].strip("()")
        median = float(np.median(values))
        axes.axvline(median, color=MUTED, linewidth=1, label=f"p50 {short(median)} {unit}")
        if p99 is not None:
            axes.axvline(
                p99, color=ORANGE, linewidth=1.4, linestyle="--", label=f"p99 {short(p99)} {unit}"
            )
        if limit is not None:
            axes.axvline(limit, color=RED, linewidth=1.6, label=f"limit {short(limit)} {unit}")
        _value_axis(axes, median, [float(values.min()), float(values.max()), p99, limit])
        axes.set(xlabel=label, ylabel="queries at or below (%)", ylim=(0, 101))
        _legend(axes)

    return _svg(name, draw)


def throughput(name: str, queries: Queries, mean: float | None) -> str:
    """Draw output tokens/s over time, and below it the requests that wait and that generate.

    Only the first and the last token of a query are timed; the ones between count as evenly
    spread.
    """

    def draw(figure: Figure) -> None:
        import numpy as np

        upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 2])
        width = bin_width(queries.duration_s)
        edges = np.arange(0, queries.duration_s + width, width)
        rates = np.diff(tokens_until(queries, edges)) / width
        upper.stairs(rates, edges, color=BLUE, linewidth=1.4)
        upper.stairs(rates, edges, color=BLUE, fill=True, alpha=0.15)
        if mean is not None:
            upper.axhline(
                mean, color=ORANGE, linewidth=1.4, linestyle="--", label=f"mean {short(mean)}"
            )
            _legend(upper)
        upper.set(ylabel=f"output tokens/s\n({width:g} s bins)", ylim=(0, None))
        times = np.linspace(0, queries.duration_s, 200)
        waiting, generating = in_flight(queries, times)
        lower.stackplot(
            times, generating, waiting, colors=[BLUE, MUTED], alpha=0.45, step="post",
            labels=["generating", "waiting for the first token"],
        )  # fmt: skip
        lower.set(xlabel="time since the first query (s)", ylabel="requests", ylim=(0, None))
        _legend(lower)

    return _svg(name, draw, height=3.35)


def timeline(name: str, queries: Queries) -> str:
    """Draw one line per query: waiting for its first token, then generating; failures red."""

    def draw(figure: Figure) -> None:
        import numpy as np

        axes = figure.subplots()
        chosen = choose(queries, SHOWN_QUERIES)
        rows = np.arange(len(chosen))
        start, end, failed = (
            column[chosen] for column in (queries.start_s, queries.end_s, queries.failed)
        )
        first = np.where(np.isnan(queries.first_s), queries.end_s, queries.first_s)[chosen]
        thickness = max(0.6, min(4.0, 170 / max(len(chosen), 1)))
        width: dict[str, Any] = {"linewidth": thickness}
        axes.hlines(rows, start, first, color=MUTED, alpha=0.45, label="waiting", **width)
        axes.hlines(rows, first, end, color=BLUE, label="generating", **width)
        if failed.any():
            axes.plot(end[failed], rows[failed], "x", color=RED, label="failed", markersize=5)
        shown = "query" if len(chosen) == len(queries.start_s) else "shown query"
        axes.set(xlabel="time since the first query (s)", ylabel=f"{shown}, in order of start")
        axes.set_ylim(len(chosen) - 0.2, -0.8)
        axes.grid(visible=False, axis="y")
        _legend(axes)

    return _svg(name, draw, height=3.35)


def latency_over_time(name: str, queries: Queries) -> str:
    """Draw TTFT and full latency of each query against its start."""

    def draw(figure: Figure) -> None:

        axes = figure.subplots()
        chosen = choose(queries, 4 * SHOWN_QUERIES)
        start, failed = queries.start_s[chosen], queries.failed[chosen]
        latency, ttft = queries.end_s[chosen] - start, queries.first_s[chosen] - start
        marks: dict[str, Any] = {"linestyle": "none", "markersize": 3.2, "alpha": 0.75}
        good = ~failed
        axes.plot(start[good], latency[good], marker="o", color=BLUE, label="latency", **marks)
        axes.plot(start[good], ttft[good], marker="^", color=ORANGE, label="TTFT", **marks)
        if failed.any():
            axes.plot(start[failed], latency[failed], "x", color=RED, label="failed")
        axes.set(xlabel="start of the query (s)", ylabel="seconds", ylim=(0, None))
        _legend(axes)

    return _svg(name, draw)


def histogram(name: str, values: Floats, label: str, mark: tuple[str, float] | None = None) -> str:
    """Draw how many queries have which value; ``mark`` is a labelled vertical line."""

    def draw(figure: Figure) -> None:
        import numpy as np

        axes = figure.subplots()
        axes.hist(
            values, bins=_histogram_edges(values).tolist(), color=BLUE, alpha=0.75, linewidth=0
        )
        mean = float(np.mean(values))
        axes.axvline(mean, color=ORANGE, linewidth=1.4, linestyle="--", label=f"mean {short(mean)}")
        if mark is not None:
            axes.axvline(mark[1], color=RED, linewidth=1.6, label=f"{mark[0]} {short(mark[1])}")
        axes.set(xlabel=label, ylabel="queries")
        _whole_numbers(axes.yaxis)
        _legend(axes)

    return _svg(name, draw)


def score_histograms(name: str, scores: Mapping[str, Floats]) -> str:
    """Draw how the scores (0 to 100) of single samples spread, one panel for each of 4 metrics."""

    def draw(figure: Figure) -> None:
        import numpy as np

        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, (label, values) in zip(panels.flat, scores.items(), strict=True):
            axes.hist(values, bins=np.linspace(0, 100, 26).tolist(), color=BLUE, alpha=0.75)
            mean = float(np.mean(values))
            axes.axvline(
                mean, color=ORANGE, linewidth=1.4, linestyle="--", label=f"mean {short(mean)}"
            )
            axes.set_title(label, loc="left", fontsize=9.5)
            axes.legend(loc="upper right")
            _whole_numbers(axes.yaxis)
        for axes in panels[-1]:
            axes.set(xlabel="score of one sample", xlim=(0, 100))
        for axes in panels[:, 0]:
            axes.set(ylabel="samples")

    return _svg(name, draw, height=3.7)


def score_by_length(name: str, tokens: Floats, scores: Floats, label: str) -> str:
    """Draw the score (0 to 100) of each sample against its output tokens."""

    def draw(figure: Figure) -> None:
        import numpy as np

        axes = figure.subplots()
        count = len(tokens)
        shown = np.unique(np.linspace(0, count - 1, min(count, 4 * SHOWN_QUERIES)).astype(np.int64))
        axes.plot(tokens[shown], scores[shown], "o", color=BLUE, markersize=3.2, alpha=0.7)
        axes.set(xlabel="output tokens", ylabel=label, ylim=(0, None))

    return _svg(name, draw)


def layer_ranges(name: str, layers: Sequence[tuple[int, float, float, float]], label: str) -> str:
    """Draw smallest, median and largest value by decoder layer.

    Args:
        name: unique in the page; prefix of all ids.
        layers: (layer, min, median, max) by layer; values above zero.
        label: axis label.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        numbers, low, middle, high = (list(column) for column in zip(*layers, strict=True))
        axes.fill_between(numbers, low, high, color=BLUE, alpha=0.2, linewidth=0, label="range")
        axes.plot(numbers, middle, color=BLUE, marker="o", markersize=3, label="median")
        axes.set(xlabel="decoder layer", ylabel=label)
        _whole_numbers(axes.xaxis)
        if min(low) > 0:
            axes.set_yscale("log")
            _few_log_ticks(axes, max(high) / min(low))
        _legend(axes)

    return _svg(name, draw)


def layer_bars(name: str, values: Sequence[tuple[int, float]], label: str) -> str:
    """Draw one value per decoder layer; ``values`` are (layer, value)."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.bar([layer for layer, _ in values], [v for _, v in values], color=BLUE, alpha=0.75)
        axes.set(xlabel="decoder layer", ylabel=label, ylim=(0, None))
        _whole_numbers(axes.xaxis)

    return _svg(name, draw)


def short(value: float) -> str:
    """Return a number with about three significant digits and thousands separators."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def bin_width(duration_s: float) -> float:
    """Return the smallest round bin width (s) that gives at most 80 bins; 1 s where that fits."""
    smallest = 1.0 if duration_s >= 15 else 0.1
    fitting = (w for w in _BIN_WIDTHS_S if w >= smallest and duration_s / w <= _MAX_BINS)
    return next(fitting, duration_s / _MAX_BINS)


def tokens_until(queries: Queries, times_s: Floats) -> Floats:
    """Return the output tokens of all completed queries up to each time; shape of ``times_s``."""
    import numpy as np

    complete = ~queries.failed & (queries.tokens > 0)
    first, done = queries.first_s[complete], queries.end_s[complete]
    tokens = queries.tokens[complete]
    span = np.maximum(done - first, 1e-9)
    totals = np.zeros(len(times_s))
    for position, time in enumerate(times_s):
        progress = np.clip((time - first) / span, 0, 1)
        totals[position] = np.sum((time >= first) * (1 + progress * (tokens - 1)))
    return totals


def in_flight(queries: Queries, times_s: Floats) -> tuple[Floats, Floats]:
    """Return how many requests wait for their first token and how many generate, at each time."""
    import numpy as np

    first = np.where(np.isnan(queries.first_s), queries.end_s, queries.first_s)
    started, generating, finished = (
        np.searchsorted(np.sort(column), times_s, side="right").astype(np.float64)
        for column in (queries.start_s, first, queries.end_s)
    )
    return started - generating, generating - finished


def choose(queries: Queries, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return at most ``most`` query positions: failures and slowest first, then evenly spread."""
    import numpy as np

    count = len(queries.start_s)
    if count <= most:
        return np.arange(count)
    latency = np.where(queries.failed, np.inf, queries.end_s - queries.start_s)
    worst = np.argsort(-latency, kind="stable")[: most // 4]
    spread = np.linspace(0, count - 1, most - len(worst)).astype(np.int64)
    return np.unique(np.concatenate([worst, spread]))


def _value_axis(axes: Axes, median: float, values: Sequence[float | None]) -> None:
    """Scale the axis of values; logarithmic when most of them would stick to its start."""
    shown = [value for value in values if value is not None and value > 0]
    if shown and max(shown) / median > 20:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    else:
        axes.set_xlim(0, max(shown, default=1.0) * 1.06)
        axes.locator_params(axis="x", nbins=7)
        axes.xaxis.set_major_formatter(lambda value, _: short(value))


def _histogram_edges(values: Floats) -> Floats:
    """Return bin edges; bins hold equally many whole numbers when the values are counts."""
    import numpy as np

    low, high = float(values.min()), float(values.max())
    if np.all(values == np.round(values)):
        width = max(1.0, np.ceil((high - low + 1) / 30))
        return np.arange(low - 0.5, high + 0.5 + width, width)
    return np.linspace(low, high, 25) if high > low else np.array([low - 0.5, low + 0.5])


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins="auto"))


def _few_log_ticks(axes: Axes, ratio: float) -> None:
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 200 else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.minorticks_off()


def _legend(axes: Axes) -> None:
    """Put the legend above the axes, where it can cover no data."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3)


def _svg(name: str, draw: Callable[[Figure], None], height: float = 2.75) -> str:
    """Return the figure as an ``<svg>`` element that takes the width of its container."""
    from io import StringIO

    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return themed(text.getvalue(), name)


def themed(svg: str, name: str) -> str:
    """Make Matplotlib's document an element for an HTML page: theme, ids, no fixed size."""
    root = ElementTree.fromstring(svg)  # noqa: S314 - Matplotlib's own output
    _tidy(root)
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r" font-family: [^;]*;", "", text)
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", text)
    for placeholder, variable in COLOURS.items():
        text = text.replace(placeholder, variable)
    return text


def _tidy(root: ElementTree.Element) -> None:
    """Drop namespaces, metadata, global styles and the fixed size."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: v for key, v in element.attrib.items()}
        element.tail = element.tail.strip() if element.tail else None
        if element.text and not element.text.strip():
            element.text = None
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
