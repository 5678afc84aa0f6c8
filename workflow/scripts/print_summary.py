"""Print the result of a run as a short table, and where everything lies.

Without arguments it reads the folder ``results``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8flow.errors import FlowError
from fp8flow.records import Record, read_record
from fp8flow.report import PAGE
from fp8flow.report_data import DASH, ROUGE, Cell, collect, latency, rouge, run_state, throughput
from fp8flow.rules import blocks

_RED, _GREEN, _OFF = "\x1b[31m", "\x1b[32m", "\x1b[0m"
_SHOWN_ROUGE = ("rouge1", "rouge2", "rougeL")
_HEAD = [
    "scenario", "variant", "tokens/s", "samples/s", "TTFT p99 ms", "TPOT p99 ms",
    *(ROUGE[metric] for metric in _SHOWN_ROUGE), "run", "verdict",
]  # fmt: skip
_LEFT = {"scenario", "variant", "run", "verdict"}


def table(
    runs: Sequence[Record], accuracies: Sequence[Record], verdict: Record | None
) -> list[list[Cell]]:
    """Return the lines of the table, one for each variant and scenario."""
    lines = []
    for item in collect(runs, accuracies):
        run = item.performance
        lines.append(
            [
                Cell(item.scenario),
                Cell(item.variant),
                throughput(run, "output_tokens_per_s"),
                throughput(run, "samples_per_s"),
                latency(run, "ttft"),
                latency(run, "tpot"),
                *(rouge(item.accuracy, metric) for metric in _SHOWN_ROUGE),
                run_state(run),
                verdict_cell(verdict, item.variant),
            ]
        )
    return lines


def verdict_cell(verdict: Record | None, variant: str) -> Cell:
    """Return the verdict in two words; it is about one variant only."""
    if verdict is None:
        return Cell(DASH, "there is no verdict")
    if verdict.spec["settings"]["submission"]["variant"] != variant:
        return Cell(DASH, "another variant is submitted")
    good = verdict.result["submittable"]
    return Cell("submittable" if good else "not submittable", "", "good" if good else "bad")


def aligned(lines: Sequence[Sequence[Cell]], *, colour: bool) -> list[str]:
    """Return the table as lines of text with aligned columns."""
    rows = [[Cell(name) for name in _HEAD], *lines]
    widths = [max(len(row[k].text) for row in rows) for k in range(len(_HEAD))]
    shown = []
    for row in rows:
        parts = []
        for name, cell, width in zip(_HEAD, row, widths, strict=True):
            text = cell.text.ljust(width) if name in _LEFT else cell.text.rjust(width)
            start = {"bad": _RED, "good": _GREEN}.get(cell.state, "") if colour else ""
            parts.append(f"{start}{text}{_OFF if start else ''}")
        shown.append("  ".join(parts).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return [shown[0], rule, *shown[1:]]


def remarks(runs: Sequence[Record], verdict: Record | None) -> list[str]:
    """Return what the table cannot say: why runs failed, how many rules fail."""
    found = []
    for item in collect(runs, []):
        for name, run in (("performance", item.performance), ("accuracy", item.accuracy_run)):
            state = run_state(run)
            if run is not None and state.state == "bad":
                found.append(f"{item.scenario} {item.variant} {name} run: {state.title}")
    if verdict is None:
        found.append("no verdict yet: run snakemake")
    else:
        rules = verdict.result["rules"]
        failing = sum(map(blocks, rules))
        applicable = sum(rule["status"] != "not_applicable" for rule in rules)
        found.append(f"{failing} of {applicable} rules that apply are not met")
    return found


def places(results: Path) -> list[str]:
    """Return where the report, the verdict and the submission lie."""
    candidates = {
        "report": results / "report" / PAGE,
        "verdict": results / "submission" / "verdict.json",
        "submission": results / "submission",
    }
    return [
        f"{name + ':':12}{path if path.exists() else 'not made yet'}"
        for name, path in candidates.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when there was something to show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder")
    arguments = parser.parse_args(argv)
    results: Path = arguments.results
    try:
        runs = [read_record(path) for path in sorted(results.glob("*/*/*/run.json"))]
        accuracies = [read_record(path) for path in sorted(results.glob("*/*/*/accuracy.json"))]
        path = results / "submission" / "verdict.json"
        verdict = read_record(path) if path.exists() else None
        if not runs:
            raise FlowError(f"{results} holds no run; run snakemake first or give --results")
    except FlowError as error:
        print(error, file=sys.stderr)
        return 1
    lines = aligned(table(runs, accuracies, verdict), colour=sys.stdout.isatty())
    print("\n".join(["", *lines, "", *remarks(runs, verdict), *places(results)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
