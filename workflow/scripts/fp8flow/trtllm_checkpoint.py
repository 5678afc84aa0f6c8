"""A TensorRT-LLM checkpoint: what config.json claims, and what its tensors are.

``trtllm-build`` turns config.json and rankN.safetensors into an engine without asking whether they
fit, so names, dtypes, shapes and scales are checked one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.checkpoint import (
    FLOATS,
    STATIC,
    Claims,
    describe_modules,
    raise_for,
    scale_problem,
    unknown_algo,
)
from fp8flow.errors import FlowError
from fp8flow.rope import read_trtllm_rope
from fp8flow.scales import Values, read_values, scale_report, value_problems
from fp8flow.weights import FP8_DTYPE, TensorInfo, read_json, read_tensors

# What TensorRT-LLM calls scales -> the name in the report.
SCALES = {
    "weights_scaling_factor": "weight_scale",
    "per_channel_scale": "weight_scale",
    "activation_scaling_factor": "input_scale",
    "k_cache_scaling_factor": "k_scale",
    "v_cache_scaling_factor": "v_scale",
    "kv_cache_scaling_factor": "kv_scale",
}
TOKENIZER_FOLDER = "tokenizer"
_HEAD = "lm_head"
_KV_SCALE = "kv_cache_scaling_factor"
# ModelOpt writes them beside the one that the engine reads.
_SPLIT_KV_SCALES = ("k_cache_scaling_factor", "v_cache_scaling_factor")


@dataclass(frozen=True)
class _Geometry:
    """Sizes in config.json, and over how many GPUs the weights are split."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    shares_embedding: bool
    tensor_parallel: int

    @classmethod
    def of(cls, config: Mapping[str, Any], tensor_parallel: int) -> _Geometry:
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_size=int(config["head_size"]),
            vocabulary=int(config["vocab_size"]),
            shares_embedding=bool(config.get("share_embedding_table")),
            tensor_parallel=tensor_parallel,
        )

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each linear layer's weight on one GPU, by module."""
        parts = self.tensor_parallel
        attention = self.heads * self.head_size // parts
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size // parts
        inner = self.intermediate // parts
        block = {
            "attention.qkv": (qkv, self.hidden),
            "attention.dense": (self.hidden, attention),
            "mlp.fc": (inner, self.hidden),
            "mlp.gate": (inner, self.hidden),
            "mlp.proj": (self.hidden, inner),
        }
        shapes = {
            f"transformer.layers.{number}.{name}": shape
            for number in range(self.layers)
            for name, shape in block.items()
        }
        if not self.shares_embedding:
            shapes[_HEAD] = (-(-self.vocabulary // parts), self.hidden)
        return shapes

    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight that is no matrix product's, by tensor name."""
        rows = -(-self.vocabulary // self.tensor_parallel)
        norms = ["transformer.ln_f"]
        for number in range(self.layers):
            layer = f"transformer.layers.{number}"
            norms += [f"{layer}.input_layernorm", f"{layer}.post_layernorm"]
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (self.hidden,) for name in norms}
        return {**shapes, "transformer.vocab_embedding.weight": (rows, self.hidden)}


def read_trtllm_claims(config: Mapping[str, Any]) -> Claims:
    """Return what a TensorRT-LLM config.json says about quantization."""
    section = config.get("quantization") or {}
    return Claims(
        quant_algo=section.get("quant_algo"),
        kv_cache_quant_algo=section.get("kv_cache_quant_algo"),
        exclude=tuple(section.get("exclude_modules") or ()),
        producer=dict(config.get("producer") or {}),
    )


def _mapping_problems(config: Mapping[str, Any], parallel: int) -> Iterator[str]:
    mapping = config.get("mapping") or {}
    wanted = {"world_size": parallel, "tp_size": parallel, "pp_size": 1}
    for key, value in wanted.items():
        if mapping.get(key) != value:
            yield f"config.json: mapping.{key} is {mapping.get(key)}, not {value}"


def _rank_files(folder: Path, parallel: int) -> list[Path]:
    wanted = [folder / f"rank{rank}.safetensors" for rank in range(parallel)]
    found = {path.name for path in folder.glob("rank*.safetensors")}
    missing = [path.name for path in wanted if path.name not in found]
    more = sorted(found - {path.name for path in wanted})
    if missing or more:
        raise FlowError(
            f"{folder} must hold one file for each of {parallel} GPUs; missing: "
            f"{', '.join(missing) or 'none'}, too many: {', '.join(more) or 'none'}. "
            "Export it again with the tensor_parallel of the engine."
        )
    return wanted


def _weight_problem(
    tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> Iterator[str]:
    info = tensors.get(name)
    if info is None:
        yield f"{name} is missing"
    elif info.dtype not in dtypes or info.shape != shape:
        yield f"{name} is {info.dtype} {list(info.shape)}, expected {dtypes[0]} {list(shape)}"


def _linear_problems(
    tensors: Mapping[str, TensorInfo], module: str, shape: tuple[int, int], claims: Claims
) -> Iterator[str]:
    if not _is_quantized(module, claims):
        yield from _weight_problem(tensors, f"{module}.weight", shape, FLOATS)
        return
    yield from _weight_problem(tensors, f"{module}.weight", shape, (FP8_DTYPE,))
    if claims.quant_algo == STATIC:
        yield from scale_problem(tensors, f"{module}.weights_scaling_factor", [(1,), ()])
        yield from scale_problem(tensors, f"{module}.activation_scaling_factor", [(1,), ()])
    else:
        yield from scale_problem(tensors, f"{module}.per_channel_scale", [shape[:1]])


def _is_quantized(module: str, claims: Claims) -> bool:
    return claims.quant_algo is not None and not claims.excludes(module)


def _kv_names(geometry: _Geometry, kinds: tuple[str, ...]) -> list[str]:
    layers = range(geometry.layers)
    return [f"transformer.layers.{number}.attention.{kind}" for number in layers for kind in kinds]


def _known_names(geometry: _Geometry, claims: Claims) -> set[str]:
    names = set(geometry.other_shapes())
    for module in geometry.linear_shapes():
        names.add(f"{module}.weight")
        if _is_quantized(module, claims):
            static = claims.quant_algo == STATIC
            kinds = ("weights_scaling_factor", "activation_scaling_factor")
            names |= {f"{module}.{kind}" for kind in (kinds if static else ("per_channel_scale",))}
    if claims.kv_cache_quant_algo:
        names |= set(_kv_names(geometry, (_KV_SCALE, *_SPLIT_KV_SCALES)))
    return names


def _rank_problems(
    tensors: Mapping[str, TensorInfo], geometry: _Geometry, claims: Claims
) -> Iterator[str]:
    for name, shape in geometry.other_shapes().items():
        yield from _weight_problem(tensors, name, shape, FLOATS)
    for module, matrix in geometry.linear_shapes().items():
        yield from _linear_problems(tensors, module, matrix, claims)
    if claims.kv_cache_quant_algo:
        for name in _kv_names(geometry, (_KV_SCALE,)):
            yield from scale_problem(tensors, name, [(1,), ()])
    for name in sorted(set(tensors) - _known_names(geometry, claims)):
        yield f"{name} is there, but the claims have no use for it"


def _claim_problems(claims: Claims, geometry: _Geometry) -> Iterator[str]:
    yield from unknown_algo(claims)
    if claims.quant_algo and not geometry.shares_embedding and not claims.excludes(_HEAD):
        yield f"config.json: exclude_modules lacks {_HEAD}, which TensorRT-LLM keeps unquantized"


def _rank_differences(values: Values, parallel: int) -> Iterator[str]:
    """Yield scales for a whole tensor or cache that differ between the parts of the model."""
    for key, numbers in values.scales.items():
        rank, name = key.split(": ", 1)
        whole = len(numbers) == 1 and not name.endswith("per_channel_scale")
        if rank != "rank0" or not whole:
            continue
        others = [values.scales.get(f"rank{i}: {name}") for i in range(1, parallel)]
        if any(other != numbers for other in others):
            yield f"{name} is {numbers[0]} for rank0, but {others} for the others"


def inspect_trtllm_checkpoint(folder: Path, tensor_parallel: int) -> dict[str, Any]:
    """Compare a TensorRT-LLM checkpoint's claims with its tensors and summarise its scales.

    Args:
        folder: config.json and one rankN.safetensors for each GPU.
        tensor_parallel: number of GPUs that it must be for.

    Returns:
        What :func:`fp8flow.checkpoint.inspect_checkpoint` returns, with TensorRT-LLM's module
        names, ``kv_scale`` (the scale that the engine reads) among the scales, and
        ``tensor_parallel``. Sums go over all GPUs; norms, which each GPU has, count once.

    Raises:
        FlowError: if the tensors do not meet the claims, or it is for another number of GPUs.
    """
    config = read_json(folder / "config.json")
    claims = read_trtllm_claims(config)
    raise_for(folder, _mapping_problems(config, tensor_parallel))
    geometry = _Geometry.of(config, tensor_parallel)
    ranks = [read_tensors(path) for path in _rank_files(folder, tensor_parallel)]
    problems = [*_claim_problems(claims, geometry)]
    for number, rank in enumerate(ranks):
        problems += [f"rank{number}: {p}" for p in _rank_problems(rank, geometry, claims)]
    raise_for(folder, problems)
    named = {
        f"rank{i}: {name}": info for i, rank in enumerate(ranks) for name, info in rank.items()
    }
    values = read_values(named, SCALES)
    raise_for(folder, [*value_problems(values), *_rank_differences(values, tensor_parallel)])
    modules = sorted(geometry.linear_shapes())
    quantized = [module for module in modules if _is_quantized(module, claims)]
    return {
        "claims": claims.as_dict(["config.json"]),
        "modules": describe_modules(modules, quantized),
        "scales": scale_report(values, SCALES),
        "dtype": config.get("dtype"),
        "rope": read_trtllm_rope(config).as_dict(),
        "parameters": _parameters(ranks),
        "bytes": sum(path.stat().st_size for path in folder.glob("rank*.safetensors")),
        "tensor_parallel": tensor_parallel,
    }


def _parameters(ranks: list[dict[str, TensorInfo]]) -> int:
    total = 0
    for number, rank in enumerate(ranks):
        for name, info in rank.items():
            replicated = len(info.shape) < 2
            if name.rpartition(".")[2] not in SCALES and not (number and replicated):
                total += info.elements
    return total
