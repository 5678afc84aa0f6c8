"""Reading a configuration file: every problem at once, each with its place and a way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from fp8flow.config import Config, EngineConfig, QuantizationConfig, Section
from fp8flow.errors import FlowError

REFERENCE = "config/README.md"
# Folders below results/ that are not variants.
RESERVED = frozenset({"model", "data", "system", "submission", "report", "logs"})
Location = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    location: Location
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Variant:
    """One variant with its overrides applied."""

    name: str
    quantization: QuantizationConfig
    engine: EngineConfig


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration, its variants resolved."""

    config: Config
    variants: dict[str, Variant]


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML loader that refuses a key given twice, which YAML would silently drop."""


def _construct_unique(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(
                None, None, "keys must be plain text", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        FlowError: if the file is missing, not YAML, has a key twice, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlowError(f"cannot read the configuration {path}: {error}") from error
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FlowError(f"{path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise FlowError(f"{path} must be a mapping of sections, not {type(data).__name__}")
    return data


def _key_lines(path: Path) -> dict[Location, int]:
    """Return the line number of each key, for error messages."""
    lines: dict[Location, int] = {}

    def walk(node: yaml.Node | None, location: Location) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*location, key.value)
                lines[here] = key.start_mark.line + 1
                walk(value, here)

    walk(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), ())
    return lines


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over``, mappings merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _section_at(location: Location) -> type[BaseModel] | None:
    """Return the model that owns the keys at ``location``, to suggest a spelling."""
    model: type[BaseModel] | None = Config
    for part in location:
        if model is None:
            return None
        field = model.model_fields.get(str(part))
        model = model_in(field.annotation) if field is not None else None
    return model


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section model in a field's annotation, optional or not; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((m for a in get_args(annotation) if (m := model_in(a))), None)
    return None


def _known_keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _unknown_key(location: Location, model: type[BaseModel] | None) -> Problem:
    key = str(location[-1])
    known = _known_keys(model) if model else []
    close = difflib.get_close_matches(key, known, n=1)
    message = "unknown key" + (f"; did you mean {close[0]!r}?" if close else "")
    return Problem(location, message, f"allowed: {', '.join(known)}" if known else "")


def _explain(error: Mapping[str, Any], location: Location) -> Problem:
    kind, context = error["type"], error.get("ctx", {})
    shown = repr(error["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if kind == "missing":
        return Problem(location, "is required and not given")
    if kind == "literal_error":
        return Problem(location, f"{shown} is not allowed", f"allowed: {context['expected']}")
    if kind == "string_pattern_mismatch":
        return Problem(location, f"{shown} is not allowed", f"must match {context['pattern']}")
    return Problem(location, f"{shown}: {error['msg'][0].lower()}{error['msg'][1:]}")


def _validate(model: type[Section], data: Any, prefix: Location = ()) -> tuple[Any, list[Problem]]:
    try:
        return model.model_validate(data), []
    except ValidationError as failure:
        problems = []
        for error in failure.errors(include_url=False):
            location = prefix + error["loc"]
            if error["type"] == "extra_forbidden":
                owner = _section_at(location[:-1]) if not prefix else model
                problems.append(_unknown_key(location, owner))
            else:
                problems.append(_explain(error, location))
        return None, problems


def _resolve_variants(config: Config) -> tuple[dict[str, Variant], list[Problem]]:
    variants, problems = {}, []
    for name, overrides in config.variants.items():
        parts: dict[str, Any] = {}
        for section, model in (("quantization", QuantizationConfig), ("engine", EngineConfig)):
            base = getattr(config, section).model_dump()
            merged = merge(base, getattr(overrides, section))
            parts[section], found = _validate(model, merged, ("variants", name, section))
            problems += found
        if all(parts.values()):
            variants[name] = Variant(name, **parts)
    return variants, problems


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


def _cross_checks(config: Config, variants: Mapping[str, Variant]) -> Iterator[Problem]:
    yield from _needs(
        "model",
        config.model,
        {"hub": ("id", "revision"), "local": ("path",), "synthetic": ("synthetic",)},
    )
    files = {"mlcommons": ("path",), "file": ("path",)}
    yield from _needs("dataset", config.dataset, files)
    yield from _needs("calibration", config.calibration, files)
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
        yield from _serve_checks(config, variant)


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


def _serve_checks(config: Config, variant: Variant) -> Iterator[Problem]:
    serve = variant.engine.serve
    where: Location = ("variants", variant.name, "engine", "serve")
    if serve.max_batch_tokens < serve.max_batch_size:
        yield Problem(
            (*where, "max_batch_tokens"),
            f"{serve.max_batch_tokens} is smaller than max_batch_size {serve.max_batch_size}",
            "every running request needs one token per pass",
        )
    if serve.kv_cache_tokens <= config.harness.max_output_tokens:
        yield Problem(
            (*where, "kv_cache_tokens"),
            f"{serve.kv_cache_tokens} tokens cannot hold one answer of "
            f"{config.harness.max_output_tokens} tokens and its prompt",
        )


def _render(source: str, problems: list[Problem], lines: Mapping[Location, int]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    out = [f"{source}: {count} in the configuration"]
    for problem in problems:
        key = ".".join(str(part) for part in problem.location) or "(top level)"
        known = (problem.location[:n] for n in range(len(problem.location), 0, -1))
        line = next((lines[place] for place in known if place in lines), None)
        where = f" (line {line})" if line else ""
        hint = f"\n      {problem.hint}" if problem.hint else ""
        out.append(f"  {key}{where}: {problem.message}{hint}")
    out.append(f"Every key is described in {REFERENCE}.")
    return "\n".join(out)


def check_config(
    data: Mapping[str, Any], source: str, lines: Mapping[Location, int] | None = None
) -> LoadedConfig:
    """Check configuration values and resolve the variants.

    Args:
        data: the sections, as read from YAML.
        source: where they come from, for messages.
        lines: line number of each key, for messages.

    Raises:
        FlowError: listing every problem.
    """
    config, problems = _validate(Config, data)
    variants: dict[str, Variant] = {}
    if config is not None:
        variants, problems = _resolve_variants(config)
        problems += _cross_checks(config, variants)
    if problems:
        raise FlowError(_render(source, problems, lines or {}))
    return LoadedConfig(config, variants)


def load_config(paths: list[Path], overrides: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Read, merge and check configuration files.

    Args:
        paths: files, later ones over earlier ones.
        overrides: values from `--config`; text in them is read as YAML.

    Raises:
        FlowError: listing every problem of the merged configuration.
    """
    data: dict[str, Any] = {}
    lines: dict[Location, int] = {}
    for path in paths:
        data = merge(data, read_yaml(path))
        lines.update(_key_lines(path))
    if overrides:
        data = merge(data, _retype(overrides))
    names = [str(path) for path in paths] + (["--config"] if overrides else [])
    return check_config(data, " + ".join(names), lines if len(paths) == 1 else None)


def _retype(value: Any) -> Any:
    """Give command-line values their YAML types: Snakemake hands over nested ones as text."""
    if isinstance(value, Mapping):
        return {key: _retype(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_retype(item) for item in value]
    if isinstance(value, str):
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return value
    return value
