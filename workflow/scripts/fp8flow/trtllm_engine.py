"""TensorRT engines: the command that builds one, and proof of what came out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8flow.backends.common import WORKFLOW, instead
from fp8flow.checkpoint import DYNAMIC
from fp8flow.errors import FlowError
from fp8flow.weights import read_json

OPTIONS = "engine.build.options"
# engine.serve -> build_config of the engine.
_SIZES = {
    "max_batch_size": "max_batch_size",
    "max_batch_tokens": "max_num_tokens",
    "max_seq_len": "max_seq_len",
}
_OWNERS = {
    "checkpoint_dir": WORKFLOW,
    "output_dir": WORKFLOW,
    "output_timing_cache": WORKFLOW,
    "max_beam_width": WORKFLOW,
    "kv_cache_type": WORKFLOW,
    "workers": "engine.tensor_parallel",
    "max_input_len": "engine.build.max_input_len",
    "multiple_profiles": "engine.build.multiple_profiles",
    **{flag: f"engine.serve.{key}" for key, flag in _SIZES.items()},
}
# Stated although they are defaults: a later release may choose otherwise.
_STATED = {
    "max_beam_width": "1",
    "kv_cache_type": "paged",
    "gpt_attention_plugin": "auto",
    "remove_input_padding": "enable",
    "context_fmha": "enable",
    "use_paged_context_fmha": "enable",
    "tokens_per_block": "32",
    "log_level": "info",
}
_SWITCH = {True: "enable", False: "disable"}


def build_command(
    engine: Mapping[str, Any],
    checkpoint: Path,
    output: Path,
    timing_cache: Path | None = None,
    quant_algo: str | None = None,
) -> list[str]:
    """Return the argv of trtllm-build.

    Args:
        engine: the section ``engine``; of ``serve`` only the sizes are used.
        checkpoint: folder of the TensorRT-LLM checkpoint.
        output: folder for the engine.
        timing_cache: file for kernel timings; beside the engine when left out.
        quant_algo: that of the checkpoint; scales per channel and token need a plugin of their own.

    Raises:
        FlowError: for an option that a setting owns, or one without a value.
    """
    build, serve = engine["build"], engine["serve"]
    values = dict(_STATED)
    values |= {flag: str(serve[key]) for key, flag in _SIZES.items()}
    values["max_input_len"] = str(build["max_input_len"])
    values["multiple_profiles"] = _SWITCH[build["multiple_profiles"]]
    values["workers"] = str(engine["tensor_parallel"])
    if quant_algo == DYNAMIC:
        values["fp8_rowwise_gemm_plugin"] = "auto"
    values |= _options(build["options"])
    argv = ["trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(output)]
    for name, value in values.items():
        argv += [f"--{name}", value]
    # Its default lies in the working directory, where two builds would share it.
    return [*argv, "--output_timing_cache", str(timing_cache or f"{output}.timing.cache")]


def _options(options: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in sorted(options.items()):
        key = name.replace("-", "_")
        if (owner := _OWNERS.get(key)) is not None:
            raise FlowError(f"{OPTIONS}: {name}: {instead(owner)}")
        if not isinstance(value, bool | int | str) or value == "":
            raise FlowError(f"{OPTIONS}: {name}: {value!r} is no value of a command line")
        found[key] = _SWITCH[value] if isinstance(value, bool) else str(value)
    return found


def inspect_engine(
    folder: Path, engine: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a finished engine is, after comparing it with what was asked.

    Args:
        folder: the engine's folder.
        engine: the section ``engine``, as for :func:`build_command`.
        checkpoint: result of the checkpoint's record.

    Raises:
        FlowError: if a file is missing or the engine is another one than asked for.
    """
    config = read_json(folder / "config.json")
    missing = [key for key in ("version", "pretrained_config", "build_config") if key not in config]
    if missing:
        raise FlowError(f"{folder}/config.json lacks {', '.join(missing)}: this is no engine")
    problems = [*_size_problems(config["build_config"], engine), *_rank_problems(folder, engine)]
    version = str(config["version"])
    if version != engine["version"]:
        problems.append(f"it was built by TensorRT-LLM {version}, not {engine['version']}")
    quantization = config["pretrained_config"].get("quantization") or {}
    for key in ("quant_algo", "kv_cache_quant_algo"):
        wanted = checkpoint["claims"][key]
        if quantization.get(key) != wanted:
            problems.append(f"its {key} is {quantization.get(key)}, the checkpoint's {wanted}")
    if problems:
        raise FlowError(
            f"{folder} is not the engine that was asked for:\n  " + "\n  ".join(problems)
        )
    return {
        "version": version,
        "quantization": quantization,
        "build_config": config["build_config"],
        "bytes": sum(path.stat().st_size for path in folder.glob("rank*.engine")),
    }


def _size_problems(built: Mapping[str, Any], engine: Mapping[str, Any]) -> list[str]:
    wanted = {flag: engine["serve"][key] for key, flag in _SIZES.items()}
    wanted["max_input_len"] = engine["build"]["max_input_len"]
    return [
        f"its {name} is {built.get(name)}, not {value}"
        for name, value in wanted.items()
        if built.get(name) != value
    ]


def _rank_problems(folder: Path, engine: Mapping[str, Any]) -> list[str]:
    ranks = [folder / f"rank{number}.engine" for number in range(engine["tensor_parallel"])]
    lost = [path.name for path in ranks if not path.is_file() or not path.stat().st_size]
    known = {path.name for path in ranks}
    more = sorted(path.name for path in folder.glob("rank*.engine") if path.name not in known)
    return [
        *(f"{name} is missing or empty" for name in lost),
        *(f"{name} is one too many" for name in more),
    ]
