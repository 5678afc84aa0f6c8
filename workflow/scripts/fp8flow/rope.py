"""Rotary position embedding (RoPE) in config.json: one meaning, several spellings.

transformers before 5 reads ``rope_theta`` and ``rope_scaling``; transformers 5 writes
``rope_parameters`` only. A reader that misses its own spelling silently takes base 10000 without
scaling, and the model then degrades with length. Checkpoints therefore carry every spelling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.weights import read_json, write_json

# What a Llama config without a base means; readers fall back to it.
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary embedding.

    Attributes:
        theta: base of the frequencies.
        scaling: ``rope_type`` and its numbers, for example the llama3 scheme; None without.
    """

    theta: float
    scaling: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return {"theta": self.theta, "scaling": self.scaling}

    def same_as(self, other: Rope) -> bool:
        """Return whether both give the same frequencies."""
        return math.isclose(self.theta, other.theta) and _same(self.scaling, other.scaling)


def _same(left: Mapping[str, Any] | None, right: Mapping[str, Any] | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.keys() == right.keys() and all(left[key] == right[key] for key in left)


def _scaling(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the scaling with ``rope_type`` as its only name for the scheme; None for none."""
    if not parameters:
        return None
    kept = {k: v for k, v in parameters.items() if k not in ("rope_theta", "type", "rope_type")}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return None if kind == "default" else {"rope_type": kind, **kept}


def rope_spellings(config: Mapping[str, Any]) -> dict[str, Rope]:
    """Return what each spelling in a config.json says, as its readers understand it.

    Keys are ``rope_theta/rope_scaling`` (transformers before 5, TensorRT-LLM, ModelOpt) and
    ``rope_parameters`` (transformers 5). A spelling that is absent has no entry.

    Raises:
        FlowError: if ``rope_parameters`` differs by layer type, which the old spelling cannot say.
    """
    found = {}
    if "rope_theta" in config or config.get("rope_scaling"):
        old = config.get("rope_scaling") or {}
        theta = config.get("rope_theta", old.get("rope_theta", DEFAULT_THETA))
        found["rope_theta/rope_scaling"] = Rope(float(theta), _scaling(old))
    new = config.get("rope_parameters")
    if new:
        if any(isinstance(value, Mapping) for value in new.values()):
            raise FlowError(
                f"rope_parameters differs by layer type ({', '.join(sorted(new))}); "
                "only models with one RoPE setting for all layers are supported"
            )
        theta = new.get("rope_theta", config.get("rope_theta", DEFAULT_THETA))
        found["rope_parameters"] = Rope(float(theta), _scaling(new))
    return found


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Return the RoPE setting of a config.json in whichever spelling it uses.

    Raises:
        FlowError: if two spellings in it disagree.
    """
    spellings = rope_spellings(config)
    if not spellings:
        return Rope(DEFAULT_THETA)
    first, *others = spellings.items()
    for name, rope in others:
        if not rope.same_as(first[1]):
            raise FlowError(
                f"config.json contradicts itself: {first[0]} says {first[1].as_dict()}, "
                f"{name} says {rope.as_dict()}; correct it by hand or fetch the model again"
            )
    return first[1]


def read_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the weights' dtype as config.json names it, without a ``torch.`` prefix."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return str(dtype).removeprefix("torch.") if dtype else None


def with_all_spellings(
    config: Mapping[str, Any], rope: Rope, dtype: str | None = None
) -> dict[str, Any]:
    """Return a config that says ``rope`` and the dtype in every spelling.

    Args:
        config: the config to complete; its other keys stay.
        rope: the source model's setting.
        dtype: the source model's dtype; the config's own when left out.
    """
    dtype = dtype or read_dtype(config)
    scaling = rope.scaling or {"rope_type": "default"}
    # Keys such as partial_rotary_factor say nothing about base or scaling and must survive.
    kept = {} if rope.scaling else dict(config.get("rope_parameters") or {})
    patched = dict(config)
    patched["rope_theta"] = rope.theta
    patched["rope_scaling"] = rope.scaling
    patched["rope_parameters"] = {**kept, "rope_theta": rope.theta, **scaling}
    if dtype:
        patched["torch_dtype"] = patched["dtype"] = dtype
    return patched


def patch_config(path: Path, rope: Rope, dtype: str | None = None) -> None:
    """Write RoPE and dtype into a config.json in every spelling, then check what it says.

    Raises:
        FlowError: if the file cannot be read, or reads differently afterwards.
    """
    write_json(path, with_all_spellings(read_json(path), rope, dtype))
    check_export(path, rope)


def check_export(path: Path, source: Rope) -> None:
    """Check that every spelling in an exported config.json says what the source model says.

    Raises:
        FlowError: listing the spellings that are missing or differ.
    """
    spellings = rope_spellings(read_json(path))
    problems = []
    for name in ("rope_theta/rope_scaling", "rope_parameters"):
        rope = spellings.get(name)
        if rope is None:
            problems.append(f"{name} is missing: its readers would use base {DEFAULT_THETA:g}")
        elif not rope.same_as(source):
            problems.append(f"{name} says {rope.as_dict()}")
    if problems:
        listed = "\n  ".join(problems)
        raise FlowError(
            f"{path} lost the model's RoPE setting {source.as_dict()}:\n  {listed}\n"
            "Do not serve this checkpoint; export it again."
        )


def trtllm_spelling(rope: Rope) -> dict[str, Any]:
    """Return RoPE as a TensorRT-LLM checkpoint's config.json says it."""
    return {"rotary_base": rope.theta, "rotary_scaling": rope.scaling}


def read_trtllm_rope(config: Mapping[str, Any]) -> Rope:
    """Return the RoPE setting of a TensorRT-LLM config.json, as TensorRT-LLM understands it."""
    theta = config.get("rotary_base") or DEFAULT_THETA
    return Rope(float(theta), _scaling(config.get("rotary_scaling")))


def patch_trtllm_config(path: Path, rope: Rope) -> None:
    """Write RoPE into a TensorRT-LLM checkpoint's config.json, then check what it says.

    ModelOpt reads the spelling that transformers 5 no longer has, and then writes nothing.

    Raises:
        FlowError: if the file cannot be read, or reads differently afterwards.
    """
    write_json(path, read_json(path) | trtllm_spelling(rope))
    check_trtllm_rope(path, rope)


def check_trtllm_rope(path: Path, source: Rope) -> None:
    """Check that a TensorRT-LLM config.json says what the source model says.

    Raises:
        FlowError: if base or scaling is missing or differs.
    """
    config = read_json(path)
    found = read_trtllm_rope(config)
    if "rotary_base" not in config or not found.same_as(source):
        raise FlowError(
            f"{path} lost the model's RoPE setting {source.as_dict()}: it says {found.as_dict()}; "
            "do not build an engine from this checkpoint, export it again"
        )
