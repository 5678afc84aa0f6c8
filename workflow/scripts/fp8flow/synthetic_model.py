"""A Llama of given geometry with random weights: sizes a system before the real ones are there."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.log import get_logger, progress
from fp8flow.rope import Rope, with_all_spellings
from fp8flow.weights import INDEX_FILE, write_json

WEIGHT_STD = 0.02
_BF16_BYTES = 2
# Bounds the memory: a shard is one layer, the embedding or the head.
_SHARDS_AT_ONCE = 4
_logger = get_logger(__name__)

Shapes = dict[str, tuple[int, ...]]


def check_geometry(geometry: Mapping[str, Any]) -> None:
    """Check that heads and widths fit together.

    Raises:
        FlowError: naming the values that do not.
    """
    width, heads = geometry["hidden_size"], geometry["num_attention_heads"]
    kv_heads = geometry["num_key_value_heads"]
    if width % heads:
        raise FlowError(
            f"model.synthetic: hidden_size {width} is no multiple of num_attention_heads {heads}"
        )
    if heads % kv_heads:
        raise FlowError(
            f"model.synthetic: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )


def shard_shapes(geometry: Mapping[str, Any]) -> Iterator[Shapes]:
    """Yield the tensors of each shard: embedding, one shard per layer, then norm and head."""
    width, wide = geometry["hidden_size"], geometry["intermediate_size"]
    kv_width = width // geometry["num_attention_heads"] * geometry["num_key_value_heads"]
    table = (geometry["vocab_size"], width)
    yield {"model.embed_tokens.weight": table}
    linear = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (wide, width),
        "mlp.up_proj": (wide, width),
        "mlp.down_proj": (width, wide),
    }
    for layer in range(geometry["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes: Shapes = {f"{prefix}.{name}.weight": shape for name, shape in linear.items()}
        shapes[f"{prefix}.input_layernorm.weight"] = (width,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (width,)
        yield shapes
    last: Shapes = {"model.norm.weight": (width,)}
    if not geometry["tie_word_embeddings"]:
        last["lm_head.weight"] = table
    yield last


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Any:
    """Return one bf16 tensor: ones for norms, else normal numbers of a stream of its own."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    text = f"{seed}/{name}".encode()
    stream = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(stream)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, WEIGHT_STD, generator=generator)


@dataclass(frozen=True)
class _Shard:
    """One file of weights: its tensors by shape, and how many bytes they have."""

    name: str
    shapes: Shapes

    @property
    def total_bytes(self) -> int:
        return sum(_BF16_BYTES * math.prod(shape) for shape in self.shapes.values())


def _write_shard(shard: _Shard, seed: int, folder: Path, threads: Executor) -> None:
    from safetensors.torch import save_file

    drawn = [threads.submit(_draw, key, shape, seed) for key, shape in shard.shapes.items()]
    tensors = {key: task.result() for key, task in zip(shard.shapes, drawn, strict=True)}
    save_file(tensors, folder / shard.name, metadata={"format": "pt"})


def _write_shards(geometry: Mapping[str, Any], folder: Path, threads: int) -> None:
    every = list(shard_shapes(geometry))
    shards = [
        _Shard(f"model-{number:05d}-of-{len(every):05d}.safetensors", shapes)
        for number, shapes in enumerate(every, start=1)
    ]
    weight_map = {key: shard.name for shard in shards for key in shard.shapes}
    metadata = {"total_size": sum(shard.total_bytes for shard in shards)}
    write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})
    # The longest work first: one large tensor at the end would be drawn alone.
    shards.sort(key=lambda shard: shard.total_bytes, reverse=True)
    drawing, writing = ThreadPoolExecutor(threads), ThreadPoolExecutor(_SHARDS_AT_ONCE)
    try:
        tasks = [
            writing.submit(_write_shard, shard, geometry["seed"], folder, drawing)
            for shard in shards
        ]
        for task in progress(as_completed(tasks), "random weights", len(tasks), unit="shard"):
            task.result()
    finally:
        # After an error or a signal, what has not begun must not be done first.
        writing.shutdown(cancel_futures=True)
        drawing.shutdown(cancel_futures=True)


def _special_tokens(folder: Path, vocab_size: int) -> dict[str, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) > vocab_size:
        raise FlowError(
            f"model.synthetic.vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} "
            "tokens; raise vocab_size to at least that"
        )
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    return {name: value for name, value in ids.items() if value is not None}


def write_synthetic(geometry: Mapping[str, Any], folder: Path, threads: int | None = None) -> None:
    """Write a Llama with random weights to ``folder``, which already holds the tokenizer.

    Tensors are drawn in parallel, each from a stream of its own, while others are written; memory
    holds a few shards at most. Equal geometry and seed give equal bytes with any number of threads.

    Args:
        geometry: the config section ``model.synthetic``.
        folder: an existing folder.
        threads: how many tensors are drawn at once; None takes the CPUs of this process.

    Raises:
        FlowError: if the geometry is impossible or smaller than the tokenizer.
    """
    check_geometry(geometry)
    special = _special_tokens(folder, geometry["vocab_size"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "head_dim": geometry["hidden_size"] // geometry["num_attention_heads"],
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        **special,
    }
    own = ("rope_theta", "rope_scaling", "seed", "tokenizer")
    config |= {key: value for key, value in geometry.items() if key not in own}
    rope = Rope(geometry["rope_theta"], geometry["rope_scaling"])
    write_json(folder / "config.json", with_all_spellings(config, rope, "bfloat16"))
    write_json(folder / "generation_config.json", {**special, "do_sample": False})
    _write_shards(geometry, folder, threads or len(os.sched_getaffinity(0)))
