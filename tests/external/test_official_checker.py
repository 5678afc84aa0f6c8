"""The official submission checkers accept the tree that we write; they miss nothing but TEST06.

Needs a clone of mlcommons/inference: set FP8FLOW_MLPERF_INFERENCE to it. Not in the default run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from result_tree import ResultTree, make_results

import assemble_submission
from fp8flow.cli import script_main

CLONE = os.environ.get("FP8FLOW_MLPERF_INFERENCE")
pytestmark = pytest.mark.skipif(not CLONE, reason="FP8FLOW_MLPERF_INFERENCE is not set")
NEW = ("-m", "submission_checker.main")
OLD = ("submission_checker_old.py",)
OK = "SUMMARY: submission looks OK"
# What both say about a scenario without TEST06, and what follows from it.
ABOUT_TEST06 = re.compile(
    r"TEST06|compliance|NoResults|SUMMARY: submission has errors", re.IGNORECASE
)


def check(program: tuple[str, ...], root: Path, work: Path) -> tuple[int, str]:
    command = [sys.executable, *program, "--input", str(root), "--version", "v6.1"]
    done = subprocess.run(
        [*command, "--csv", str(work / "summary.csv")],
        cwd=Path(str(CLONE)) / "tools" / "submission",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The tree alone: the older checker accepts nothing beside the division's folder."""
    tree: ResultTree = make_results(tmp_path / "results")
    add, run = assemble_submission.add_arguments, assemble_submission.run
    assert script_main("x", add, run, tree.assemble_arguments()) == 0
    shutil.copytree(tree.submission.parent / "closed", tmp_path / "root" / "closed")
    return tmp_path / "root"


def add_test06(root: Path) -> None:
    for scenario in ("Offline", "Server"):
        folder = root / "closed/acme/results/gpu-server/llama3.1-8b" / scenario / "TEST06"
        (folder / "accuracy").mkdir(parents=True)
        (folder / "accuracy/mlperf_log_accuracy.json").write_text("[]")
        (folder / "verify_accuracy.txt").write_text(
            "First token check pass: Skipped\nEOS check pass: True\n"
            "Sample length check pass: True\nTEST06 verification complete\n"
        )


@pytest.mark.parametrize("program", [NEW, OLD], ids=["checker", "older checker"])
def test_nothing_but_test06_is_missing(
    program: tuple[str, ...], root: Path, tmp_path: Path
) -> None:
    status, output = check(program, root, tmp_path)
    errors = [line for line in output.splitlines() if "ERROR" in line]
    assert status == 1
    assert errors
    assert [line for line in errors if not ABOUT_TEST06.search(line)] == []
    add_test06(root)
    status, output = check(program, root, tmp_path)
    assert (status, OK in output) == (0, True), output[-3000:]
