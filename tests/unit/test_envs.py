"""Environments: exact pins, conda forms in step, every tool of every job pinned, known images."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import write_conda_env
from fp8flow.code_hash import third_party
from fp8flow.config_engines import ENGINES
from fp8flow.launch import CONDA_ENVIRONMENTS
from fp8flow.pipeline import BACKENDS, DEMO_MODEL_LOCK, DISTRIBUTIONS, PROGRAMS
from fp8flow.tools import locked_versions

ROOT = Path(__file__).resolve().parents[2]
ENVS = ROOT / "envs"
SCRIPTS = ROOT / "workflow" / "scripts"
GPU_LOCKS = ("vllm.lock", "sglang.lock")
IMAGE = re.compile(r"docker://[a-z0-9.-]+(/[a-z0-9._-]+)+:[A-Za-z0-9._-]+")


def requirements(name: str) -> dict[str, Requirement]:
    lines = (ENVS / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in found}


@pytest.mark.parametrize("lock", CONDA_ENVIRONMENTS)
def test_conda_environment_is_in_step_and_pins_exactly(lock: str) -> None:
    path = ENVS / CONDA_ENVIRONMENTS[lock]
    assert path.read_text(encoding="utf-8") == write_conda_env.conda_env(lock)
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(data) == {"channels", "dependencies"}
    assert data["channels"] == ["conda-forge"]
    python, pip, pinned = data["dependencies"]
    assert (python, pip, set(pinned)) == ("python=3.12", "pip", {"pip"})
    for line in pinned["pip"]:
        specifiers = list(Requirement(line).specifier)
        assert [s.operator for s in specifiers] == ["=="], line
        assert "*" not in specifiers[0].version, line


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==2.*", "-e .", "torch @ file:///x"])
def test_loose_pin_is_refused(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.lock").write_text(f"numpy==2.3.5\n{line}\n")
    monkeypatch.setattr(write_conda_env, "ENVS", tmp_path)
    with pytest.raises(ValueError, match="no exact pins"):
        write_conda_env.conda_env("x.lock")


@pytest.mark.parametrize("lock", CONDA_ENVIRONMENTS)
def test_lock_keeps_what_its_input_asks(lock: str) -> None:
    locked = requirements(lock)
    for name, wanted in requirements(lock.replace(".lock", ".in")).items():
        pinned = next(iter(locked[name].specifier)).version
        assert wanted.specifier.contains(pinned, prereleases=True), f"{name} {pinned}"


@pytest.mark.parametrize("lock", GPU_LOCKS)
def test_gpu_environment_has_all_that_the_workflow_needs(lock: str) -> None:
    own = set(requirements("requirements.in"))
    assert own <= set(requirements(lock)), own - set(requirements(lock))


@pytest.mark.parametrize("lock", CONDA_ENVIRONMENTS)
def test_lock_pins_every_tool_of_every_job(lock: str) -> None:
    # An engine's own package is in the lock of that engine only.
    backends = BACKENDS.keys() - ({"vllm", "sglang"} - {lock.removesuffix(".lock")})
    programs = [*PROGRAMS.values(), *(BACKENDS[name] for name in sorted(backends))]
    scripts = [s for p in programs for s in p.scripts if (SCRIPTS / s).exists()]
    names = {DISTRIBUTIONS.get(name, name) for name in third_party(SCRIPTS, scripts)}
    names |= {name for program in programs for name in program.more_tools}
    found = locked_versions([ENVS / lock, ROOT / DEMO_MODEL_LOCK], names)
    assert {"torch", "nvidia-modelopt", "mlcommons-loadgen"} <= set(found)


def engines() -> dict[str, dict[str, dict[str, object]]]:
    text = (ENVS / "engines.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=yaml.BaseLoader)


def test_engines_file_has_the_known_form() -> None:
    for versions in engines().values():
        for version, entry in versions.items():
            assert set(entry) == {"image", "evidence", "tools"}, version
            assert IMAGE.fullmatch(str(entry["image"]))
            assert str(entry["image"]).rpartition(":")[2].removeprefix("v") == version
            assert not str(entry["image"]).endswith(":latest")
            assert len(str(entry["evidence"])) > 10
            assert isinstance(entry["tools"], dict)
            for pin in entry["tools"].values():
                SpecifierSet(f"=={pin}")


@pytest.mark.parametrize("backend", ["trtllm", "vllm", "sglang"])
def test_every_version_of_the_configuration_has_an_image_and_a_contract(backend: str) -> None:
    annotation = ENGINES[backend].model_fields["version"].annotation
    allowed = set(annotation.__args__)  # type: ignore[union-attr]
    assert set(engines()[backend]) == allowed
    contract = yaml.safe_load((ROOT / "resources" / "contracts" / f"{backend}.json").read_text())
    assert allowed <= set(contract["versions"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_lock_has_an_engine_version_that_the_configuration_knows(engine: str) -> None:
    pinned = next(iter(requirements(f"{engine}.lock")[engine].specifier)).version
    assert pinned in engines()[engine]


@pytest.mark.parametrize("method", ["conda", "apptainer"])
def test_dry_run_with_deployment(method: str, tmp_path: Path) -> None:
    if shutil.which(method) is None:
        pytest.skip(f"{method} is not installed here: --sdm {method} was not tried")
    command = [sys.executable, "-m", "snakemake", "-n", "--sdm", method, "-d", str(tmp_path)]
    command += ["-s", str(ROOT / "Snakefile"), "--cores", "1"]
    command += ["--configfile", str(ROOT / "config" / "h200-vllm.yaml")]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
