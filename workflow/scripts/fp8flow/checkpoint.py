"""A unified Hugging Face checkpoint: what it claims about its quantization, and what is there.

Engines trust config.json and hf_quant_config.json. A checkpoint whose tensors do not match them
loads without complaint and answers wrongly, so the tensors are checked one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.rope import read_dtype, read_rope
from fp8flow.scales import REPORTED, read_values, scale_report, value_problems
from fp8flow.weights import FP8_DTYPE, TensorInfo, read_folder, read_json

STATIC = "FP8"
DYNAMIC = "FP8_PER_CHANNEL_PER_TOKEN"
QUANT_CONFIG = "hf_quant_config.json"
# This format calls its scales what the report calls them.
_SCALES = {kind: kind for kind in REPORTED}
_KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}
FLOATS = ("BF16", "F16", "F32")
# Unquantized by nature: lookups and norms are no matrix products.
_NEVER_QUANTIZED = re.compile(r"(^|\.)(embed_tokens|wte)$|norm$")
_SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Claims:
    """What a checkpoint's configuration says.

    Attributes:
        quant_algo: ``FP8``, ``FP8_PER_CHANNEL_PER_TOKEN``, or None for an unquantized model.
        kv_cache_quant_algo: ``FP8`` or None.
        exclude: patterns of modules that are not quantized.
        producer: name and version of the tool that wrote it.
    """

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    exclude: tuple[str, ...] = ()
    producer: dict[str, Any] = field(default_factory=dict)

    def as_dict(self, files: list[str]) -> dict[str, Any]:
        """Return the claims for a record, and the files that they were read from."""
        return {**asdict(self), "exclude": list(self.exclude), "read_from": files}

    def excludes(self, module: str) -> bool:
        """Return whether a module, or one that holds it, is excluded."""
        return any(
            fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")
            for pattern in self.exclude
        )


def _kv_algo(scheme: Any) -> str | None:
    """Return the KV cache algorithm: older ModelOpt writes a name, newer a description."""
    if isinstance(scheme, Mapping):
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        return "FP8" if is_fp8 else str(dict(scheme))
    return scheme or None


def _config_claims(section: Mapping[str, Any]) -> Claims:
    return Claims(
        quant_algo=section.get("quant_algo"),
        kv_cache_quant_algo=_kv_algo(section.get("kv_cache_scheme")),
        exclude=tuple(section.get("ignore") or section.get("exclude_modules") or ()),
        producer=dict(section.get("producer") or {}),
    )


def _quant_file_claims(data: Mapping[str, Any]) -> Claims:
    section = data.get("quantization") or {}
    return Claims(
        quant_algo=section.get("quant_algo"),
        kv_cache_quant_algo=_kv_algo(section.get("kv_cache_quant_algo")),
        exclude=tuple(section.get("exclude_modules") or ()),
        producer=dict(data.get("producer") or {}),
    )


def read_claims(folder: Path) -> Claims:
    """Return what config.json and hf_quant_config.json say.

    Raises:
        FlowError: if a file is missing or they disagree.
    """
    config = read_json(folder / "config.json")
    section = config.get("quantization_config")
    by_config = _config_claims(section) if section else None
    path = folder / QUANT_CONFIG
    by_file = _quant_file_claims(read_json(path)) if path.is_file() else None
    if by_config and by_file and (differing := _differences(by_config, by_file)):
        listed = "\n  ".join(differing)
        raise FlowError(
            f"{folder}: config.json and {QUANT_CONFIG} disagree, and engines differ in which one "
            f"they read:\n  {listed}\nExport the checkpoint again."
        )
    return by_config or by_file or Claims()


def _differences(config: Claims, file: Claims) -> list[str]:
    pairs = {
        "quant_algo": (config.quant_algo, file.quant_algo),
        "kv_cache_quant_algo": (config.kv_cache_quant_algo, file.kv_cache_quant_algo),
        "excluded modules": (sorted(config.exclude), sorted(file.exclude)),
    }
    return [f"{key}: {a} and {b}" for key, (a, b) in pairs.items() if a != b]


def _matrices(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the weights of linear modules by module name."""
    return {
        name.removesuffix(".weight"): info
        for name, info in tensors.items()
        if name.endswith(".weight")
        and len(info.shape) == 2
        and not _NEVER_QUANTIZED.search(name.removesuffix(".weight"))
    }


def scale_problem(
    tensors: Mapping[str, TensorInfo], name: str, shapes: Sequence[tuple[int, ...]]
) -> Iterator[str]:
    """Yield why a scale that must be there is not float32 of one of the shapes."""
    info = tensors.get(name)
    if info is None:
        yield f"{name} is missing"
    elif info.dtype != "F32" or info.shape not in shapes:
        yield f"{name} is {info.dtype} {list(info.shape)}, expected F32 {list(shapes[0])}"


def _module_problems(
    tensors: Mapping[str, TensorInfo], module: str, weight: TensorInfo, claims: Claims
) -> Iterator[str]:
    if claims.quant_algo is None or claims.excludes(module):
        if weight.dtype not in FLOATS:
            why = "is excluded" if claims.quant_algo else "belongs to an unquantized model"
            yield f"{module}.weight is {weight.dtype}, but the module {why}"
        return
    if weight.dtype != FP8_DTYPE:
        yield f"{module}.weight is {weight.dtype}, but {claims.quant_algo} needs {FP8_DTYPE}"
    if claims.quant_algo == STATIC:
        yield from scale_problem(tensors, f"{module}.weight_scale", [(), (1,)])
        yield from scale_problem(tensors, f"{module}.input_scale", [(), (1,)])
        return
    rows = weight.shape[0]
    yield from scale_problem(tensors, f"{module}.weight_scale", [(rows,), (rows, 1)])
    if f"{module}.input_scale" in tensors:
        yield f"{module}.input_scale is there, but {DYNAMIC} takes activation scales at run time"


def _kv_scale_names(tensors: Iterable[str]) -> list[str]:
    return sorted(name for name in tensors if name.endswith((".k_scale", ".v_scale")))


def _kv_problems(tensors: Mapping[str, TensorInfo], claims: Claims, layers: int) -> Iterator[str]:
    present = _kv_scale_names(tensors)
    if claims.kv_cache_quant_algo is None:
        if present:
            yield f"{len(present)} KV scales are there ({present[0]}), but no KV scheme is claimed"
        return
    for kind in _KV_SCALES.values():
        found = [name for name in present if name.endswith(f".{kind}")]
        if len(found) != layers:
            yield f"{len(found)} of {layers} layers have a {kind}"
    for name in present:
        yield from scale_problem(tensors, name, [(), (1,)])


def _stray_scales(tensors: Mapping[str, TensorInfo], claims: Claims) -> Iterator[str]:
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind not in ("weight_scale", "input_scale"):
            continue
        if f"{module}.weight" not in tensors:
            yield f"{name} is there, but {module}.weight is not"
        elif claims.quant_algo is None or claims.excludes(module):
            yield f"{name} is there, but {module} is not quantized"


def unknown_algo(claims: Claims) -> Iterator[str]:
    """Yield algorithms that fp8flow does not know."""
    if claims.quant_algo not in (None, STATIC, DYNAMIC):
        yield f"quant_algo is {claims.quant_algo}; known are {STATIC}, {DYNAMIC} and none"
    if claims.kv_cache_quant_algo not in (None, "FP8"):
        yield f"kv_cache_quant_algo is {claims.kv_cache_quant_algo}; known are FP8 and none"


def _header_problems(
    tensors: Mapping[str, TensorInfo], claims: Claims, layers: int
) -> Iterator[str]:
    yield from unknown_algo(claims)
    for module, weight in _matrices(tensors).items():
        yield from _module_problems(tensors, module, weight, claims)
    yield from _kv_problems(tensors, claims, layers)
    yield from _stray_scales(tensors, claims)


def raise_for(folder: Path, problems: Iterable[str]) -> None:
    """Stop if there are problems.

    Raises:
        FlowError: listing the first ones.
    """
    found = list(problems)
    if not found:
        return
    listed = "\n  ".join(found[:_SHOWN_PROBLEMS])
    more = f"\n  and {len(found) - _SHOWN_PROBLEMS} more" if len(found) > _SHOWN_PROBLEMS else ""
    raise FlowError(
        f"{folder}: the tensors are not what the configuration claims:\n  {listed}{more}\n"
        "Do not serve this checkpoint; export it again."
    )


def inspect_checkpoint(folder: Path, *, kv_scales_optional: bool = False) -> dict[str, Any]:
    """Compare a checkpoint's claims with its tensors and summarise its scales.

    Args:
        folder: unified Hugging Face checkpoint, quantized by ModelOpt or unquantized.
        kv_scales_optional: accept an FP8 KV cache without any scale: engines take 1.0.

    Returns:
        ``claims``: quant_algo, kv_cache_quant_algo, exclude, producer, and where they were read;
        ``modules``: quantized and excluded module names, and counts;
        ``scales``: for each layer and in total the spread (min, median, max, count) of
        weight_scale, input_scale, k_scale, v_scale, and ``saturation``, the share of FP8 weights
        whose magnitude is 448, the largest that E4M3 has; ``dtype``, ``rope``, ``parameters``, and
        ``bytes`` of the weights.

    Raises:
        FlowError: if the tensors do not meet the claims, or the two configurations disagree.
    """
    config = read_json(folder / "config.json")
    claims = read_claims(folder)
    tensors = read_folder(folder)
    layers = int(config["num_hidden_layers"])
    checked = claims
    if kv_scales_optional and not _kv_scale_names(tensors):
        checked = replace(claims, kv_cache_quant_algo=None)
    raise_for(folder, _header_problems(tensors, checked, layers))
    values = read_values(tensors, _SCALES)
    raise_for(folder, value_problems(values))
    matrices = _matrices(tensors)
    quantized = sorted(name for name, info in matrices.items() if info.dtype == FP8_DTYPE)
    return {
        "claims": claims.as_dict(_claim_files(folder, config)),
        "modules": describe_modules(matrices, quantized),
        "scales": scale_report(values, _SCALES),
        "dtype": read_dtype(config),
        "rope": read_rope(config).as_dict(),
        "parameters": _parameters(tensors),
        "bytes": sum(path.stat().st_size for path in {info.file for info in tensors.values()}),
    }


def describe_modules(modules: Iterable[str], quantized: list[str]) -> dict[str, Any]:
    """Return which of a checkpoint's linear modules are quantized, for a record."""
    return {
        "quantized_count": len(quantized),
        "quantized": quantized,
        "unquantized": sorted(set(modules) - set(quantized)),
    }


def _claim_files(folder: Path, config: Mapping[str, Any]) -> list[str]:
    found = ["config.json"] if config.get("quantization_config") else []
    return found + ([QUANT_CONFIG] if (folder / QUANT_CONFIG).is_file() else [])


def _parameters(tensors: Mapping[str, TensorInfo]) -> int:
    kept = (info for name, info in tensors.items() if name.rpartition(".")[2] not in _SCALES)
    return sum(info.elements for info in kept)
