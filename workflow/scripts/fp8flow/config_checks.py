"""Checks that compare keys of the configuration with each other and with what is on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.config import Config, QuantizationConfig
from fp8flow.config_engines import (
    Engine,
    ExternalEngine,
    GpuEngine,
    TransformersEngine,
    TrtllmEngine,
)

# Folders below results/ that are not variants.
RESERVED = frozenset({"model", "data", "system", "submission", "report", "logs"})
Location = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration, or, as a warning, only may be."""

    location: Location
    message: str
    hint: str = ""
    warning: bool = False

    def text(self, line: int | None = None) -> str:
        """Return the problem for people; ``line``: of the key in its file."""
        key = ".".join(str(part) for part in self.location) or "(top level)"
        where = f" (line {line})" if line else ""
        hint = f"\n      {self.hint}" if self.hint else ""
        return f"{key}{where}: {self.message}{hint}"


@dataclass(frozen=True)
class Variant:
    """One variant with its overrides applied."""

    name: str
    quantization: QuantizationConfig
    engine: Engine

    @property
    def builds_engine(self) -> bool:
        """Whether it is served from a TensorRT engine."""
        return isinstance(self.engine, TrtllmEngine) and self.engine.path == "engine"

    @property
    def is_calibrated(self) -> bool:
        """Whether its checkpoint is made with the calibration set."""
        return self.quantization.method not in ("none", "given")

    @property
    def gpus(self) -> int:
        """How many GPUs its servers occupy."""
        engine = self.engine
        return engine.replicas * engine.tensor_parallel if isinstance(engine, GpuEngine) else 0


def _needs(section: str, config: Any, rules: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    for key in rules.get(config.source, ()):
        if getattr(config, key) is None:
            yield Problem((section, key), f"is required with {section}.source: {config.source}")


def _missing_paths(config: Config) -> Iterator[Problem]:
    places = {
        ("model", "path"): config.model.path,
        ("dataset", "path"): config.dataset.path,
        ("calibration", "path"): config.calibration.path,
    }
    id_list = config.calibration.id_list
    if id_list and "://" not in id_list:
        places["calibration", "id_list"] = id_list
    for location, path in places.items():
        if path is not None and not Path(path).exists():
            absolute = Path(path).absolute()
            yield Problem(location, f"{path!r} does not exist", f"looked at {absolute}")


def cross_checks(config: Config, variants: Mapping[str, Variant]) -> Iterator[Problem]:
    """Yield what is wrong between keys, or between a key and the disk."""
    yield from _needs(
        "model",
        config.model,
        {"hub": ("id", "revision"), "local": ("path",), "synthetic": ("synthetic",)},
    )
    files = {"mlcommons": ("path",), "file": ("path",), "synthetic": ("synthetic",)}
    yield from _needs("dataset", config.dataset, files | {"synthetic": ("synthetic", "samples")})
    yield from _needs("calibration", config.calibration, files)
    yield from _synthetic_lengths(config)
    yield from _missing_paths(config)
    yield from _inside_results(config)
    yield from _calibration_checks(config)
    for name in config.variants.keys() & RESERVED:
        yield Problem(
            ("variants", name),
            "is the name of a results folder",
            f"choose another name than {', '.join(sorted(RESERVED))}",
        )
    if not config.scenarios.chosen():
        yield Problem(("scenarios",), "no scenario is given", "give at least Offline")
    if config.submission.variant not in config.variants:
        yield Problem(
            ("submission", "variant"),
            f"{config.submission.variant!r} is not a variant",
            f"allowed: {', '.join(config.variants)}",
        )
    if config.harness.min_output_tokens > config.harness.max_output_tokens:
        yield Problem(("harness", "min_output_tokens"), "is larger than max_output_tokens")
    for variant in variants.values():
        yield from _variant_checks(config, variant)


def _synthetic_lengths(config: Config) -> Iterator[Problem]:
    for section in ("dataset", "calibration"):
        lengths = getattr(config, section).synthetic
        if lengths is None:
            continue
        least, mean, most = lengths.min_tokens, lengths.mean_tokens, lengths.max_tokens
        if not (least < mean < most or least == mean == most):
            yield Problem(
                (section, "synthetic"),
                f"min_tokens {least}, mean_tokens {mean} and max_tokens {most} are neither "
                "increasing nor all equal",
            )
    if config.calibration.source == "synthetic" and config.calibration.id_list is not None:
        yield Problem(("calibration", "id_list"), "means nothing with source: synthetic")


def _inside_results(config: Config) -> Iterator[Problem]:
    results = Path(config.run.results).absolute()
    for section in ("model", "dataset", "calibration"):
        path = getattr(config, section).path
        if path is not None and Path(path).absolute().is_relative_to(results):
            yield Problem(
                (section, "path"),
                f"{path!r} lies in run.results, where products are replaced",
                "move it elsewhere, or choose another run.results",
            )


def _calibration_checks(config: Config) -> Iterator[Problem]:
    id_list = config.calibration.id_list
    if id_list and "://" in id_list and config.calibration.id_list_sha256 is None:
        yield Problem(
            ("calibration", "id_list_sha256"),
            "is required when id_list is a URL",
            "give the SHA-256 of the list, so that a changed download is noticed",
        )


def _variant_checks(config: Config, variant: Variant) -> Iterator[Problem]:
    place: Location = ("variants", variant.name)
    yield from _given_checks(variant, (*place, "quantization"))
    if isinstance(variant.engine, TransformersEngine):
        yield from _embedded_checks(config, variant.engine, (*place, "engine", "serve"))
    elif variant.builds_engine:
        yield from _built_engine_checks(config, variant, place)
    elif isinstance(variant.engine, ExternalEngine) and config.harness.min_output_tokens > 1:
        yield Problem(
            ("harness", "min_output_tokens"),
            f"variant {variant.name} asks an external server, whose API knows no minimum",
            "set it to 1",
        )
    yield from _size_checks(config, variant, (*place, "engine", "serve"))
    from fp8flow.engine_checks import contract_problems

    yield from contract_problems(variant)


def _given_checks(variant: Variant, place: Location) -> Iterator[Problem]:
    quantization, engine = variant.quantization, variant.engine
    if quantization.stack == "engine" and engine.backend != "trtllm":
        yield Problem(
            (*place, "stack"),
            f"'engine' means the ModelOpt of a TensorRT-LLM release, but the backend is "
            f"{engine.backend}",
            "use stack: own",
        )
    given = quantization.given
    if quantization.method != "given":
        if given is not None:
            yield Problem((*place, "given"), f"means nothing with method: {quantization.method}")
        return
    if given is None:
        yield Problem((*place, "given"), "is required with method: given")
        return
    needed = {"hub": ("id", "revision"), "local": ("path",)}[given.source]
    for key in needed:
        if getattr(given, key) is None:
            yield Problem((*place, "given", key), f"is required with source: {given.source}")
    if given.path is not None and not Path(given.path).is_dir():
        yield Problem((*place, "given", "path"), f"{given.path!r} is no folder")
    if variant.builds_engine:
        yield Problem(
            (*place, "method"),
            "a given Hugging Face checkpoint has no form that trtllm-build reads",
            "use engine.path: pytorch, or let fp8flow quantize (method: fp8_static)",
        )


def _embedded_checks(
    config: Config, engine: TransformersEngine, place: Location
) -> Iterator[Problem]:
    if engine.serve.kv_cache_tokens <= config.harness.max_output_tokens:
        yield Problem(
            (*place, "kv_cache_tokens"),
            f"{engine.serve.kv_cache_tokens} tokens cannot hold one answer of "
            f"{config.harness.max_output_tokens} tokens and its prompt",
        )


def _built_engine_checks(config: Config, variant: Variant, place: Location) -> Iterator[Problem]:
    engine = variant.engine
    assert isinstance(engine, TrtllmEngine)
    serve = engine.serve
    yield from _engine_format_checks(config, variant, (*place, "quantization"))
    for key in ("stream_interval", "cuda_graph_max_batch_size", "sampler"):
        if getattr(serve, key) is not None:
            yield Problem(
                (*place, "engine", "serve", key),
                "a TensorRT engine has no such setting",
                "leave it out, or use engine.path: pytorch",
            )
    longest = engine.build.max_input_len + config.harness.max_output_tokens
    if longest > serve.max_seq_len:
        yield Problem(
            (*place, "engine", "serve", "max_seq_len"),
            f"{serve.max_seq_len} is less than build.max_input_len and harness.max_output_tokens, "
            f"{longest} tokens",
            f"set it to {longest} or more",
        )


def _engine_format_checks(config: Config, variant: Variant, place: Location) -> Iterator[Problem]:
    """Check what the TensorRT-LLM checkpoint format cannot hold."""
    quantization, engine = variant.quantization, variant.engine
    other = "use engine.path: pytorch"
    if quantization.method in ("fp8_static", "fp8_dynamic") and quantization.exclude != ["lm_head"]:
        yield Problem(
            (*place, "exclude"),
            f"{quantization.exclude} cannot be written for a TensorRT engine",
            f"exclude exactly lm_head, or {other}",
        )
    if quantization.method == "none" and quantization.kv_cache == "fp8":
        yield Problem(
            (*place, "kv_cache"),
            "fp8 with method: none cannot be written for a TensorRT engine",
            f"use kv_cache: auto, or {other}",
        )
    geometry = config.model.synthetic if config.model.source == "synthetic" else None
    parallel = getattr(engine, "tensor_parallel", 1)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if geometry is not None and getattr(geometry, key) % parallel:
            yield Problem(
                ("model", "synthetic", key),
                f"{getattr(geometry, key)} is no multiple of engine.tensor_parallel {parallel}",
            )


def _size_checks(config: Config, variant: Variant, place: Location) -> Iterator[Problem]:
    serve = getattr(variant.engine, "serve", None)
    if serve is None:
        return
    if serve.max_batch_tokens < serve.max_batch_size:
        yield Problem(
            (*place, "max_batch_tokens"),
            f"{serve.max_batch_tokens} is smaller than max_batch_size {serve.max_batch_size}",
            "every running request needs one token per pass",
        )
    limit = getattr(serve, "max_seq_len", None)
    longest = config.dataset.max_input_tokens
    if config.dataset.synthetic is not None and config.dataset.source == "synthetic":
        longest = config.dataset.synthetic.max_tokens
    if limit is None or longest is None:
        return
    if longest + config.harness.max_output_tokens > limit:
        yield Problem(
            (*place, "max_seq_len"),
            f"{limit} tokens cannot hold the longest prompt ({longest}) and answer "
            f"({config.harness.max_output_tokens})",
            f"set it to {longest + config.harness.max_output_tokens} or more",
        )
