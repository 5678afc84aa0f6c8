"""Where an engine's programs run: in the job's own environment, or inside a container.

Only the engine's own commands go into the container. The workflow and the load generator stay in
their environment, so an image needs nothing of fp8flow. Two variables change how, never what:
FP8FLOW_ENGINE_LAUNCHER (the words before the engine's command, instead of apptainer's) and
FP8FLOW_IMAGES (a folder with pulled images ``<backend>-<version>.sif``). FP8FLOW_CACHE_DIR keeps
the engines' caches between jobs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError

ENGINES_FILE = Path("envs/engines.yaml")
LAUNCHER_VARIABLE = "FP8FLOW_ENGINE_LAUNCHER"
IMAGES_VARIABLE = "FP8FLOW_IMAGES"
CACHE_VARIABLE = "FP8FLOW_CACHE_DIR"
# Lock file in envs/ -> its conda form.
CONDA_ENVIRONMENTS: Mapping[str, str] = {
    "requirements.lock": "fp8flow.yaml",
    "vllm.lock": "vllm.yaml",
    "sglang.lock": "sglang.yaml",
}
# These never start a program of their own: it is this one, or none at all.
_NOT_CONTAINED = ("transformers", "external")
# Their containers belong to a daemon: stopping the command would leave the server running.
_DAEMONS = {"docker", "nerdctl", "ctr", "srun"}
# Paths of the job's environment that mean nothing, or something else, inside an image.
_HOST_ONLY = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CC", "CXX", "MPLBACKEND"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
# Variable of an engine or its libraries -> folder below the cache.
_CACHE_FOLDERS = {
    "XDG_CACHE_HOME": "xdg",
    "XDG_CONFIG_HOME": "config",
    "CUDA_CACHE_PATH": "cuda",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "NUMBA_CACHE_DIR": "numba",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",
    "OUTLINES_CACHE_DIR": "outlines",
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm-config",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
    "TRTLLM_DG_CACHE_DIR": "tensorrt-llm-deep-gemm",
    "TLLM_LLMAPI_BUILD_CACHE_ROOT": "tensorrt-llm-builds",
    # Code that comes with a model (trust_remote_code) is copied there before it is imported.
    "HF_MODULES_CACHE": "hf-modules",
}
# What is served lies in folders, so no server has a reason to ask a hub or to report its use.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@cache
def _engines(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    import yaml

    try:
        # BaseLoader: a version such as 1.0 stays the text that it is.
        data: Any = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506
    except (OSError, yaml.YAMLError) as error:
        raise FlowError(f"{path} cannot be read: {error}") from error
    found: dict[str, dict[str, dict[str, Any]]] = data
    return found


def _engine(backend: str, version: str, checkout: Path) -> dict[str, Any]:
    path = checkout / ENGINES_FILE
    known = _engines(path).get(backend, {})
    if version not in known:
        listed = ", ".join(known) or "none"
        raise FlowError(f"{path} has no {backend} {version!r}; it has: {listed}. Add it there.")
    return known[version]


def image_of(backend: str, version: str, checkout: Path) -> str | None:
    """Return the ``docker://`` URL of an engine's image; None for a backend that needs none.

    Raises:
        FlowError: if envs/engines.yaml does not have that version.
    """
    if backend in _NOT_CONTAINED:
        return None
    image: str = _engine(backend, version, checkout)["image"]
    return image


def engine_tools(backend: str, version: str, checkout: Path) -> dict[str, str]:
    """Return the pinned tools inside an engine's image that quantize.

    Values are PEP 440 versions; ``0.33.*`` stands for a whole series.

    Raises:
        FlowError: if envs/engines.yaml does not have that version, or no such tools for it.
    """
    tools: dict[str, str] = _engine(backend, version, checkout)["tools"]
    if not tools:
        raise FlowError(
            f"quantization.stack: engine: nothing is known of a ModelOpt inside {backend} "
            f"{version}; use stack: own, or name the tools in {checkout / ENGINES_FILE}"
        )
    return dict(sorted(tools.items()))


def environment_file(lock: str, checkout: Path) -> Path | None:
    """Return the conda environment that follows a lock file; None if the lock is the user's own.

    Args:
        lock: value of ``run.lock``, relative to the checkout.
        checkout: root of fp8flow.
    """
    envs = (checkout / "envs").resolve()
    path = (checkout / lock).resolve()
    name = CONDA_ENVIRONMENTS.get(path.name) if path.parent == envs else None
    return None if name is None else checkout / "envs" / name


def _own_launcher(text: str, backend: str, version: str, checkout: Path) -> list[str]:
    """Return the words of FP8FLOW_ENGINE_LAUNCHER, ``{image}`` filled in."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise FlowError(f"{LAUNCHER_VARIABLE}={text!r} is no command line: {error}") from error
    for word in words:
        if Path(word).name in _DAEMONS:
            raise FlowError(
                f"{LAUNCHER_VARIABLE}: {word} has the server run below a daemon, where a job that "
                "is stopped or killed could not stop it. Use apptainer, enroot or podman, whose "
                "containers are the job's own processes, or start the server yourself and use "
                "engine.backend: external"
            )
    if any("{image}" in word for word in words):
        image = (image_of(backend, version, checkout) or "").removeprefix("docker://")
        words = [word.replace("{image}", image) for word in words]
    return words


def _image_argument(backend: str, version: str, checkout: Path) -> str:
    """Return what apptainer runs: a pulled image if there is a folder of them, else the URL."""
    url = image_of(backend, version, checkout) or ""
    folder = os.environ.get(IMAGES_VARIABLE)
    if not folder:
        return url
    pulled = Path(folder).absolute() / f"{backend}-{version}.sif"
    if not pulled.exists():
        raise FlowError(
            f"{IMAGES_VARIABLE}: {pulled} does not exist; make it with: "
            f"{shlex.join(['apptainer', 'pull', str(pulled), url])}"
        )
    return str(pulled)


def _bound(folders: Iterable[Path]) -> list[str]:
    """Return the folders to show inside, each under its own path and that of its target."""
    wanted = {path for folder in folders for path in (folder.absolute(), folder.resolve())}
    kept: list[Path] = []
    for path in sorted(wanted):
        if any(char in str(path) for char in ",:"):
            raise FlowError(f"apptainer cannot show {path} inside: the path has a comma or colon")
        if not any(path.is_relative_to(parent) for parent in kept):
            kept.append(path)
    return [str(path) for path in kept]


def _apptainer(image: str, checkout: Path, folders: Iterable[Path]) -> list[str]:
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        raise FlowError(
            "--sdm apptainer: neither apptainer nor singularity is on the PATH; install it, or run "
            f"in an activated environment without --sdm, or set {LAUNCHER_VARIABLE}"
        )
    # Servers keep their scratch in the temporary folder, which need not be /tmp.
    shown = [Path.cwd(), checkout, Path(tempfile.gettempdir()), *folders]
    if kept := os.environ.get(CACHE_VARIABLE):
        shown.append(Path(kept))
    binds = [word for path in _bound(shown) for word in ("--bind", path)]
    removed = [word for name in _HOST_ONLY for word in ("-u", name)]
    # apptainer passes the environment on: CUDA_VISIBLE_DEVICES and the caches need no option.
    return [
        *("env", *removed, "PYTHONNOUSERSITE=1"),
        *(Path(program).name, "exec", "--nv", *binds, "--pwd", str(Path.cwd()), image),
    ]


def launcher(
    backend: str,
    version: str,
    methods: Collection[str],
    checkout: Path,
    folders: Iterable[Path] = (),
) -> list[str]:
    """Return the words that come before an engine's command; none in an activated environment.

    Args:
        backend: value of ``engine.backend``.
        version: value of ``engine.version``.
        methods: Snakemake's deployment methods (``--sdm``), in lower case.
        checkout: root of fp8flow.
        folders: more folders that must be visible inside, such as that of a given checkpoint.

    Raises:
        FlowError: if the container cannot be used as asked; before anything is started.
    """
    if backend in _NOT_CONTAINED:
        return []
    text = os.environ.get(LAUNCHER_VARIABLE, "")
    if text.strip():
        return _own_launcher(text, backend, version, checkout)
    if "apptainer" not in methods:
        return []
    return _apptainer(_image_argument(backend, version, checkout), checkout, folders)


def cache_environment(scratch: Path) -> dict[str, str]:
    """Return the variables that keep a server's caches out of the home folder, and it offline.

    The folders are made: some libraries do not make the parents of theirs. The hub cache of the
    user is neither read nor written, for everything that is served lies in folders.

    Args:
        scratch: folder of this server, removed at its end; FP8FLOW_CACHE_DIR wins, and is kept.

    Raises:
        FlowError: if the cache folder cannot be made or written.
    """
    given = os.environ.get(CACHE_VARIABLE)
    root = Path(given).absolute() if given else scratch.absolute() / "cache"
    folders = {variable: root / name for variable, name in _CACHE_FOLDERS.items()}
    try:
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        where = CACHE_VARIABLE if given else "the folder for temporary files (TMPDIR)"
        raise FlowError(
            f"caches of the server: {error.filename or root}: {error.strerror}; set {where} to a "
            "folder that can be written"
        ) from error
    return {**{name: str(folder) for name, folder in folders.items()}, **_OFFLINE}
