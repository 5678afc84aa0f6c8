"""Documents: links lead somewhere, nothing is left to fill in, all rules and modules are named."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fp8flow.pipeline import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for p in ROOT.rglob("*.md") if not {".venv", "results"} & set(p.parts))
_LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
_PLACEHOLDER = re.compile(r"\b(TODO|TBD|FIXME|XXX|DEMO_TABLE|LOREM)\b", re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_exist_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in _LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert _PLACEHOLDER.findall(text) == []


def test_architecture_names_every_rule_and_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "workflow" / "scripts" / "fp8flow"
    modules = {p.stem if p.is_file() else p.name for p in package.iterdir()}
    modules -= {"__init__", "__pycache__", "errors", "log", "cli"}
    assert {rule for rule in PROGRAMS if rule not in text} == set()
    assert {name for name in modules if f"`{name}`" not in text} == set()


def test_make_targets_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z]+)\b", text)):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
