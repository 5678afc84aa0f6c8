"""Default YAML, JSON schema and reference page, generated from the configuration models."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fp8flow.config import Config, demo_config
from fp8flow.config_file import models_in

_WIDTH = 96


def default_yaml() -> str:
    """Return config/config.yaml: every key with its value and its description."""
    lines = [
        "# The embedded default: runs end to end on a machine without GPU or model hub.",
        "# Generated from the configuration models (`make config`); every key is described in",
        "# config/README.md. A file given with --configfile replaces this one.",
    ]
    config = demo_config()
    for name, field in Config.model_fields.items():
        lines += ["", *_comment(field.description or "", 0)]
        lines += _yaml_value(name, getattr(config, name), 0)
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: int) -> list[str]:
    prefix = " " * indent + "# "
    return textwrap.wrap(text, _WIDTH, initial_indent=prefix, subsequent_indent=prefix)


def _yaml_value(key: str, value: Any, indent: int) -> list[str]:
    pad = " " * indent
    if isinstance(value, BaseModel):
        inner = []
        for name, field in type(value).model_fields.items():
            inner += _comment(field.description or "", indent + 2)
            inner += _yaml_value(field.alias or name, getattr(value, name), indent + 2)
        return [f"{pad}{key}:", *inner]
    if isinstance(value, dict) and value:
        inner = []
        for name, item in value.items():
            plain = item.model_dump(exclude_defaults=True) if isinstance(item, BaseModel) else item
            inner += [f"{pad}  {name}: {_scalar(plain)}"]
        return [f"{pad}{key}:", *inner]
    return [f"{pad}{key}: {_scalar(value)}"]


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def json_schema() -> str:
    """Return config/schema.json."""
    schema = Config.model_json_schema(by_alias=True)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def reference_page() -> str:
    """Return config/README.md: one table per section."""
    out = [
        "# Configuration",
        "",
        "Generated from `workflow/scripts/fp8flow/config.py` by `make config`; do not edit.",
        "",
        "A file given with `--configfile` replaces `config/config.yaml`; keys that it leaves out",
        "take the defaults below, which are the benchmark's and not the demo's. Several files are",
        "merged in order: `--configfile config/config.yaml my-changes.yaml` changes the demo.",
        "Unknown keys are errors. Paths are relative to the working directory. Give every",
        "configuration a `run.results` of its own, or it rebuilds what lies there.",
        "",
        "The smallest file names what has no default:",
        "",
        *(f"    {line}" for line in _smallest().splitlines()),
        "",
        "How to run (cores, memory, partitions, start-up time-outs) is not configuration: see",
        "`profiles/`.",
    ]
    for title, model, field in _sections(Config, ""):
        state = " (required)" if field is not None and field.is_required() else ""
        text = field.description if field is not None else inspect.getdoc(model)
        out += ["", f"## {title}{state}", "", text or "", ""]
        out += ["| key | values | default | meaning |", "|---|---|---|---|"]
        out += [_row(name, item) for name, item in model.model_fields.items()]
    return "\n".join(out) + "\n"


def smallest_config() -> dict[str, Any]:
    """Return a configuration that holds only what is required."""
    return {
        "run": {"name": "mine", "results": "results-mine"},
        "model": {"source": "local", "path": "models/my-llama", "name": "my-llama"},
        "dataset": {"source": "file", "path": "evaluation.jsonl"},
        "calibration": {"source": "file", "path": "calibration.jsonl"},
        "variants": {"fp8": {}},
        "scenarios": {"Offline": {"target_qps": 60.0}, "Server": {"target_qps": 58.0}},
        "system": {"name": "my-system"},
        "submission": {"submitter": "me", "variant": "fp8"},
    }


def _smallest() -> str:
    lines = (f"{key}: {_scalar(value)}" for key, value in smallest_config().items())
    return "\n".join(lines)


def _sections(
    model: type[BaseModel], prefix: str
) -> Iterator[tuple[str, type[BaseModel], FieldInfo | None]]:
    for name, field in model.model_fields.items():
        title = f"{prefix}{name}"
        found = models_in(field.annotation)
        if name == "variants":
            found, title = [get_args(field.annotation)[1]], "variants.NAME"
        for inner in found:
            backend = inner.model_fields.get("backend") if len(found) > 1 else None
            which = f" (backend {get_args(backend.annotation)[0]})" if backend else ""
            yield f"{title}{which}", inner, None if which else field
            yield from _sections(inner, f"{title}{which}.")


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(field)
    values = _values(field.annotation, field.metadata).replace("|", "\\|")
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `{field.alias or name}` | {values} | {default} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        inner = models_in(field.annotation)
        return (
            "see below" if inner else f"`{_scalar(field.get_default(call_default_factory=True))}`"
        )
    return f"`{_scalar(field.default)}`"


def _values(annotation: Any, metadata: list[Any]) -> str:
    if models_in(annotation):
        return "section" if type(None) not in get_args(annotation) else "section or null"
    arguments = get_args(annotation)
    if arguments and all(isinstance(item, str) for item in arguments):
        return ", ".join(f"`{item}`" for item in arguments)
    if arguments and hasattr(annotation, "__metadata__"):
        return _values(arguments[0], list(annotation.__metadata__))
    if arguments and type(None) in arguments:
        kept = [_values(item, metadata) for item in arguments if item is not type(None)]
        return f"{', '.join(kept)} or null"
    return _type_name(annotation) + _bounds(metadata)


def _type_name(annotation: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
    if annotation in names:
        return names[annotation]
    return "list of text" if str(annotation).startswith("list") else "mapping"


def _bounds(metadata: list[Any]) -> str:
    found = []
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            found += [
                f"{sign} {getattr(part, key):g}"
                for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
                if getattr(part, key, None) is not None
            ]
    return f" {', '.join(found)}" if found else ""


GENERATED = {
    "config/config.yaml": default_yaml,
    "config/schema.json": json_schema,
    "config/README.md": reference_page,
}


def write_all(root: Path) -> None:
    """Write the generated files below the checkout ``root``."""
    for name, generate in GENERATED.items():
        (root / name).write_text(generate(), encoding="utf-8")
