"""A checkpoint that somebody else quantized: taken as it is, and shown to be of this model.

Prompts are tokenized with the model's tokenizer and answers end at the model's end tokens, so both
come from the model product; geometry, vocabulary and RoPE must be the model's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8flow.checkpoint import QUANT_CONFIG, Claims, inspect_checkpoint, read_claims
from fp8flow.cost import Cost
from fp8flow.errors import FlowError
from fp8flow.export import TENSORRT_LLM, copy_generation_config, finish_unified
from fp8flow.hub import download_snapshot
from fp8flow.log import get_logger
from fp8flow.model_folder import FOLDER_PATTERNS, copy_tokenizer, link_or_copy
from fp8flow.rope import read_rope
from fp8flow.tools import installed_versions
from fp8flow.weights import FP8_DTYPE, INDEX_FILE, read_folder, read_json, weight_files, write_json

SECTION = "quantization.given"
_GEOMETRY = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "hidden_act", "rms_norm_eps",
)  # fmt: skip
_HEAD = "lm_head"
_TOKENIZER = "tokenizer.json"
_FLOAT8 = {"num_bits": 8, "type": "float"}
_logger = get_logger(__name__)


def _find(given: Mapping[str, Any]) -> Path:
    """Return the folder of the checkpoint, downloaded if it is on the hub."""
    if given["source"] == "hub":
        return download_snapshot(SECTION, given["id"], given["revision"], FOLDER_PATTERNS)
    if given["source"] != "local":
        raise FlowError(f"{SECTION}.source is {given['source']!r}; allowed: hub, local")
    if not given["path"] or not (Path(given["path"]) / "config.json").is_file():
        raise FlowError(
            f"{SECTION}.path is {given['path']!r}, which is no folder with a config.json; give the "
            "checkpoint's folder"
        )
    return Path(given["path"])


def _differences(given: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    for key in _GEOMETRY:
        if given.get(key) != model.get(key):
            yield f"{key} is {given.get(key)}, the model's {model.get(key)}"
    for key in ("architectures", "tie_word_embeddings"):
        found, wanted = given.get(key) or False, model.get(key) or False
        if found != wanted:
            yield f"{key} is {found}, the model's {wanted}"
    if _head_size(given) != _head_size(model):
        yield f"head_dim is {_head_size(given)}, the model's {_head_size(model)}"
    found_rope, wanted_rope = read_rope(given), read_rope(model)
    if not found_rope.same_as(wanted_rope):
        yield f"RoPE is {found_rope.as_dict()}, the model's {wanted_rope.as_dict()}"


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _vocabulary(path: Path) -> dict[str, int]:
    data = read_json(path)
    words = dict((data.get("model") or {}).get("vocab") or {})
    return words | {entry["content"]: entry["id"] for entry in data.get("added_tokens") or ()}


def _token_differences(source: Path, model_folder: Path) -> Iterator[str]:
    paths = (source / _TOKENIZER, model_folder / _TOKENIZER)
    if not all(path.is_file() for path in paths):
        return
    if paths[0].read_bytes() == paths[1].read_bytes():
        return
    found, wanted = map(_vocabulary, paths)
    if found != wanted:
        other = sorted({word for word, _ in found.items() ^ wanted.items()})
        yield f"{_TOKENIZER} differs from the model's for {len(other)} tokens, such as {other[0]!r}"


def _check_same_model(source: Path, model_folder: Path) -> None:
    """Check that a checkpoint is a quantized form of the model.

    Raises:
        FlowError: listing what differs.
    """
    found, wanted = (read_json(folder / "config.json") for folder in (source, model_folder))
    problems = [*_differences(found, wanted), *_token_differences(source, model_folder)]
    if problems:
        listed = "\n  ".join(problems)
        raise FlowError(
            f"{SECTION}: {source} is not a quantized form of the configured model:\n  {listed}\n"
            "Give the checkpoint of that model, or set `model` to the one it was made from."
        )


def _take(source: Path, model_folder: Path, folder: Path) -> None:
    """Bring weights and claims into ``folder``, tokenizer and end tokens from the model."""
    for path in weight_files(source):
        link_or_copy(path.resolve(), folder / path.name)
    for name in ("config.json", QUANT_CONFIG, INDEX_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    copy_tokenizer(model_folder, folder)
    copy_generation_config(model_folder, folder)


def _scheme(claims: Claims) -> dict[str, Any]:
    """Return the section that ModelOpt from 0.35 on writes into config.json."""
    section: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": claims.quant_algo,
        "ignore": list(claims.exclude),
        "producer": claims.producer,
    }
    if claims.kv_cache_quant_algo == "FP8":
        section["kv_cache_scheme"] = {"dynamic": False, **_FLOAT8}
    return section


def _complete_claims(folder: Path) -> list[str]:
    """Write what engines need and older exports lack; return notes about it."""
    notes = []
    path, quant_path = folder / "config.json", folder / QUANT_CONFIG
    config, claims = read_json(path), read_claims(folder)
    if claims.quant_algo is None:
        raise FlowError(
            f"{SECTION}: the checkpoint's config.json and {QUANT_CONFIG} name no quant_algo, so it "
            "is no FP8 checkpoint of ModelOpt; to serve unquantized weights use method: none"
        )
    if not claims.exclude and _head_is_float(folder):
        # Engines that read such a file keep the head as it is, too.
        claims = Claims(claims.quant_algo, claims.kv_cache_quant_algo, (_HEAD,), claims.producer)
        notes.append(f"the checkpoint names no excluded modules; {_HEAD} is unquantized and added")
        if quant_path.is_file():
            data = read_json(quant_path)
            data["quantization"]["exclude_modules"] = [_HEAD]
            write_json(quant_path, data)
        if "quantization_config" in config:
            config["quantization_config"]["ignore"] = [_HEAD]
    if "quantization_config" not in config:
        config["quantization_config"] = _scheme(claims)
        notes.append(f"config.json had no quantization_config; it says what {QUANT_CONFIG} says")
    elif not config["quantization_config"].get("quant_method"):
        notes.append("config.json had no quant_method; it is modelopt")
    write_json(path, config)
    return notes


def _head_is_float(folder: Path) -> bool:
    head = read_folder(folder).get(f"{_HEAD}.weight")
    return head is not None and head.dtype != FP8_DTYPE


def _kv_scales(report: Mapping[str, Any]) -> str | None:
    """Return what the KV scales are: given, absent (engines take 1.0), or None without FP8."""
    if report["claims"]["kv_cache_quant_algo"] != "FP8":
        return None
    return "given" if report["scales"]["total"]["k_scale"] else "absent"


def take_given(
    settings: Mapping[str, Any],
    model_folder: Path,
    folder: Path,
    checkpoint_format: str,
    *,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Bring a ready FP8 checkpoint into ``folder`` and return what it is.

    Weights are linked or copied and never changed; config.json gets RoPE, dtype and quantization
    method as every engine reads them.

    Args:
        settings: the config section ``quantization``; ``given`` has source, id, revision, path.
        model_folder: the model that it was made from.
        folder: an existing empty folder.
        checkpoint_format: must be ``unified_hf``.
        trust_remote_code: whether the model may run its own Python code.

    Returns:
        What :func:`fp8flow.quantize.make_checkpoint` returns, with method ``given``, ``given``
        (source, id, revision, path), kv_cache and quant_algo as the files say.

    Raises:
        FlowError: if it cannot be had, is of another model, or its tensors are not what it claims.
    """
    if checkpoint_format == TENSORRT_LLM:
        raise FlowError(
            "quantization.method given: a Hugging Face checkpoint has no form that trtllm-build "
            "reads; use engine.path: pytorch, or let fp8flow quantize (method: fp8_static)"
        )
    cost = Cost()
    with cost.phase("load"):
        source = _find(settings["given"])
        _check_same_model(source, model_folder)
        _take(source, model_folder, folder)
    if read_json(folder / "config.json").get("auto_map") and not trust_remote_code:
        raise FlowError(f"{SECTION}: {source} wants to run its own Python code; it is not taken")
    with cost.phase("export"):
        notes = _complete_claims(folder)
        model = read_json(model_folder / "config.json")
        finish_unified(folder, model, read_rope(model))
    with cost.phase("inspect"):
        report = inspect_checkpoint(folder, kv_scales_optional=True)
    scales = _kv_scales(report)
    if scales == "absent":
        notes.append("an FP8 KV cache is claimed without scales, which means 1.0")
    _logger.info("given: %s, %d bytes", report["claims"]["quant_algo"], report["bytes"])
    return {
        "format": checkpoint_format,
        "method": "given",
        "given": dict(settings["given"]),
        "kv_cache": "fp8" if scales else "auto",
        "kv_scales": scales,
        "quant_algo": report["claims"]["quant_algo"],
        "exclude": report["claims"]["exclude"],
        "calibration": None,
        "device": None,
        **report,
        "versions": installed_versions(("torch", "transformers")),
        "cost": cost.as_dict(),
        "notes": notes,
    }
