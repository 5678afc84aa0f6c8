"""What an engine would be told, held against the contract of its version, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fp8flow.backends import Place, Served, get_backend
from fp8flow.config_checks import Location, Problem, Variant
from fp8flow.contracts import Finding, check_command, check_sizes, check_yaml
from fp8flow.errors import FlowError
from fp8flow.quantize import ALGORITHMS
from fp8flow.trtllm_engine import build_command

_TOOLS = {"trtllm": "trtllm-serve", "vllm": "vllm serve", "sglang": "sglang"}
# Stand-ins for what only the job knows.
_PLACE = Place(host="127.0.0.1", port=8000, model_name="MODEL", threads=1, files=Path("FILES"))


def planned(variant: Variant) -> Served:
    """Return what a variant's server will load, with stand-ins for the folders."""
    quantization = variant.quantization
    # A given checkpoint is FP8 until the job has read it.
    algorithm = ALGORITHMS.get(quantization.method, "FP8")
    return Served(
        checkpoint=Path("CHECKPOINT"),
        tokenizer=Path("TOKENIZER"),
        quant_algo=algorithm,
        kv_cache=quantization.kv_cache,
        engine=Path("ENGINE") if variant.builds_engine else None,
    )


def contract_problems(variant: Variant) -> Iterator[Problem]:
    """Yield what the contract of the variant's engine has against its settings."""
    tool = _TOOLS.get(variant.engine.backend)
    if tool is None:
        return
    place: Location = ("variants", variant.name, "engine")
    settings = variant.engine.model_dump(mode="json")
    version = settings["version"]
    try:
        backend, served = get_backend(variant.engine.backend), planned(variant)
        serve_argv = backend.serve_command(settings, served, _PLACE)
        files = backend.serve_files(settings, served)
    except FlowError as error:
        yield Problem(place, str(error))
        return
    build_argv = [] if served.engine is None else _build_command(settings, served)
    findings = [*check_command(tool, version, serve_argv)]
    for text in files.values():
        findings += check_yaml(
            version,
            settings["path"],
            yaml.safe_load(text),
            prefix_caching=settings["serve"]["prefix_caching"],
            build_argv=build_argv,
            serve_argv=serve_argv,
        )
    yield from (_problem((*place, "serve"), finding) for finding in findings)
    if build_argv:
        findings = check_command("trtllm-build", version, build_argv, _facts(served))
        findings += check_sizes(build_argv, serve_argv)
        yield from (_problem((*place, "build"), finding) for finding in findings)


def _build_command(settings: dict[str, Any], served: Served) -> list[str]:
    return build_command(settings, served.checkpoint, Path("ENGINE"), quant_algo=served.quant_algo)


def _facts(served: Served) -> dict[str, str]:
    return {
        "checkpoint.quant_algo": served.quant_algo or "",
        "checkpoint.kv_cache": served.kv_cache,
    }


def _problem(place: Location, finding: Finding) -> Problem:
    return Problem(place, finding.what, finding.fix, warning=finding.severity == "warning")
