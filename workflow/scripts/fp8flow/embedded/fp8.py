"""FP8 (e4m3) quantize-dequantize on the CPU, bit for bit as ModelOpt's fake quantization.

ModelOpt 0.47 (``quantization/tensor_quant.py``, eager path) multiplies by 448 / amax in float32,
clamps, rounds to e4m3 and multiplies by the reciprocal of that factor. An FP8 model amplifies the
smallest difference, since it can move a value to the next e4m3 value, 6 % away; so the factors
are computed here in the same way, from the amax that the exported scale was made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0
_LEAST_RANGE = 2.0**-24  # below it ModelOpt takes a range of 1

# The bits of an e4m3 value (1 sign, 4 exponent, 3 mantissa bits, bias 7), shifted into a float16
# (bias 15), are that value times 2**-8. torch's own conversion from e4m3 costs five times as much,
# and so does float16 to bfloat16, hence the way over float32.
_HALF_FACTOR = 256.0
_EXPONENT_MSB = 0x4000
# Below this many elements the number of operations counts, not their size.
_SMALL = 16384
# Larger tensors are done in blocks whose intermediate results stay in the processor's cache.
_BLOCK = 131072


def factors(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors to and from e4m3 of exported scales (amax / 448), float32, any shape.

    The division by 448 is undone exactly: amax is the bfloat16 value, or the float32 neighbour
    of scale * 448, that gives this scale.
    """
    scale = scale.detach().to(torch.float32)
    product = scale * E4M3_MAX
    up = torch.nextafter(product, torch.full_like(product, torch.inf))
    down = torch.nextafter(product, torch.zeros_like(product))
    amax = product
    for candidate in (down, up, product, product.to(torch.bfloat16).to(torch.float32)):
        amax = torch.where(candidate / E4M3_MAX == scale, candidate, amax)
    return _factors_of_range(amax)


def _factors_of_range(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factor = E4M3_MAX / torch.where(amax <= _LEAST_RANGE, 1.0, amax)
    return factor, 1.0 / factor


@dataclass(frozen=True)
class StaticScale:
    """The factors of one scale for a whole tensor, float32 values."""

    scale: float
    quantize: float
    dequantize: float

    @classmethod
    def of(cls, scale: torch.Tensor | float) -> StaticScale:
        """Return the factors of an exported scale (a single value)."""
        value = torch.as_tensor(scale, dtype=torch.float32).detach().reshape(())
        quantize, dequantize = factors(value)
        return cls(value.item(), quantize.item(), dequantize.item())


def decode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (float8_e4m3fn, no NaN) divided by 256, exactly, in float32."""
    bits = values.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(7).bitwise_and_(~_EXPONENT_MSB)
    return bits.view(torch.float16).to(torch.float32)


def fake_quantize(values: torch.Tensor, scale: StaticScale) -> torch.Tensor:
    """Quantize and dequantize with one scale for all; same shape and dtype."""
    if values.numel() <= _BLOCK:
        return _fake_quantize_block(values, scale).to(values.dtype)
    out = torch.empty(values.shape, dtype=values.dtype)
    rows = max(1, _BLOCK // values.shape[-1])
    for source, target in zip(
        values.flatten(0, -2).split(rows), out.flatten(0, -2).split(rows), strict=True
    ):
        target.copy_(_fake_quantize_block(source, scale))
    return out


def _fake_quantize_block(values: torch.Tensor, scale: StaticScale) -> torch.Tensor:
    """Return the result, which may still be in float32."""
    scaled = values.to(torch.float32, copy=True).mul_(scale.quantize)
    rounded = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    if values.numel() < _SMALL:
        return rounded.to(values.dtype).mul_(scale.dequantize)
    return decode_e4m3(rounded).mul_(scale.dequantize * _HALF_FACTOR)


def fake_quantize_per_token(values: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize each row (last dimension) with its own maximum as the range."""
    wide = values.to(torch.float32, copy=True)
    factor, back = _factors_of_range(values.abs().amax(dim=-1, keepdim=True).to(torch.float32))
    rounded = wide.mul_(factor).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return decode_e4m3(rounded).mul_(back * _HALF_FACTOR).to(values.dtype)


def dequantize_weight(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``weight`` ([out, in], e4m3) times ``scale`` (one value, or [out]) in ``dtype``."""
    back = factors(scale)[1]
    return (weight.to(torch.float32) * (back.reshape(-1, 1) if back.numel() > 1 else back)).to(
        dtype
    )


def native_bfloat16() -> bool:
    """Tell whether this CPU multiplies bfloat16 matrices in hardware (AMX or AVX512-BF16).

    Without it bfloat16 is emulated and ten times slower than float32.
    """
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    found = [getattr(torch.cpu, name, None) for name in probes]
    return any(probe() for probe in found if probe is not None)
