"""A Llama of given geometry with random weights: sizes a system before the real ones are there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.log import get_logger, progress
from fp8flow.rope import Rope, with_all_spellings
from fp8flow.weights import INDEX_FILE, write_json

WEIGHT_STD = 0.02
_logger = get_logger(__name__)

Shapes = dict[str, tuple[int, ...]]


def _check_geometry(geometry: Mapping[str, Any]) -> None:
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


def _write_shards(geometry: Mapping[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    shards = list(shard_shapes(geometry))
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, shapes in enumerate(progress(shards, "random weights", unit="shard"), start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: _draw(key, shape, geometry["seed"]) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    )


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


def write_synthetic(geometry: Mapping[str, Any], folder: Path) -> None:
    """Write a Llama with random weights to ``folder``, which already holds the tokenizer.

    Every layer is drawn, written and dropped before the next, so memory stays at one layer or
    the embedding. Equal geometry and seed give equal bytes.

    Raises:
        FlowError: if the geometry is impossible or smaller than the tokenizer.
    """
    _check_geometry(geometry)
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
    _write_shards(geometry, folder)
