"""Quantized models written as checkpoints: unified Hugging Face, or TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.model_folder import copy_tokenizer
from fp8flow.rope import (
    Rope,
    check_export,
    patch_config,
    patch_trtllm_config,
    read_dtype,
    read_rope,
    with_all_spellings,
)
from fp8flow.trtllm_checkpoint import TOKENIZER_FOLDER
from fp8flow.weights import read_json, write_json

UNIFIED = "unified_hf"
TENSORRT_LLM = "tensorrt_llm"
FORMATS = (UNIFIED, TENSORRT_LLM)
_INSTEAD = "use engine.path: pytorch, which serves the unified checkpoint"
# Architecture -> ModelOpt's name of its decoder.
_DECODERS = {"LlamaForCausalLM": "llama"}


def export_unified(model: Any, model_folder: Path, folder: Path) -> None:
    """Write the unified Hugging Face checkpoint with tokenizer and the source's settings.

    Raises:
        FlowError: if RoPE does not read as in the source model.
    """
    from modelopt.torch.export import export_hf_checkpoint

    source = read_json(model_folder / "config.json")
    export_hf_checkpoint(model, export_dir=folder)
    finish_unified(folder, source, read_rope(source))
    copy_tokenizer(model_folder, folder)
    copy_generation_config(model_folder, folder)


def copy_generation_config(model_folder: Path, folder: Path) -> None:
    """Copy the model's generation_config.json, with its end tokens, if it has one."""
    path = model_folder / "generation_config.json"
    if path.is_file():
        (folder / path.name).write_bytes(path.read_bytes())


def finish_unified(folder: Path, source: Mapping[str, Any], rope: Rope) -> None:
    """Make config.json say RoPE, dtype and quantization method as every engine reads them.

    Raises:
        FlowError: if RoPE does not read as in the source model.
    """
    path = folder / "config.json"
    config = read_json(path)
    config.pop("_model_name_or_path", None)
    if "quantization_config" in config:
        # ModelOpt before 0.35 leaves it out, and vLLM then does not know who quantized.
        config["quantization_config"].setdefault("quant_method", "modelopt")
    write_json(path, config)
    patch_config(path, rope, read_dtype(source))
    for file in folder.glob("*.safetensors"):
        if file.stat().st_nlink == 1:
            file.chmod(0o644)


def check_trtllm_request(
    source: Mapping[str, Any], tensor_parallel: int, exclude: tuple[str, ...]
) -> None:
    """Check that a model can be written for TensorRT-LLM before anything is spent on it.

    Args:
        source: the model's config.json.
        tensor_parallel: number of GPUs that it is split over.
        exclude: modules that stay unquantized.

    Raises:
        FlowError: naming what cannot be.
    """
    architecture = source["architectures"][0]
    if architecture not in _DECODERS:
        raise FlowError(
            f"a TensorRT engine is built for {', '.join(_DECODERS)} only, not {architecture}; "
            f"{_INSTEAD}"
        )
    if exclude != ("lm_head",):
        raise FlowError(
            f"quantization.exclude is {list(exclude)}, but a TensorRT-LLM checkpoint is quantized "
            f"as a whole except lm_head; set exclude: [lm_head], or {_INSTEAD}"
        )
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    uneven = [f"{key} {source[key]}" for key in sizes if source[key] % tensor_parallel]
    if uneven:
        raise FlowError(
            f"the model cannot be split over engine.tensor_parallel {tensor_parallel}: "
            f"{', '.join(uneven)} cannot be divided by it"
        )


def export_trtllm(model: Any, model_folder: Path, folder: Path, tensor_parallel: int) -> None:
    """Write the TensorRT-LLM checkpoint, and beside it what a server needs of the model.

    The folder ``tokenizer`` holds the model's tokenizer and its Hugging Face config.json: an
    engine has neither, and ``trtllm-serve`` reads both.

    Raises:
        FlowError: if RoPE does not read as in the source model.
    """
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    source = read_json(model_folder / "config.json")
    rope = read_rope(source)
    half = model.dtype in (torch.float16, torch.bfloat16)
    export_tensorrt_llm_checkpoint(
        model,
        _DECODERS[source["architectures"][0]],
        model.dtype if half else torch.bfloat16,
        export_dir=folder,
        inference_tensor_parallel=tensor_parallel,
        inference_pipeline_parallel=1,
    )
    # Written for unquantized models only; it says once more that no layer is quantized.
    (folder / "quant_cfg.json").unlink(missing_ok=True)
    patch_trtllm_config(folder / "config.json", rope)
    _write_tokenizer_folder(model_folder, folder / TOKENIZER_FOLDER, source, rope)


def _write_tokenizer_folder(
    model_folder: Path, folder: Path, source: Mapping[str, Any], rope: Rope
) -> None:
    folder.mkdir()
    copy_tokenizer(model_folder, folder)
    copy_generation_config(model_folder, folder)
    write_json(folder / "config.json", with_all_spellings(source, rope, read_dtype(source)))
    check_export(folder / "config.json", rope)
