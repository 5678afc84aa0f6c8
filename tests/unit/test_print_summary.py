"""The table at the end of a run."""

import subprocess
import sys
from pathlib import Path

import pytest
from report_tree import make_tree

import print_summary
from fp8flow.report_data import Cell

SCRIPT = Path(print_summary.__file__)


def test_the_table_holds_the_records_numbers(tmp_path, capsys):
    tree = make_tree(tmp_path / "results")
    assert print_summary.main(["--results", str(tree.results)]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    head = next(line for line in lines if line.startswith("scenario"))
    rows = [line for line in lines if line.startswith(("Offline", "Server"))]
    assert [row.split()[0] for row in rows] == ["Offline", "Server"]
    for run in tree.runs:
        if run.result["mode"] == "performance":
            row = next(row for row in rows if row.startswith(run.result["scenario"]))
            start = head.index("tokens/s")
            tokens_per_s = run.result["throughput"]["output_tokens_per_s"]
            assert row[start : start + 8].strip() == f"{tokens_per_s:,.2f}"
            assert "31.20" in row and row.endswith("not submittable")
    assert "2 of 3 rules that apply are not met" in shown
    assert "\x1b" not in shown
    assert str(tree.results / "submission" / "verdict.json") in shown
    assert "report:     not made yet" in shown


def test_failures_are_explained(tmp_path, capsys):
    tree = make_tree(tmp_path / "results", failures=5)
    assert print_summary.main(["--results", str(tree.results)]) == 0
    shown = capsys.readouterr().out
    assert "Server fp8 performance run: 5 of 64 queries failed" in shown


def test_without_runs_it_says_what_to_do(tmp_path, capsys):
    assert print_summary.main(["--results", str(tmp_path / "none")]) == 1
    assert "run snakemake first" in capsys.readouterr().err


def test_without_verdict(tmp_path, capsys):
    tree = make_tree(tmp_path / "results")
    tree.shared["verdict"].path.unlink()
    assert print_summary.main(["--results", str(tree.results)]) == 0
    assert "no verdict yet" in capsys.readouterr().out


def test_from_the_command_line(tmp_path):
    tree = make_tree(tmp_path / "results")
    command = [sys.executable, str(SCRIPT), "--results", str(tree.results)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("not submittable") == 2
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("colour", [True, False])
def test_columns_line_up_with_and_without_colour(colour):
    cells = [Cell("Server"), Cell("fp8"), *[Cell("1", "", "bad")] * 7, Cell("ok"), Cell("no")]
    lines = print_summary.aligned([cells], colour=colour)
    assert ("\x1b[31m" in lines[2]) is colour
    plain = lines[2].replace("\x1b[31m", "").replace("\x1b[0m", "")
    end = lines[0].index("tokens/s") + len("tokens/s")
    assert plain[end - 1] == "1"
