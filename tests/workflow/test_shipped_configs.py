"""The configurations that are shipped: complete plans, nothing of the demo in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan import REPOSITORY, copy_checkout, execute

from fp8flow.config import Config, demo_config
from fp8flow.config_docs import smallest_config
from fp8flow.config_file import load_config

SHIPPED = ("h200.yaml", "h200-vllm.yaml", "h200-synthetic.yaml")
# The demo and the cases share the submitted variant's name, and nothing else that the demo sets.
SHARED = {"submission.variant"}
JOBS_PER_SCENARIO = ("run_performance", "run_accuracy", "score_accuracy")


def config_path(name: str) -> Path:
    return REPOSITORY / "config" / name


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= leaves(item, f"{prefix}{key}.")
    return found


def demo_values() -> dict[str, Any]:
    """Return what the demo sets to other values than the models' defaults."""
    defaults = Config.model_validate(smallest_config()).model_dump(mode="json")
    # What the smallest file must name has no default.
    required = leaves({k: v for k, v in smallest_config().items() if k != "variants"})
    plain = {k: v for k, v in leaves(defaults).items() if k not in required}
    demo = leaves(demo_config().model_dump(mode="json"))
    return {key: value for key, value in demo.items() if value != plain.get(key)}


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_of_the_demo_leaks(name: str) -> None:
    effective = leaves(load_config([config_path(name)]).config.model_dump(mode="json"))
    demo = demo_values()
    assert demo["harness.max_output_tokens"] == 48
    same = {key for key, value in demo.items() if effective.get(key) == value and value is not None}
    assert same <= SHARED


def test_the_synthetic_case_serves_as_the_real_one() -> None:
    real, synthetic = (load_config([config_path(f"h200-{n}.yaml")]) for n in ("vllm", "synthetic"))
    for variant in real.variants:
        assert synthetic.variants[variant].engine == real.variants[variant].engine
        assert synthetic.variants[variant].quantization == real.variants[variant].quantization


def test_results_are_apart() -> None:
    files = [yaml.safe_load(config_path(name).read_text()) for name in SHIPPED]
    names = [data["run"]["results"] for data in files]
    assert len(set(names)) == len(SHIPPED)
    ignored = subprocess.run(
        ["git", "check-ignore", *(f"{name}/" for name in names)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ignored.stdout.split() == [f"{name}/" for name in names]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("shipped") / "checkout")


@pytest.mark.parametrize("name", SHIPPED)
def test_plan_is_complete(name: str, fresh: Path) -> None:
    path = fresh / "config" / name
    loaded = load_config([path])
    jobs = execute(fresh, dry=True, configfiles=(path,))
    for variant, settings in loaded.variants.items():
        builds = getattr(settings.engine, "path", None) == "engine"
        assert (f"build_engine {variant}" in jobs) == builds
        assert {f"quantize {variant}", f"probe_server {variant}"} <= jobs
        for scenario in loaded.config.scenarios.chosen():
            assert {f"{job} {variant} {scenario}" for job in JOBS_PER_SCENARIO} <= jobs
    shared = {"fetch_model", "prepare_dataset", "prepare_calibration", "describe_system"}
    assert shared | {"assemble_submission", "validate_submission", "render_report"} <= jobs


@pytest.mark.parametrize("name", SHIPPED)
def test_command_line_plans_without_network_or_gpu(name: str, fresh: Path) -> None:
    command = [sys.executable, "-m", "snakemake", "--cores", "16", "-n", "--quiet", "all"]
    command += ["--configfile", str(fresh / "config" / name)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(fresh), "CUDA_VISIBLE_DEVICES": ""}
    # A proxy that nobody answers: any request to the network fails.
    environment |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        command, cwd=fresh, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
