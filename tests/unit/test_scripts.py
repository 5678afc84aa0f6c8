"""Every command works by hand: --help, clear errors, quick imports, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8flow.pipeline import PROGRAMS
from write_conda_env import conda_env

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
COMMANDS = sorted(path.name for path in SCRIPTS.glob("*.py") if not path.name.startswith("write_"))
HEAVY = ("torch", "transformers", "modelopt", "datasets", "evaluate", "pyarrow", "aiohttp")
# Only the process of the embedded server imports these: they define classes of torch's classes.
# Loaded by vLLM itself.
ENGINE_ONLY = {"vllm_scheduler"}
SERVER_ONLY = {"attention", "engine", "fp8", "quantizer", "server"}


def call(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str) -> None:
    shown = call(name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout
    assert len(shown.stdout.splitlines()) > 5


@pytest.mark.parametrize("rule", PROGRAMS)
def test_bad_spec_is_one_clear_line_and_in_the_log(rule: str, tmp_path: Path) -> None:
    name = PROGRAMS[rule].scripts[0]
    help_text = call(name, "--help").stdout
    required = [w.strip("[],") for w in help_text.split() if w.startswith("--")]
    options: list[str] = []
    for option in dict.fromkeys(required):
        if option in help_text.split("options:")[0] and f"[{option}" not in help_text:
            options += [option, "x"] if option not in ("--spec", "--help") else []
    log = tmp_path / "x.log"
    failed = call(name, "--spec", "{", *options, "--log", str(log))
    assert failed.returncode == 1, failed.stderr
    assert "Traceback" not in failed.stderr
    assert "--spec is not JSON" in failed.stderr
    assert str(log) in failed.stderr
    assert "--spec is not JSON" in log.read_text()


def test_spec_of_another_rule_is_refused(tmp_path: Path) -> None:
    shown = call(
        "describe_system.py", "--spec", '{"rule": "quantize", "settings": {}}', "--output", "x"
    )
    assert shown.returncode == 1
    assert "this spec is for quantize" in shown.stderr


def test_every_module_imports_without_heavy_packages() -> None:
    modules = [
        ".".join(path.relative_to(SCRIPTS).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((SCRIPTS / "fp8flow").rglob("*.py"))
        if "metrics" not in path.parts
        and path.stem not in ENGINE_ONLY
        and not (path.parent.name == "embedded" and path.stem in SERVER_ONLY)
    ]
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr


def test_conda_environment_is_in_step_with_the_lock() -> None:
    assert (SCRIPTS.parents[1] / "envs" / "fp8flow.yaml").read_text() == conda_env()


def test_show_spec_names_what_exists() -> None:
    shown = call("show_spec.py", "quantise")
    assert shown.returncode == 1
    assert "quantize fp8" in shown.stderr


def test_signal_runs_cleanup_and_sets_the_exit_code(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        f"import sys, time\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from pathlib import Path\nfrom fp8flow.cli import script_main\n"
        "def run(arguments, spec):\n"
        "    Path('started').touch()\n"
        "    try:\n        time.sleep(60)\n"
        "    finally:\n        Path('cleaned').touch()\n"
        "sys.exit(script_main('x', lambda parser: None, run))\n"
    )
    spec = '{"rule": "job", "settings": {}}'
    job = subprocess.Popen([sys.executable, str(program), "--spec", spec], cwd=tmp_path)
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "cleaned").exists()
