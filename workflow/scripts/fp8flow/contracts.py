"""Command lines and settings files of the engines, checked against what a version accepts.

The facts are data: ``resources/contracts/<engine>.json`` holds the flags, their types, choices and
bounds, the keys of JSON and YAML settings, the combinations that do not work, and notes on where
each was read. Nothing is started and no engine has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from fp8flow.contract_argv import Given, arguments_of, parse
from fp8flow.contract_data import (
    TOOLS,
    Command,
    Finding,
    Keys,
    command_of,
    document,
    mapping_findings,
    unknown_version,
    versions,
)

__all__ = ["TOOLS", "Finding", "check_command", "check_sizes", "check_yaml", "versions"]

REUSE_KEYS: Final = ("enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse")
_YAML_SIZES: Final = {
    "max_batch_size": "engine.serve.max_batch_size",
    "max_num_tokens": "engine.serve.max_batch_tokens",
    "max_seq_len": "engine.serve.max_seq_len",
}


def check_command(
    tool: str,
    version: str,
    argv: Sequence[str],
    facts: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Check a command line.

    Args:
        tool: one of :data:`TOOLS`.
        version: version of the engine that the tool belongs to.
        argv: the whole command, program included; what stands before the program is skipped.
        facts: what rules may need beside the command: ``checkpoint.quant_algo`` ("FP8",
            "FP8_PER_CHANNEL_PER_TOKEN", "") and ``checkpoint.kv_cache`` ("fp8", "auto"). Rules
            about a fact that is not given are left out.

    Returns:
        The findings, in the order of the command; an empty list: nothing is wrong.

    Raises:
        KeyError: the tool has no contract.
    """
    if version not in versions(tool):
        return [unknown_version(tool, version)]
    command = command_of(tool, version)
    rest, findings = arguments_of(command, argv)
    if rest is None:
        return findings
    given = parse(command, rest)
    findings += given.findings
    findings += _count_findings(command, given)
    findings += _rule_findings(command, given, facts or {})
    return findings


def check_yaml(
    version: str,
    path: Literal["engine", "pytorch"],
    data: Any,
    *,
    prefix_caching: bool = False,
    build_argv: Sequence[str] = (),
    serve_argv: Sequence[str] = (),
) -> list[Finding]:
    """Check the YAML that ``trtllm-serve`` reads (``--extra_llm_api_options``).

    The YAML must be complete: TensorRT-LLM 1.0.0 replaces the server's own settings with its
    top-level keys as a whole, 1.2 merges only ``kv_cache_config``.

    Args:
        version: version of TensorRT-LLM.
        path: ``engine`` (``--backend trt``) or ``pytorch``.
        data: the content of the YAML, loaded.
        prefix_caching: whether reuse of prefixes between requests is asked for; without it the
            three keys that turn it off must all be there, since they are on by default.
        build_argv: command that builds the engine, for settings that need something built in.
        serve_argv: command that serves, for settings that must agree with its sizes.
    """
    if version not in versions("trtllm-serve"):
        return [unknown_version("trtllm-serve", version)]
    if not isinstance(data, Mapping):
        return [Finding("the YAML of trtllm-serve is not a mapping", "write `key: value` lines")]
    unknown = document("trtllm")["yaml"]["unknown"][version]
    findings = list(mapping_findings(Keys("trtllm", version, path, unknown), "options", data, ""))
    findings += _kv_cache_findings(version, path, data.get("kv_cache_config"), prefix_caching)
    findings += _scheduler_findings(data.get("scheduler_config"))
    findings += _graph_findings(data.get("cuda_graph_config"))
    findings += _yaml_size_findings(data)
    if build_argv:
        findings += _paged_findings(_sizes("trtllm-build", build_argv), data)
    if serve_argv:
        findings += _prefill_findings(_sizes("trtllm-serve", serve_argv), data)
    return findings


def check_sizes(build_argv: Sequence[str], serve_argv: Sequence[str]) -> list[Finding]:
    """Check that a server does not ask for more than its TensorRT engine was built for.

    ``trtllm-serve`` passes its sizes (2048 requests and 8192 tokens unless told otherwise) as run
    time values; sizes above those of the engine's build stop it with a ValueError. A longer
    sequence or another beam width only makes it warn.
    """
    built, served = _sizes("trtllm-build", build_argv), _sizes("trtllm-serve", serve_argv)
    if served.values.get("--backend") not in ("trt", "tensorrt"):
        return []
    findings = []
    for name in ("--max_batch_size", "--max_num_tokens", "--max_seq_len"):
        most, asked = built.values.get(name), served.values.get(name)
        if not isinstance(most, int) or not isinstance(asked, int) or asked <= most:
            continue
        by_default = "" if name in served.names else " (its default)"
        findings.append(
            Finding(
                f"trtllm-serve {name} {asked}{by_default} is above the engine's {most}",
                f"serve with {name} {most} or less, or build with {name} {asked}",
                "warning" if name == "--max_seq_len" else "error",
            )
        )
    beams = [given.values.get("--max_beam_width") for given in (built, served)]
    if beams[0] != beams[1]:
        what = f"trtllm-serve --max_beam_width {beams[1]} differs from the engine's {beams[0]}"
        findings.append(Finding(what, "give both the same width; MLPerf runs use 1", "warning"))
    return findings


def _count_findings(command: Command, given: Given) -> Iterator[Finding]:
    wanted = command.spec["positionals"]
    if len(given.positionals) < wanted["min"] and not given.stray:
        what = f"{command.tool}: {wanted['name']} is missing"
        yield Finding(what, f"give {wanted['name']} before the flags")
    for group in command.spec.get("required", ()):
        if not given.names & set(group):
            yield Finding(f"{command.tool}: {' or '.join(group)} is missing", f"add {group[0]}")


def _rule_findings(command: Command, given: Given, facts: Mapping[str, str]) -> Iterator[Finding]:
    values = {**given.values, **facts}
    for rule in command.rules:
        if all(_holds(name, test, values, given.names) for name, test in rule["wrong"].items()):
            yield Finding(f"{command.tool}: {rule['what']}", rule["fix"], rule["severity"])


def _holds(name: str, test: Any, values: Mapping[str, Any], names: set[str]) -> bool:
    """Tell whether one condition of a rule holds.

    Conditions: ``*`` is given, ``-`` is not given, ``!x`` differs from x, ``~x`` holds the text x,
    ``>n`` is a number above n, ``|a|b`` is a or b, anything else: is equal; a list: all of them.
    ``less: [a, b]`` compares the numbers of two flags. A fact that is not known holds nothing.
    """
    if name == "less":
        first, second = (values.get(flag) for flag in test)
        return isinstance(first, int) and isinstance(second, int) and 0 <= first < second
    if isinstance(test, list):
        return all(_holds(name, each, values, names) for each in test)
    if not name.startswith("-") and name not in values:
        return False
    if test in ("*", "-"):
        return (name in names) == (test == "*")
    return _compares(values.get(name), test)


def _compares(value: Any, test: Any) -> bool:
    if not isinstance(test, str):
        return bool(value == test)
    mark, rest = test[:1], test[1:]
    if mark == "!":
        return str(value) != rest
    if mark == "~":
        return rest in str(value)
    if mark == ">":
        return isinstance(value, int | float) and value > float(rest)
    if mark == "|":
        return str(value) in rest.split("|")
    return str(value) == test


def _sizes(tool: str, argv: Sequence[str]) -> Given:
    """Take a command apart for its sizes, whose flags all versions share."""
    command = command_of(tool, versions(tool)[-1])
    rest, _ = arguments_of(command, argv)
    return parse(command, rest or [])


def _kv_cache_findings(
    version: str, path: str, config: Any, prefix_caching: bool
) -> Iterator[Finding]:
    config = config if isinstance(config, Mapping) else {}
    if config.get("free_gpu_memory_fraction") is None:
        effect = "replaces that of the command line" if version == "1.0.0" else "is 0.9 by default"
        yield Finding(
            f"kv_cache_config.free_gpu_memory_fraction is missing; the YAML's share {effect}",
            "add it: engine.serve.kv_cache_memory_fraction",
        )
    on = [key for key in REUSE_KEYS if config.get(key) is not False]
    if not prefix_caching and on:
        yield Finding(
            f"blocks of the KV cache are reused between requests: kv_cache_config.{', '.join(on)} "
            "not false",
            f"set {', '.join(f'{key}: false' for key in on)}, or engine.serve.prefix_caching: true",
        )
    if prefix_caching and config.get("enable_block_reuse") is False:
        what = "prefix caching is asked for, but kv_cache_config.enable_block_reuse is false"
        yield Finding(what, "set enable_block_reuse: true, or engine.serve.prefix_caching: false")
    if path == "engine" and config.get("dtype", "auto") != "auto":
        yield Finding(
            f"kv_cache_config.dtype: {config['dtype']} is refused by the engine backend",
            "leave it at auto: an engine's KV cache type is fixed when it is built",
        )


def _scheduler_findings(config: Any) -> Iterator[Finding]:
    if isinstance(config, Mapping) and "capacity_scheduler_policy" not in config:
        yield Finding(
            "scheduler_config replaces the server's own (GUARANTEED_NO_EVICT and tuning of the "
            "batch) as a whole, and names no capacity_scheduler_policy",
            "add capacity_scheduler_policy",
            "warning",
        )


def _graph_findings(config: Any) -> Iterator[Finding]:
    if isinstance(config, Mapping) and config.get("batch_sizes") and config.get("max_batch_size"):
        yield Finding(
            "cuda_graph_config: batch_sizes and max_batch_size exclude each other",
            "give only one of them",
        )


def _yaml_size_findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    for key, setting in _YAML_SIZES.items():
        if data.get(key) is not None:
            yield Finding(
                f"{key} stands in the YAML, where it overrides the command line at 1.2 and does "
                "not resize an engine at 1.0.0",
                f"remove it and set {setting}",
            )


def _paged_findings(built: Given, data: Mapping[str, Any]) -> Iterator[Finding]:
    if built.values.get("--use_paged_context_fmha") != "disable":
        return
    kv_cache = data.get("kv_cache_config")
    broken = ["enable_chunked_prefill"] if data.get("enable_chunked_prefill") else []
    if isinstance(kv_cache, Mapping) and kv_cache.get("enable_block_reuse"):
        broken.append("kv_cache_config.enable_block_reuse")
    for key in broken:
        yield Finding(
            f"{key} needs paged context FMHA, and the engine is built without it",
            f"build with --use_paged_context_fmha enable, or set {key}: false",
        )


def _prefill_findings(served: Given, data: Mapping[str, Any]) -> Iterator[Finding]:
    tokens, length = (served.values.get(name) for name in ("--max_num_tokens", "--max_seq_len"))
    whole = not data.get("enable_chunked_prefill")
    if whole and isinstance(tokens, int) and isinstance(length, int) and tokens < length:
        yield Finding(
            f"without chunked prefill a prompt above --max_num_tokens {tokens} is refused, and "
            f"sequences may have {length} tokens",
            "set engine.serve.chunked_prefill: true, or raise engine.serve.max_batch_tokens",
            "warning",
        )
    graphs, requests = data.get("cuda_graph_config"), served.values.get("--max_batch_size")
    largest = graphs.get("max_batch_size") if isinstance(graphs, Mapping) else None
    if isinstance(largest, int) and isinstance(requests, int) and largest > requests:
        yield Finding(
            f"cuda_graph_config.max_batch_size {largest} is above --max_batch_size {requests}",
            "lower engine.serve.cuda_graph_max_batch_size: larger graphs are never used",
            "warning",
        )
