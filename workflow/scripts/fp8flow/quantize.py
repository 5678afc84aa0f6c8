"""FP8 quantization with ModelOpt: calibrate, export a checkpoint, prove what it holds.

Runs with the ModelOpt and transformers of the lock file and with the older ones inside a
TensorRT-LLM release (ModelOpt from 0.33, transformers from 4.53).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8flow.activation_ranges import (
    INPUTS,
    KV_CACHE,
    Batch,
    can_pack,
    check_rows,
    equal_length_batches,
    measure_ranges,
    packed_batches,
    read_token_rows,
)
from fp8flow.checkpoint import DYNAMIC, STATIC, inspect_checkpoint
from fp8flow.cost import Cost, device
from fp8flow.errors import FlowError
from fp8flow.export import (
    FORMATS,
    TENSORRT_LLM,
    UNIFIED,
    check_trtllm_request,
    export_trtllm,
    export_unified,
    finish_unified,
)
from fp8flow.log import get_logger
from fp8flow.model_folder import check_model_folder, take_folder
from fp8flow.rope import read_rope
from fp8flow.tools import installed_versions
from fp8flow.trtllm_checkpoint import inspect_trtllm_checkpoint
from fp8flow.weights import read_json

# What each method is called in the checkpoint, and ModelOpt's configuration of it.
ALGORITHMS = {"fp8_static": STATIC, "fp8_dynamic": DYNAMIC, "none": None}
_BASE_CONFIGS = {"fp8_static": "FP8_DEFAULT_CFG", "fp8_dynamic": "FP8_PER_CHANNEL_PER_TOKEN_CFG"}
_HEAD_PATTERN = "*lm_head*"
# E4M3's largest number. ModelOpt writes scale = amax / 448, so this amax is a scale of 1.
_FP8_MAX = 448.0
_logger = get_logger(__name__)


@dataclass(frozen=True)
class Recipe:
    """The config section ``quantization``.

    Attributes:
        method: ``fp8_static``, ``fp8_dynamic`` or ``none``.
        kv_cache: ``fp8`` or ``auto`` (the precision of the activations).
        kv_scales: ``cast`` (all 1.0) or ``calibrated`` (measured).
        exclude: patterns of modules that stay as they are.
    """

    method: str
    kv_cache: str
    kv_scales: str
    exclude: tuple[str, ...] = ("lm_head",)

    def __post_init__(self) -> None:
        allowed = {
            "method": tuple(ALGORITHMS),
            "kv_cache": ("fp8", "auto"),
            "kv_scales": ("cast", "calibrated"),
        }
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                raise FlowError(
                    f"quantization.{key} is {getattr(self, key)!r}; allowed: {', '.join(values)}"
                )
        if self.method == "none" and self.measures_kv:
            raise FlowError(
                "quantization: kv_scales: calibrated needs an FP8 method, but method is none; "
                "set kv_scales: cast, or method: fp8_static or fp8_dynamic"
            )

    @property
    def measures_kv(self) -> bool:
        """Whether KV scales are measured on the calibration set."""
        return self.kv_cache == "fp8" and self.kv_scales == "calibrated"

    @property
    def measured_quantizers(self) -> tuple[str, ...]:
        """Names of the quantizers whose range is measured."""
        inputs = INPUTS if self.method == "fp8_static" else ()
        return inputs + (KV_CACHE if self.measures_kv else ())

    @property
    def needs_calibration(self) -> bool:
        """Whether anything is measured on the calibration set."""
        return bool(self.measured_quantizers)

    def excludes(self, module: str) -> bool:
        """Return whether a module, or one that holds it, matches ``exclude``."""
        return any(_matches(module, pattern) for pattern in self.exclude)


def _matches(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def build_quant_config(
    base: Mapping[str, Any],
    kv_cache: Mapping[str, Any] | None,
    exclude: Sequence[str],
    *,
    quantize_head: bool,
) -> dict[str, Any]:
    """Return a ModelOpt configuration with exclusions and the KV cache added.

    ModelOpt changed the inner ``quant_cfg`` from a mapping (before 0.44) to an ordered list; in
    both, later entries win. Exclusions name weight and input quantizers only, so that an
    excluded attention layer keeps its KV cache scales.

    Args:
        base: for example ``FP8_DEFAULT_CFG``; it is not changed.
        kv_cache: for example ``FP8_KV_CFG``, or None to leave the KV cache alone.
        exclude: module name patterns.
        quantize_head: drop ModelOpt's own exclusion of lm_head.

    Raises:
        FlowError: if the inner configuration is neither a list nor a mapping.
    """
    config = copy.deepcopy(dict(base))
    added = copy.deepcopy(kv_cache["quant_cfg"]) if kv_cache else None
    off = [f"{name}.*{kind}_quantizer" for name in exclude for kind in ("weight", "input")]
    inner = config["quant_cfg"]
    if isinstance(inner, list):
        kept = [e for e in inner if not (quantize_head and e["quantizer_name"] == _HEAD_PATTERN)]
        disabled = [{"quantizer_name": pattern, "enable": False} for pattern in off]
        config["quant_cfg"] = [*kept, *disabled, *(added or [])]
    elif isinstance(inner, Mapping):
        kept_map = {k: v for k, v in inner.items() if not (quantize_head and k == _HEAD_PATTERN)}
        disabled_map = {pattern: {"enable": False} for pattern in off}
        config["quant_cfg"] = {**kept_map, **disabled_map, **(added or {})}
    else:
        raise FlowError(
            f"this ModelOpt keeps quant_cfg as {type(inner).__name__}, which fp8flow does not "
            "know; install the pinned version with `make install`"
        )
    config.setdefault("algorithm", "max")
    return config


@dataclass(frozen=True)
class Target:
    """What is written.

    Attributes:
        format: ``unified_hf`` or ``tensorrt_llm``.
        tensor_parallel: GPUs that a TensorRT-LLM checkpoint is split over.
    """

    format: str = UNIFIED
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise FlowError(f"format is {self.format!r}; allowed: {', '.join(FORMATS)}")

    def check(self, recipe: Recipe, model_folder: Path) -> None:
        """Check that the recipe can be written in this format.

        Raises:
            FlowError: naming what cannot be.
        """
        if self.format == UNIFIED:
            return
        if recipe.method == "none" and recipe.kv_cache == "fp8":
            raise FlowError(
                "quantization: method none with kv_cache fp8: ModelOpt writes no FP8 KV cache into "
                "the TensorRT-LLM checkpoint of an unquantized model; set kv_cache: auto, or use "
                "engine.path: pytorch"
            )
        config = read_json(model_folder / "config.json")
        check_trtllm_request(config, self.tensor_parallel, recipe.exclude)

    def write(self, model: Any, model_folder: Path, folder: Path) -> None:
        """Write a model in this format."""
        if self.format == UNIFIED:
            export_unified(model, model_folder, folder)
        else:
            export_trtllm(model, model_folder, folder, self.tensor_parallel)

    def inspect(self, folder: Path) -> dict[str, Any]:
        """Return what a checkpoint of this format holds, after checking its claims."""
        if self.format == UNIFIED:
            return inspect_checkpoint(folder)
        return inspect_trtllm_checkpoint(folder, self.tensor_parallel)


def load_model(model_folder: Path, trust_remote_code: bool) -> Any:
    """Return the model in evaluation mode and its own dtype, on the GPU if there is one.

    Weights go from the file to the GPU one by one, so that the host never holds them all.
    """
    import transformers

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    # transformers 5 calls it dtype; those before 4.56 know torch_dtype only.
    is_new = int(transformers.__version__.split(".")[0]) >= 5
    options["dtype" if is_new else "torch_dtype"] = "auto"
    if device() == "cuda":
        options["device_map"] = {"": "cuda:0"}
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder, **options).eval()


def _linear_modules(model: Any) -> list[str]:
    import torch

    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]


def _check_exclusions(model: Any, recipe: Recipe) -> bool:
    """Return whether the output head is quantized.

    Raises:
        FlowError: if a pattern matches no module, or the head shares the embedding's weights.
    """
    linear = _linear_modules(model)
    for pattern in recipe.exclude:
        if not any(_matches(name, pattern) for name in linear):
            raise FlowError(
                f"quantization.exclude: {pattern!r} matches no linear module of the model; names "
                f"look like {linear[0]} and {linear[-1]}"
            )
    if all(recipe.excludes(name) for name in linear):
        raise FlowError("quantization.exclude leaves nothing to quantize; use method: none")
    heads = [name for name in linear if fnmatchcase(name, _HEAD_PATTERN)]
    quantize_head = any(not recipe.excludes(name) for name in heads)
    if quantize_head and model.config.tie_word_embeddings:
        raise FlowError(
            "quantization.exclude lacks lm_head, but this model's lm_head shares its weights with "
            "the embedding (tie_word_embeddings), which stays bf16; add lm_head to exclude"
        )
    return quantize_head


def _check_tokens(model: Any, rows: Sequence[Sequence[int]]) -> None:
    limit = model.config.vocab_size
    highest = max(max(row) for row in rows)
    if highest >= limit:
        raise FlowError(
            f"the calibration set has token id {highest}, but the model knows {limit} tokens; "
            "it was tokenized for another model, run prepare_calibration again"
        )


def _set_kv_scales_to_one(model: Any) -> None:
    import torch

    for module in model.modules():
        for name in ("k_bmm_quantizer", "v_bmm_quantizer"):
            quantizer = getattr(module, name, None)
            if quantizer is not None and quantizer.is_enabled:
                quantizer.amax = torch.tensor(_FP8_MAX, device=model.device)


def quantize_model(
    model: Any, recipe: Recipe, batches: Sequence[Batch], quantize_head: bool
) -> Any:
    """Return the model with ModelOpt's calibrated quantizers in place.

    Args:
        model: a transformers causal language model in evaluation mode; it is changed.
        recipe: what to quantize.
        batches: calibration batches of token ids; unused if the recipe measures nothing.
        quantize_head: whether lm_head is quantized as well.
    """
    import modelopt.torch.quantization as mtq

    kv_config = mtq.FP8_KV_CFG if recipe.kv_cache == "fp8" else None
    base = getattr(mtq, _BASE_CONFIGS[recipe.method])
    config = build_quant_config(base, kv_config, recipe.exclude, quantize_head=quantize_head)

    def forward_loop(whole: Any) -> None:
        # An unquantized head has nothing to measure, and is a third of a small model's work.
        part = whole if quantize_head else whole.base_model
        measure_ranges(whole, part, batches, recipe.measured_quantizers)

    model = mtq.quantize(model, config, forward_loop if recipe.needs_calibration else None)
    if kv_config and recipe.kv_scales == "cast":
        _set_kv_scales_to_one(model)
    return model


@contextlib.contextmanager
def _no_warnings_about_kv_scales() -> Iterator[None]:
    """Keep ModelOpt from calling scales of 1.0 large: that is what cast means.

    It takes them for measured ones and warns once for each of them.
    """
    logger = logging.getLogger("modelopt.torch.export.quant_utils")

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Large KV activations detected")

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _check_outcome(recipe: Recipe, report: Mapping[str, Any]) -> None:
    claims, totals = report["claims"], report["scales"]["total"]
    kv_expected = "FP8" if recipe.kv_cache == "fp8" and recipe.method != "none" else None
    problems = []
    if claims["quant_algo"] != ALGORITHMS[recipe.method]:
        problems.append(f"quant_algo is {claims['quant_algo']}, not {ALGORITHMS[recipe.method]}")
    if claims["kv_cache_quant_algo"] != kv_expected:
        problems.append(f"kv_cache_quant_algo is {claims['kv_cache_quant_algo']}")
    if kv_expected and recipe.kv_scales == "cast":
        for kind in ("k_scale", "v_scale", "kv_scale"):
            spread = totals.get(kind)
            if spread and (spread["min"], spread["max"]) != (1.0, 1.0):
                problems.append(f"{kind} is not 1.0 everywhere: {spread}")
    modules = report["modules"]
    wrong = [name for name in modules["quantized"] if recipe.excludes(name)]
    problems += [f"{name} is quantized though excluded" for name in wrong]
    if recipe.method != "none":
        left = [name for name in modules["unquantized"] if not recipe.excludes(name)]
        problems += [f"{name} is not quantized though not excluded" for name in left]
    if problems:
        listed = "\n  ".join(problems[:10])
        raise FlowError(
            f"ModelOpt did not do what quantization asks for:\n  {listed}\n"
            "Compare the installed ModelOpt with the lock file (`make install`)."
        )


def _counts(batches: Sequence[Batch], batch_size: int, packed: bool) -> dict[str, Any]:
    how = "rows one after another, masked from each other" if packed else "rows of equal length"
    return {
        "rows": sum(len(batch) for batch in batches),
        "batches": len(batches),
        "largest_batch": max((len(batch) for batch in batches), default=0),
        "tokens": sum(len(row) for batch in batches for row in batch),
        "batch_size": batch_size,
        "batching": f"{how}, no padding",
    }


def _rows(recipe: Recipe, samples: Path | None) -> list[list[int]]:
    if not recipe.needs_calibration:
        return []
    if samples is None:
        raise FlowError(
            f"quantization.method {recipe.method} needs a calibration set; give --calibration"
        )
    rows = read_token_rows(samples)
    check_rows(rows)
    return rows


def _quantized(
    model_folder: Path, folder: Path, recipe: Recipe, target: Target, cost: Cost,
    samples: Path | None, batch_size: int, trust_remote_code: bool,
) -> dict[str, Any]:  # fmt: skip
    rows = _rows(recipe, samples)
    with cost.phase("load"):
        model = load_model(model_folder, trust_remote_code)
    quantize_head = _check_exclusions(model, recipe)
    _check_tokens(model, rows or [[0]])
    # Packing saves a GPU's waiting; on a CPU it would only add attention.
    packed = bool(rows) and device() == "cuda" and can_pack(model)
    batching = packed_batches if packed else equal_length_batches
    batches = batching(rows, batch_size) if rows else []
    # ModelOpt reports with print; a program's standard output is for its own results.
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(contextlib.redirect_stdout(sys.stderr))
        if recipe.kv_scales == "cast":
            quiet.enter_context(_no_warnings_about_kv_scales())
        with cost.phase("calibrate"):
            model = quantize_model(model, recipe, batches, quantize_head)
        with cost.phase("export"):
            target.write(model, model_folder, folder)
    counts = _counts(batches, batch_size, packed) if rows else None
    return {"calibration": counts, "device": device()}


def _unquantized(
    model_folder: Path, folder: Path, target: Target, cost: Cost, trust_remote_code: bool
) -> dict[str, Any]:
    if target.format == TENSORRT_LLM:
        with cost.phase("load"):
            model = load_model(model_folder, trust_remote_code)
        with cost.phase("export"), contextlib.redirect_stdout(sys.stderr):
            target.write(model, model_folder, folder)
        return {"calibration": None, "device": device()}
    with cost.phase("export"):
        take_folder(model_folder, folder, trust_remote_code=trust_remote_code)
        source = read_json(model_folder / "config.json")
        finish_unified(folder, source, read_rope(source))
    return {"calibration": None, "device": None}


def _clamps_kv_scales() -> bool:
    """Return whether this ModelOpt also writes KV scales of at least 1.0 in the unified format."""
    version = installed_versions(["nvidia-modelopt"])["nvidia-modelopt"]
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 43)


def _notes(recipe: Recipe, target: Target) -> list[str]:
    notes = []
    if recipe.method == "none":
        notes.append("the original weights, unchanged; config.json gives RoPE in every spelling")
        if recipe.kv_cache == "fp8":
            notes.append(
                "KV cache in FP8 is up to the engine; there are no scales, which means 1.0"
            )
    elif not recipe.needs_calibration:
        notes.append(
            "nothing was calibrated: activation scales are taken at run time"
            + (", KV scales are 1.0" if recipe.kv_cache == "fp8" else "")
        )
    if recipe.measures_kv and (target.format == TENSORRT_LLM or _clamps_kv_scales()):
        notes.append("measured KV scales below 1.0 are written as 1.0 by this ModelOpt and format")
    return notes


def make_checkpoint(
    model_folder: Path,
    folder: Path,
    recipe: Recipe,
    *,
    target: Target = Target(),
    samples: Path | None = None,
    batch_size: int = 1,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write the checkpoint that is served and return what it holds.

    Args:
        model_folder: the model in its original precision.
        folder: an existing empty folder.
        recipe: what to quantize and how.
        target: format that is written.
        samples: calibration samples.parquet, column ``token_ids``; needed if something is measured.
        batch_size: most sequences per calibration batch.
        trust_remote_code: whether the model may run its own Python code.

    Returns:
        format, method, kv_cache, kv_scales, quant_algo, calibration (rows, batches, tokens; None
        without), claims, modules, scales, rope, dtype, bytes, parameters, versions, device, cost
        (see :class:`Cost`), notes.

    Raises:
        FlowError: if model, samples or exclusions are unfit, or the tensors that were written are
            not what was asked for.
    """
    check_model_folder(model_folder, trust_remote_code=trust_remote_code)
    target.check(recipe, model_folder)
    cost = Cost()
    if recipe.method == "none":
        facts = _unquantized(model_folder, folder, target, cost, trust_remote_code)
    else:
        facts = _quantized(
            model_folder, folder, recipe, target, cost, samples, batch_size, trust_remote_code
        )
    with cost.phase("inspect"):
        report = target.inspect(folder)
    _check_outcome(recipe, report)
    _logger.info(
        "%s, %s: %d modules quantized, %d bytes",
        recipe.method, target.format, report["modules"]["quantized_count"], report["bytes"],
    )  # fmt: skip
    return {
        "format": target.format,
        "method": recipe.method,
        "kv_cache": recipe.kv_cache,
        "kv_scales": recipe.kv_scales if recipe.kv_cache == "fp8" else None,
        "quant_algo": report["claims"]["quant_algo"],
        "exclude": list(recipe.exclude),
        **facts,
        **report,
        "versions": installed_versions(("nvidia-modelopt", "torch", "transformers")),
        "cost": cost.as_dict(),
        "notes": _notes(recipe, target),
    }
