"""Attention over a packed batch on the CPU, and the FP8 KV cache of ModelOpt checkpoints.

The continuous batching of transformers packs all requests of a step into one row. Its own SDPA
path then lets every token attend to the keys of all requests and masks the others away, which at
16 requests is 16 times the work and a mask of batch tokens x cache tokens. Here each request
attends to its own keys only.

ModelOpt quantizes keys (after the rotary embedding) and values with one scale per layer on their
way into the attention function. Every value is quantized on its own, so doing it once, when they
are written to the cache, gives the same attention as doing it at every read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from fp8flow.embedded.fp8 import StaticScale, fake_quantize

KvScales = tuple[StaticScale, StaticScale]
NAME = "fp8flow_paged"
_SCALES = "fp8_kv_scales"
_MASK = "fp8flow_decode_mask"
_MOST_PADDING = 3


def set_kv_scales(module: torch.nn.Module, key_scale: float, value_scale: float) -> None:
    """Make the attention ``module`` use an FP8 cache with these scales."""
    setattr(module, _SCALES, (StaticScale.of(key_scale), StaticScale.of(value_scale)))


def kv_scales(module: torch.nn.Module) -> KvScales | None:
    """Return the (key, value) scales of an attention module; None without an FP8 cache."""
    found: KvScales | None = getattr(module, _SCALES, None)
    return found


def kv_scales_by_layer(model: torch.nn.Module) -> dict[int, KvScales]:
    """Return the (key, value) scales of every layer that has an FP8 cache."""
    found = {}
    for module in model.modules():
        scales = kv_scales(module)
        if scales is not None:
            found[int(module.layer_idx)] = scales
    return found


class _DecodeStep:
    """Where the keys of each request lie, when every request of a step has one new token.

    The keys of all requests are then read as one padded [requests, longest] batch, so that one
    attention call serves all. Made once per step and used by every layer.
    """

    def __init__(self, read_index: torch.Tensor, key_starts: torch.Tensor) -> None:
        starts, ends = key_starts[:-1, None].long(), key_starts[1:, None].long()
        self.requests, self.longest = len(starts), int((ends - starts).max())
        places = starts + torch.arange(self.longest)
        self.rows = read_index[torch.minimum(places, ends - 1)].flatten()
        self.mask = (places < ends)[:, None, None, :]

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return [requests, heads, longest, dim] of a layer's [tokens, heads, dim]."""
        rows = stored.index_select(0, self.rows)
        return rows.view(self.requests, self.longest, *stored.shape[1:]).transpose(1, 2)


class CacheAccess:
    """Writes to and reads from a transformers PagedAttentionCache of full attention layers.

    Takes the place of its ``update``: quantizes what is written for an FP8 cache, and reads steps
    that only decode in one padded batch.
    """

    def __init__(self, cache: Any, scales: dict[int, KvScales]) -> None:
        self._update, self._layers, self._scales = cache.update, cache.layer_to_allocator, scales
        self._step: tuple[Any, _DecodeStep | None] = (None, None)
        cache.update = self.update

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [1, heads, tokens, dim] and return what the layer's queries attend to."""
        if layer_idx in self._scales:
            key_scale, value_scale = self._scales[layer_idx]
            keys, values = fake_quantize(keys, key_scale), fake_quantize(values, value_scale)
        allocator = self._layers[layer_idx]
        step = self._decode_step(allocator, kwargs)
        if step is None:
            found: tuple[torch.Tensor, torch.Tensor] = self._update(keys, values, layer_idx, kwargs)
            return found
        kwargs[_MASK] = step.mask
        stored = allocator._kv_token_views[layer_idx]
        for target, new in zip(stored, (keys, values), strict=True):
            target.index_copy_(0, kwargs["write_index"][allocator.index], new[0].transpose(0, 1))
        return step.read(stored[0]), step.read(stored[1])

    def _decode_step(self, allocator: Any, kwargs: dict[str, Any]) -> _DecodeStep | None:
        """Return the step's reading plan; None if it prefills or padding would be most of it."""
        indices = kwargs["read_index"]
        if self._step[0] is not indices:
            self._step = (indices, self._plan(allocator, kwargs))
        return self._step[1]

    def _plan(self, allocator: Any, kwargs: dict[str, Any]) -> _DecodeStep | None:
        read_index = kwargs["read_index"][allocator.index]
        requests = len(kwargs["cu_seq_lens_q"]) - 1
        full_attention = allocator.layer_type == "full_attention"
        if not full_attention or kwargs["max_length_q"] != 1 or read_index.numel() == 0:
            return None
        longest = kwargs["max_length_k"][allocator.layer_type]
        key_starts = kwargs["cu_seq_lens_k"][allocator.layer_type]
        if longest * requests > _MOST_PADDING * int(key_starts[-1]):
            return None
        return _DecodeStep(read_index, key_starts)


@lru_cache(maxsize=8)
def _causal_mask(queries: int, keys: int) -> torch.Tensor:
    """Return the mask [queries, keys] of the last ``queries`` of ``keys`` positions."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Return causal attention of [1, heads, q, dim] queries, the last q positions of the keys."""
    heads, kv_heads, queries, keys = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    groups = heads // kv_heads
    if queries == 1:
        packed = query.reshape(query.shape[0], kv_heads, groups, -1)
        out = functional.scaled_dot_product_attention(packed, key, value, scale=scaling)
        return out.reshape(query.shape)
    mask = None if queries == keys else _causal_mask(queries, keys)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=groups > 1,
    )


def _attend_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of [1, heads, requests, dim] queries to the padded keys of each."""
    packed = query[0].transpose(0, 1).reshape(len(key), key.shape[1], -1, query.shape[-1])
    out = functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(1, len(key), -1, query.shape[-1]).transpose(1, 2)


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    query_starts: list[int],
    key_starts: list[int],
) -> torch.Tensor:
    """Return the attention of each request of a packed batch to its own keys."""
    out = torch.empty_like(query)
    for i in range(len(query_starts) - 1):
        queries = slice(query_starts[i], query_starts[i + 1])
        keys = slice(key_starts[i], key_starts[i + 1])
        out[:, :, queries] = _attend(
            query[:, :, queries], key[:, :, keys], value[:, :, keys], scaling
        )
    return out


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; the signature of transformers' AttentionInterface.

    Shapes are [batch, heads, tokens, dim]; the result is [batch, tokens, heads, dim]. With
    ``cu_seq_lens_q`` the batch is packed and keys and values come from the paged cache, already
    quantized; without, they come from the layer itself and are quantized here.

    Raises:
        ValueError: for a mask (padding), which this implementation does not read.
    """
    if attention_mask is not None:
        raise ValueError(f"attention {NAME} takes no mask: pass sequences without padding")
    query_starts = kwargs.get("cu_seq_lens_q")
    if _MASK in kwargs:
        out = _attend_decode(query, key, value, scaling, kwargs[_MASK])
    elif query_starts is not None:
        out = _attend_packed(
            query, key, value, scaling, query_starts.tolist(), kwargs["cu_seq_lens_k"].tolist()
        )
    else:
        scales = kv_scales(module)
        if scales is not None:
            key, value = fake_quantize(key, scales[0]), fake_quantize(value, scales[1])
        out = _attend(query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the implementation known to transformers under :data:`NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
