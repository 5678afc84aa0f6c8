"""A transformers quantizer for ModelOpt FP8 checkpoints, for the CPU.

transformers calls it for every checkpoint whose config.json says ``quant_method: modelopt``. The
weights are read as e4m3 values with their scales and held dequantized in the compute dtype, since
a CPU has no FP8 matrix product; activations go through e4m3 at every call. Supported are
``quant_algo`` FP8 (one scale per tensor, static input scale) and FP8_PER_CHANNEL_PER_TOKEN (one
scale per output row, input scale taken from each token).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8flow.embedded import attention
from fp8flow.embedded.fp8 import (
    StaticScale,
    dequantize_weight,
    fake_quantize,
    fake_quantize_per_token,
)
from fp8flow.errors import FlowError

METHOD = "modelopt"
STATIC = "FP8"
DYNAMIC = "FP8_PER_CHANNEL_PER_TOKEN"
_KV_SCALES = ("k_scale", "v_scale")


class SharedInput:
    """Remembers the last quantized input: q, k, v and gate, up are fed the same tensor."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, StaticScale | None, torch.Tensor] | None = None

    def quantize(self, values: torch.Tensor, scale: StaticScale | None) -> torch.Tensor:
        """Return ``values`` through e4m3; ``scale`` None takes one scale per token."""
        last = self._last
        if last is not None and last[0] is values and last[1] == scale:
            return last[2]
        quantized = (
            fake_quantize_per_token(values) if scale is None else fake_quantize(values, scale)
        )
        self._last = (values, scale, quantized)
        return quantized


class Fp8Linear(nn.Module):
    """A linear layer of an FP8 checkpoint.

    Until :meth:`prepare` it holds what the checkpoint holds (``weight`` e4m3, ``weight_scale``,
    ``input_scale`` if static); afterwards ``weight`` is dequantized and the scales are numbers.
    """

    def __init__(
        self, source: nn.Linear, scale_shapes: dict[str, tuple[int, ...]], shared: SharedInput
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.shared = shared
        self.static_scale: StaticScale | None = None
        shape = (self.out_features, self.in_features)
        self.weight = _frozen(torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"))
        for name, scale_shape in scale_shapes.items():
            scale = torch.empty(scale_shape, dtype=torch.float32, device="meta")
            self.register_parameter(name, _frozen(scale))
        self.register_parameter("bias", source.bias)

    def prepare(self, dtype: torch.dtype) -> None:
        """Dequantize the weight to ``dtype`` and take the scales out of the parameters."""
        self.weight = _frozen(dequantize_weight(self.weight, self.weight_scale, dtype))
        del self.weight_scale
        if "input_scale" in self._parameters:
            self.static_scale = StaticScale.of(self.input_scale)
            del self.input_scale

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the product with the quantized input; shapes as nn.Linear."""
        quantized = self.shared.quantize(values, self.static_scale)
        return functional.linear(quantized, self.weight, self.bias)


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class ModelOptFp8Config(QuantizationConfigMixin):
    """The ``quantization_config`` section that ModelOpt writes; unknown keys are kept."""

    def __init__(self, quant_algo: str | None = None, **entries: Any) -> None:
        entries.pop("quant_method", None)
        self.__dict__.update(entries)
        self.quant_method = METHOD
        self.quant_algo = quant_algo


def read_headers(files: list[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return ``{tensor name: (dtype, shape)}`` of safetensors files, from their headers alone."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        with Path(file).open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    return found


class ModelOptFp8Quantizer(HfQuantizer):
    """Loads ModelOpt FP8 checkpoints for inference."""

    requires_calibration = True

    def validate_environment(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse algorithms that this engine does not compute.

        Raises:
            FlowError: with the algorithms that it does.
        """
        algorithm = self.quantization_config.quant_algo
        if algorithm not in (STATIC, DYNAMIC):
            raise FlowError(
                f"the checkpoint has quant_algo {algorithm!r}; the embedded engine loads "
                f"{STATIC} and {DYNAMIC}. Quantize with quantization.method fp8_static or "
                "fp8_dynamic, or serve this checkpoint with another engine.backend."
            )

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Keep e4m3 values and float32 scales as they are; the rest takes the compute dtype."""
        kept = {"F8_E4M3", "F32", "torch.float8_e4m3fn", "torch.float32"}
        name = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        return None if name in kept else super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_kwargs: Any
    ) -> None:
        headers = read_headers(list(checkpoint_files or []))
        names = {n.removesuffix(".weight_scale") for n in headers if n.endswith(".weight_scale")}
        _check_scales(headers, names, self.quantization_config.quant_algo)
        shared = SharedInput()
        for name in sorted(names):
            _replace_linear(model, name, headers, shared)
        for name, (_dtype, shape) in headers.items():
            parent, _, leaf = name.rpartition(".")
            if leaf in _KV_SCALES:
                scale = torch.empty(shape, dtype=torch.float32, device="meta")
                _submodule(model, parent).register_parameter(leaf, _frozen(scale))

    def _process_model_after_weight_loading(self, model: nn.Module, **_kwargs: Any) -> nn.Module:
        dtype = model.config.dtype
        for module in model.modules():
            if isinstance(module, Fp8Linear):
                module.prepare(dtype)
        for module in model.modules():
            _take_kv_scales(
                module, bool(getattr(self.quantization_config, "kv_cache_scheme", None))
            )
        for parameter in model.parameters():
            if parameter.dtype == torch.float32 != dtype:
                parameter.data = parameter.data.to(dtype)
        return model

    def is_serializable(self) -> bool:
        """Saving is ModelOpt's business."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Inference only."""
        return False


def _check_scales(
    headers: dict[str, tuple[str, tuple[int, ...]]], names: set[str], algorithm: str
) -> None:
    """Refuse a checkpoint that lacks scales, which would load and give wrong answers."""
    values = {n.removesuffix(".weight") for n, (dtype, _) in headers.items() if dtype == "F8_E4M3"}
    missing = {f"{name}.weight_scale" for name in values - names}
    if algorithm == STATIC:
        missing |= {f"{n}.input_scale" for n in names if f"{n}.input_scale" not in headers}
    if missing or not names:
        what = ", ".join(sorted(missing)[:3]) or "any weight_scale"
        raise FlowError(
            f"the checkpoint says quant_algo {algorithm} but lacks {what} ({len(missing)} tensors "
            "missing). It is incomplete: run the quantize rule again."
        )


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise FlowError(
            f"the checkpoint has scales for {name}, which {type(model).__name__} does not have: "
            "the embedded engine serves text models of the architecture in config.json only."
        ) from error


def _replace_linear(
    model: nn.Module,
    name: str,
    headers: dict[str, tuple[str, tuple[int, ...]]],
    shared: SharedInput,
) -> None:
    """Put an Fp8Linear in the place of the linear layer ``name``."""
    source = _submodule(model, name)
    if not isinstance(source, nn.Linear):
        raise FlowError(
            f"{name} is quantized in the checkpoint but is a {type(source).__name__}; the embedded "
            "engine computes linear layers. Add it to quantization.exclude."
        )
    wanted = ("weight_scale", "input_scale")
    shapes = {key: headers[f"{name}.{key}"][1] for key in wanted if f"{name}.{key}" in headers}
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, Fp8Linear(source, shapes, shared))


def _take_kv_scales(module: nn.Module, declared: bool) -> None:
    """Move k_scale and v_scale of an attention module's projections to the module itself.

    A declared FP8 cache without scales has scales of 1, as in vLLM and TensorRT-LLM.
    """
    names = ("k_proj", "v_proj")
    if not all(hasattr(module, name) for name in (*names, "layer_idx")):
        return
    projections = [getattr(module, name) for name in names]
    scales = [1.0, 1.0]
    for i, (projection, name) in enumerate(zip(projections, _KV_SCALES, strict=True)):
        if name in projection._parameters:
            scales[i] = float(getattr(projection, name).detach())
            delattr(projection, name)
    if declared:
        attention.set_kv_scales(module, *scales)


def describe(model: nn.Module) -> dict[str, Any]:
    """Return how a loaded model is quantized, from its modules (not from its config)."""
    quantized = [n for n, m in model.named_modules() if isinstance(m, Fp8Linear)]
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    static = [m.static_scale is not None for m in model.modules() if isinstance(m, Fp8Linear)]
    method = "none" if not quantized else STATIC if all(static) else DYNAMIC
    config = getattr(model.config, "quantization_config", None)
    layers = attention.kv_scales_by_layer(model)
    return {
        "method": method,
        "quantized_modules": len(quantized),
        "unquantized_linear_modules": linears,
        "activation_scales": {"none": None, STATIC: "static", DYNAMIC: "per_token"}[method],
        "compute": "weights dequantized at load, activations through e4m3" if quantized else None,
        "kv_cache": {
            "declared": bool(getattr(config, "kv_cache_scheme", None)),
            "emulated": bool(layers),
            "layers": len(layers),
        },
    }


def register() -> None:
    """Make the quantizer and the attention known to transformers; may be called again."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(ModelOptFp8Config)
        register_quantizer(METHOD)(ModelOptFp8Quantizer)
    attention.register()


def quantization_section(directory: Path) -> dict[str, Any] | None:
    """Return the quantization config of a checkpoint in the form of this quantizer.

    Older ModelOpt exports lack ``quant_method`` (0.33) or have hf_quant_config.json only; read by
    transformers as they are, their weights would be used without their scales.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    section: dict[str, Any] | None = config.get("quantization_config")
    older = directory / "hf_quant_config.json"
    if section is None and older.is_file():
        old = json.loads(older.read_text(encoding="utf-8"))["quantization"]
        section = {
            "quant_algo": old.get("quant_algo"),
            "kv_cache_scheme": old.get("kv_cache_quant_algo"),
            "ignore": old.get("exclude_modules", []),
        }
    if section is not None and (section.get("quant_algo") or "").startswith("FP8"):
        section = {"quant_method": METHOD, **section}
    return section
