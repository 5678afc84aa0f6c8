"""Reading a configuration file: every problem at once, each with its place and a way out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from fp8flow.config import Config, QuantizationConfig
from fp8flow.config_base import Section
from fp8flow.config_checks import Location, Problem, Variant, cross_checks
from fp8flow.config_engines import DEFAULT_BACKEND, ENGINES
from fp8flow.errors import FlowError

REFERENCE = "config/README.md"


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration, its variants resolved."""

    config: Config
    variants: dict[str, Variant]
    warnings: tuple[str, ...] = ()


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


def _section_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """Return the model that owns the keys at ``location``, to suggest a spelling."""
    for part in location:
        field = model.model_fields.get(str(part))
        models = models_in(field.annotation) if field is not None else []
        if len(models) != 1:
            return None
        model = models[0]
    return model


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section models in a field's annotation; several where a key tells them apart."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [model for part in get_args(annotation) for model in models_in(part)]
    return []


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
    if kind == "union_tag_invalid":
        return Problem(
            (*location, "backend"), f"{context['tag']!r} is not allowed", f"allowed: {_backends()}"
        )
    if kind == "literal_error":
        return Problem(location, f"{shown} is not allowed", f"allowed: {context['expected']}")
    if kind == "string_pattern_mismatch":
        return Problem(location, f"{shown} is not allowed", f"must match {context['pattern']}")
    return Problem(location, f"{shown}: {error['msg'][0].lower()}{error['msg'][1:]}")


def _validate(model: type[Section], data: Any, prefix: Location = ()) -> tuple[Any, list[Problem]]:
    try:
        return model.model_validate(data), []
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        return None, [_problem(model, error, prefix) for error in errors]


def _problem(model: type[Section], error: Mapping[str, Any], prefix: Location) -> Problem:
    inside: Location = error["loc"]
    owner: type[BaseModel] = model
    shown = prefix + inside
    if len(inside) > 1 and inside[0] == "engine" and inside[1] in ENGINES:
        # Pydantic names the backend as a step of the path, which the file has not.
        owner, inside = ENGINES[str(inside[1])], inside[2:]
        shown = (*prefix, "engine", *inside)
    if error["type"] == "extra_forbidden":
        return _unknown_key(shown, _section_at(owner, inside[:-1]))
    return _explain(error, shown)


def _validate_engine(data: Mapping[str, Any], prefix: Location) -> tuple[Any, list[Problem]]:
    backend = data.get("backend", DEFAULT_BACKEND)
    if backend not in ENGINES:
        place = (*prefix, "backend")
        return None, [Problem(place, f"{backend!r} is not allowed", f"allowed: {_backends()}")]
    return _validate(ENGINES[backend], data, prefix)


def _backends() -> str:
    return ", ".join(ENGINES)


def _resolve_variants(config: Config) -> tuple[dict[str, Variant], list[Problem]]:
    variants, problems = {}, []
    for name, overrides in config.variants.items():
        place: Location = ("variants", name)
        given = merge(config.quantization.model_dump(), overrides.quantization)
        quantization, found = _validate(QuantizationConfig, given, (*place, "quantization"))
        problems += found
        engine, found = _validate_engine(
            _merge_engine(config.engine.model_dump(), overrides.engine), (*place, "engine")
        )
        problems += found
        if quantization and engine:
            variants[name] = Variant(name, quantization, engine)
    return variants, problems


def _merge_engine(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a variant's engine; one that names its backend starts from that one's defaults."""
    return dict(over) if "backend" in over else merge(base, over)


def _render(source: str, problems: list[Problem], lines: Mapping[Location, int]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    out = [f"{source}: {count} in the configuration"]
    for problem in problems:
        known = (problem.location[:n] for n in range(len(problem.location), 0, -1))
        line = next((lines[place] for place in known if place in lines), None)
        out.append(f"  {problem.text(line)}")
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
        problems += cross_checks(config, variants)
    if errors := [problem for problem in problems if not problem.warning]:
        raise FlowError(_render(source, errors, lines or {}))
    assert config is not None
    return LoadedConfig(config, variants, tuple(problem.text() for problem in problems))


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
