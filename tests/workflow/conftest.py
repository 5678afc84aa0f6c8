"""A finished copy of the workflow, built once with stand-in programs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from plan import REPOSITORY, STUB, copy_checkout, execute


@pytest.fixture(scope="session")
def stub_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("stub") / "python"
    scripts = REPOSITORY / "workflow" / "scripts"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{scripts}" exec "{sys.executable}" "{STUB}" "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, stub_python: str) -> Path:
    checkout = copy_checkout(tmp_path_factory.mktemp("finished") / "checkout", stub_python)
    jobs = execute(checkout, dry=False)
    assert "run_performance fp8 Server" in jobs
    return checkout


@pytest.fixture
def checkout(finished: Path, tmp_path: Path) -> Path:
    """A private copy of the finished workflow, times kept."""
    return Path(shutil.copytree(finished, tmp_path / "checkout", symlinks=True))
