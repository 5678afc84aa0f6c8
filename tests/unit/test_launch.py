"""Engine commands in and out of containers; caches of servers."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from fp8flow import launch
from fp8flow.errors import FlowError
from fp8flow.launch import (
    cache_environment,
    engine_tools,
    environment_file,
    image_of,
    launcher,
)

ROOT = Path(__file__).resolve().parents[2]
# A stand-in for the program: it shows its words and what it was given of the environment.
SHOW = '#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep -E "^(PYTHON|CUDA|LD_|VISIBLE)" | sort\n'


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAUNCHER_VARIABLE", "IMAGES_VARIABLE", "CACHE_VARIABLE"):
        monkeypatch.delenv(getattr(launch, name), raising=False)


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(SHOW)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    work = tmp_path / "work dir"
    work.mkdir()
    monkeypatch.chdir(work)
    return program


def binds(words: list[str]) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == "--bind"]


def test_no_container_without_apptainer() -> None:
    assert launcher("vllm", "0.25.1", {"conda"}, ROOT) == []


@pytest.mark.parametrize("backend", ["transformers", "external"])
def test_backends_that_are_never_contained(
    backend: str, apptainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch.LAUNCHER_VARIABLE, "podman run x")
    assert launcher(backend, "", {"apptainer"}, ROOT) == []
    assert image_of(backend, "", ROOT) is None


def test_apptainer_command_runs_and_keeps_host_paths_out(
    apptainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/host")
    monkeypatch.setenv("CUDA_HOME", "/host/cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    words = launcher("trtllm", "1.0.0", ["apptainer"], ROOT)
    # As in a rule: through a shell, with a working directory that has a blank.
    shown = subprocess.run(
        shlex.join([*words, "trtllm-serve", "serve"]), shell=True, capture_output=True, text=True
    ).stdout.splitlines()
    image = shown.index("docker://nvcr.io/nvidia/tensorrt-llm/release:1.0.0")
    assert shown[:2] == ["exec", "--nv"]
    assert shown[image - 2 : image] == ["--pwd", str(Path.cwd())]
    assert shown[image + 1 : image + 3] == ["trtllm-serve", "serve"]
    assert "CUDA_VISIBLE_DEVICES=3" in shown
    assert "PYTHONNOUSERSITE=1" in shown
    assert not [line for line in shown if line.startswith(("PYTHONPATH=", "CUDA_HOME="))]


def test_folders_are_bound_once_with_their_targets(apptainer: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    Path("model").symlink_to(target)
    words = launcher("vllm", "0.25.1", {"apptainer"}, ROOT, [Path("model"), ROOT / "envs"])
    bound = binds(words)
    seen = [Path(path) for path in bound]
    for wanted in (Path.cwd(), ROOT, target):
        assert any(wanted.is_relative_to(path) for path in seen), wanted
    for path in seen:
        assert not [other for other in seen if other != path and path.is_relative_to(other)]


def test_temporary_and_cache_folders_are_bound(
    apptainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.tempfile, "tempdir", "/scratch-of-the-node")
    monkeypatch.setenv(launch.CACHE_VARIABLE, "/kept-caches")
    bound = binds(launcher("vllm", "0.25.1", {"apptainer"}, ROOT))
    assert {"/scratch-of-the-node", "/kept-caches"} <= set(bound)


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_paths_that_apptainer_cannot_bind(apptainer: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(FlowError, match="comma or colon"):
        launcher("vllm", "0.25.1", {"apptainer"}, ROOT, [Path("/other") / name])


def test_missing_apptainer_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FlowError, match=launch.LAUNCHER_VARIABLE):
        launcher("vllm", "0.25.1", {"apptainer"}, ROOT)


def test_pulled_image(apptainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.IMAGES_VARIABLE, str(tmp_path))
    with pytest.raises(FlowError, match=r"apptainer pull .*docker://vllm/vllm-openai:v0\.25\.1"):
        launcher("vllm", "0.25.1", {"apptainer"}, ROOT)
    (tmp_path / "vllm-0.25.1.sif").touch()
    assert launcher("vllm", "0.25.1", {"apptainer"}, ROOT)[-1] == f"{tmp_path}/vllm-0.25.1.sif"


def test_own_launcher_replaces_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.LAUNCHER_VARIABLE, "enroot start --env 'A=b c' '{image}'")
    words = launcher("sglang", "0.5.10.post1", {"apptainer"}, ROOT)
    assert words == ["enroot", "start", "--env", "A=b c", "lmsysorg/sglang:v0.5.10.post1"]


@pytest.mark.parametrize("text", ["docker run x", "sudo /usr/bin/docker run x", "srun -n1"])
def test_launchers_of_daemons_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.LAUNCHER_VARIABLE, text)
    with pytest.raises(FlowError, match="daemon"):
        launcher("vllm", "0.25.1", set(), ROOT)


def test_own_launcher_with_open_quote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.LAUNCHER_VARIABLE, "podman 'run")
    with pytest.raises(FlowError, match="no command line"):
        launcher("vllm", "0.25.1", set(), ROOT)


def test_unknown_version_lists_the_known() -> None:
    with pytest.raises(FlowError, match=r"1\.0\.0, 1\.2\.0, 1\.2\.1"):
        image_of("trtllm", "9.9", ROOT)


def test_tools_inside_an_image() -> None:
    tools = engine_tools("trtllm", "1.0.0", ROOT)
    assert tools["nvidia-modelopt"] == "0.33.*"
    assert tools["transformers"] == "4.53.1"
    assert tools["tensorrt-llm"] == "1.0.0"
    with pytest.raises(FlowError, match="stack: own"):
        engine_tools("vllm", "0.25.1", ROOT)


def test_environment_of_a_lock(tmp_path: Path) -> None:
    assert environment_file("envs/requirements.lock", ROOT) == ROOT / "envs" / "fp8flow.yaml"
    assert environment_file("envs/vllm.lock", ROOT) == ROOT / "envs" / "vllm.yaml"
    assert environment_file(str(tmp_path / "vllm.lock"), ROOT) is None
    assert environment_file("envs/own.lock", ROOT) is None


def test_caches_lie_below_the_scratch_and_exist(tmp_path: Path) -> None:
    variables = cache_environment(tmp_path / "job")
    folders = [Path(variables[name]) for name in launch._CACHE_FOLDERS]
    assert all(folder.is_dir() and folder.is_relative_to(tmp_path / "job") for folder in folders)
    assert not [name for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "TMPDIR") if name in variables]
    assert variables["HF_HUB_OFFLINE"] == variables["VLLM_NO_USAGE_STATS"] == "1"


def test_kept_caches_win_over_the_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.CACHE_VARIABLE, str(tmp_path / "kept"))
    variables = cache_environment(tmp_path / "job")
    assert variables["TRITON_CACHE_DIR"] == str(tmp_path / "kept" / "triton")
    assert not (tmp_path / "job").exists()


def test_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(launch.CACHE_VARIABLE, str(tmp_path / "file" / "x"))
    with pytest.raises(FlowError, match=launch.CACHE_VARIABLE):
        cache_environment(tmp_path)


def test_torch_and_transformers_read_these_names() -> None:
    """The names that the installed libraries know are really theirs."""
    import importlib.util

    def source(module: str, file: str) -> str:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        return (Path(spec.origin).parent / file).read_text(encoding="utf-8")

    assert "TORCHINDUCTOR_CACHE_DIR" in source("torch", "_inductor/runtime/cache_dir_utils.py")
    assert "TORCH_EXTENSIONS_DIR" in source("torch", "utils/cpp_extension.py")
    assert "HF_HUB_OFFLINE" in source("huggingface_hub", "constants.py")
    assert '"HF_MODULES_CACHE"' in source("transformers", "utils/hub.py")
