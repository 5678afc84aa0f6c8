"""FP8 quantization with ModelOpt: calibrate, export a unified checkpoint, prove what it holds."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8flow.checkpoint import DYNAMIC, STATIC, inspect_checkpoint
from fp8flow.errors import FlowError
from fp8flow.log import get_logger, progress
from fp8flow.model_folder import check_model_folder, copy_tokenizer, take_folder
from fp8flow.rope import Rope, patch_config, read_dtype, read_rope
from fp8flow.tools import installed_versions
from fp8flow.weights import read_json, write_json

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
    def needs_calibration(self) -> bool:
        """Whether anything is measured on the calibration set."""
        return self.method == "fp8_static" or self.measures_kv

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


def equal_length_batches(rows: Sequence[Sequence[int]], batch_size: int) -> list[list[list[int]]]:
    """Return batches of rows of one length, shortest first, in their order within a length.

    A static scale is the largest activation ever seen, and padding is seen too: attention masks
    keep padding out of the other tokens' results, but not out of the statistics of the linear
    layers, which run on every position. Batches without padding are exact, need no support from
    the model, and cost little: a prompt of a few hundred tokens already keeps the device busy.

    Raises:
        FlowError: if there are no rows, or one is empty.
    """
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for row in rows:
        by_length[len(row)].append(list(row))
    if not by_length or 0 in by_length:
        raise FlowError(
            "the calibration set has no rows or an empty one; check calibration.source and samples"
        )
    return [
        group[start : start + batch_size]
        for _, group in sorted(by_length.items())
        for start in range(0, len(group), batch_size)
    ]


def read_token_rows(path: Path) -> list[list[int]]:
    """Return the column ``token_ids`` of a samples.parquet.

    Raises:
        FlowError: if the file cannot be read or has no such column.
    """
    import pyarrow.parquet as pq

    try:
        rows: list[list[int]] = pq.read_table(path, columns=["token_ids"])["token_ids"].to_pylist()
    except (OSError, KeyError, ValueError) as error:
        raise FlowError(
            f"cannot read the calibration samples {path}: {error}; run prepare_calibration again"
        ) from error
    return rows


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _load(model_folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype="auto", trust_remote_code=trust_remote_code
    )
    return model.to(_device()).eval()


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


def _calibrate(part: Any, batches: Sequence[Sequence[Sequence[int]]]) -> None:
    import torch

    with torch.inference_mode():
        for batch in progress(batches, "calibration", unit="batch"):
            part(torch.tensor(batch, device=part.device), use_cache=False)


def _set_kv_scales_to_one(model: Any) -> None:
    import torch

    for module in model.modules():
        for name in ("k_bmm_quantizer", "v_bmm_quantizer"):
            quantizer = getattr(module, name, None)
            if quantizer is not None and quantizer.is_enabled:
                quantizer.amax = torch.tensor(_FP8_MAX, device=model.device)


def quantize_model(
    model: Any, recipe: Recipe, batches: Sequence[Sequence[Sequence[int]]], quantize_head: bool
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
        _calibrate(whole if quantize_head else whole.base_model, batches)

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


def export_checkpoint(model: Any, model_folder: Path, folder: Path) -> None:
    """Write the unified Hugging Face checkpoint with tokenizer and the source's settings.

    Raises:
        FlowError: if RoPE does not read as in the source model.
    """
    from modelopt.torch.export import export_hf_checkpoint

    source = read_json(model_folder / "config.json")
    export_hf_checkpoint(model, export_dir=folder)
    _finish(folder, source, read_rope(source))
    copy_tokenizer(model_folder, folder)
    generation = model_folder / "generation_config.json"
    if generation.is_file():
        (folder / generation.name).write_bytes(generation.read_bytes())


def _finish(folder: Path, source: Mapping[str, Any], rope: Rope) -> None:
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


def _check_outcome(recipe: Recipe, report: Mapping[str, Any]) -> None:
    claims, totals = report["claims"], report["scales"]["total"]
    kv_expected = "FP8" if recipe.kv_cache == "fp8" and recipe.method != "none" else None
    problems = []
    if claims["quant_algo"] != ALGORITHMS[recipe.method]:
        problems.append(f"quant_algo is {claims['quant_algo']}, not {ALGORITHMS[recipe.method]}")
    if claims["kv_cache_quant_algo"] != kv_expected:
        problems.append(f"kv_cache_quant_algo is {claims['kv_cache_quant_algo']}")
    if kv_expected and recipe.kv_scales == "cast":
        for kind in ("k_scale", "v_scale"):
            if (totals[kind]["min"], totals[kind]["max"]) != (1.0, 1.0):
                problems.append(f"{kind} is not 1.0 everywhere: {totals[kind]}")
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


def _counts(batches: Sequence[Sequence[Sequence[int]]], batch_size: int) -> dict[str, Any]:
    return {
        "rows": sum(len(batch) for batch in batches),
        "batches": len(batches),
        "largest_batch": max((len(batch) for batch in batches), default=0),
        "tokens": sum(len(row) for batch in batches for row in batch),
        "batch_size": batch_size,
        "batching": "rows of equal length, no padding",
    }


def _quantized(
    model_folder: Path, folder: Path, recipe: Recipe, samples: Path | None, batch_size: int,
    trust_remote_code: bool,
) -> dict[str, Any]:  # fmt: skip
    batches: list[list[list[int]]] = []
    if recipe.needs_calibration:
        if samples is None:
            raise FlowError(
                f"quantization.method {recipe.method} needs a calibration set; give --calibration"
            )
        batches = equal_length_batches(read_token_rows(samples), batch_size)
    model = _load(model_folder, trust_remote_code)
    quantize_head = _check_exclusions(model, recipe)
    _check_tokens(model, [row for batch in batches for row in batch] or [[0]])
    # ModelOpt reports with print; a program's standard output is for its own results.
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(contextlib.redirect_stdout(sys.stderr))
        if recipe.kv_scales == "cast":
            quiet.enter_context(_no_warnings_about_kv_scales())
        model = quantize_model(model, recipe, batches, quantize_head)
        export_checkpoint(model, model_folder, folder)
    if not recipe.needs_calibration:
        return {"calibration": None, "device": _device()}
    return {"calibration": _counts(batches, batch_size), "device": _device()}


def _unquantized(model_folder: Path, folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    take_folder(model_folder, folder, trust_remote_code=trust_remote_code)
    source = read_json(model_folder / "config.json")
    _finish(folder, source, read_rope(source))
    return {"calibration": None, "device": None}


def _notes(recipe: Recipe) -> list[str]:
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
    return notes


def make_checkpoint(
    model_folder: Path,
    folder: Path,
    recipe: Recipe,
    *,
    samples: Path | None = None,
    batch_size: int = 1,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write the checkpoint that is served and return what it holds.

    Args:
        model_folder: the model in its original precision.
        folder: an existing empty folder.
        recipe: what to quantize and how.
        samples: calibration samples.parquet, column ``token_ids``; needed if something is measured.
        batch_size: most sequences per calibration batch.
        trust_remote_code: whether the model may run its own Python code.

    Returns:
        method, kv_cache, kv_scales, quant_algo, calibration (rows, batches, tokens; None without),
        claims, modules, scales, rope, dtype, bytes, parameters, versions, device, notes.

    Raises:
        FlowError: if model, samples or exclusions are unfit, or the tensors that were written are
            not what was asked for.
    """
    check_model_folder(model_folder, trust_remote_code=trust_remote_code)
    if recipe.method == "none":
        facts = _unquantized(model_folder, folder, trust_remote_code)
    else:
        facts = _quantized(model_folder, folder, recipe, samples, batch_size, trust_remote_code)
    report = inspect_checkpoint(folder)
    _check_outcome(recipe, report)
    _logger.info(
        "%s: %d modules quantized, %d bytes",
        recipe.method, report["modules"]["quantized_count"], report["bytes"],
    )  # fmt: skip
    return {
        "method": recipe.method,
        "kv_cache": recipe.kv_cache,
        "kv_scales": recipe.kv_scales if recipe.kv_cache == "fp8" else None,
        "quant_algo": report["claims"]["quant_algo"],
        "exclude": list(recipe.exclude),
        **facts,
        **report,
        "versions": installed_versions(("nvidia-modelopt", "torch", "transformers")),
        "notes": _notes(recipe),
    }
