"""vLLM: ``vllm serve`` on the unified Hugging Face checkpoint.

The program is the ``vllm`` on PATH: that of the environment, or of the container, that the job
runs in. What it reports comes from its pages and, for what no page tells, from its log at start-up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8flow.backends import PageKind, Place, Served
from fp8flow.backends.common import (
    OFFLINE,
    WORKFLOW,
    Sample,
    common_kv_dtype,
    compact_json,
    engine_version,
    exact_length_fields,
    log_fact,
    model_length,
    option_flags,
    parse_prometheus,
    setting_flags,
    startup_log,
)
from fp8flow.errors import FlowError

if TYPE_CHECKING:
    # Loaded by the server, by its name; named here because its code belongs to this backend's.
    from fp8flow import vllm_scheduler  # noqa: F401

_SIZES = {
    "max_batch_size": "max-num-seqs",
    "max_batch_tokens": "max-num-batched-tokens",
    "max_seq_len": "max-model-len",
    "gpu_memory_fraction": "gpu-memory-utilization",
    "stream_interval": "stream-interval",
    "api_servers": "api-server-count",
}
# The version whose scheduler fp8flow.vllm_scheduler extends.
_PHASED_VERSION = "0.25.1"
_PHASED_CLASS = "fp8flow.vllm_scheduler.PhasedScheduler"
_SCRIPTS = Path(__file__).resolve().parents[2]
_OWNERS = {
    **{flag: f"engine.serve.{key}" for key, flag in _SIZES.items()},
    "device-memory-utilization": "engine.serve.gpu_memory_fraction",
    "enable-prefix-caching": "engine.serve.prefix_caching",
    "scheduler-cls": "engine.serve.scheduler",
    "compilation-config": "engine.serve.compilation",
    "tensor-parallel-size": "engine.tensor_parallel",
    "data-parallel-size": "engine.replicas",
    "kv-cache-dtype": "quantization.kv_cache",
    "api-key": "no password: servers listen on this host only",
    **dict.fromkeys(
        (
            *("model", "tokenizer", "served-model-name", "host", "port", "quantization"),
            *("generation-config", "disable-uvicorn-access-log", "config"),
        ),
        WORKFLOW,
    ),
}
_CACHE = "vllm:cache_config_info"
# Counter -> name in `counters`.
_COUNTERS = {
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:num_preemptions_total": "preemptions",
}
_INTEGER, _TEXT = r"(\d+)", r"([\w.-]+)"
# Name -> pattern in the log at start-up. The engine logs its configuration in one line.
_CONFIG = r"Initializing a V1 LLM engine .* with config: .*?\b"
_LOG_TEXTS = {
    "dtype": re.compile(rf"{_CONFIG}dtype=torch\.{_TEXT}"),
    "quantization": re.compile(rf"{_CONFIG}quantization={_TEXT}"),
    "prefix_caching": re.compile(rf"{_CONFIG}enable_prefix_caching=(True|False)"),
    "compilation": re.compile(rf"{_CONFIG}compilation_config=(\{{.*?\}}), kernel_config="),
    "attention_backend": re.compile(
        r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+)(?: attention)? backend(?: out of|\.)"
    ),
    "linear_kernel": re.compile(r"Selected (\w+) for \w*Linear\w*"),
}
_LOG_NUMBERS = {
    "max_batch_size": re.compile(rf"non-default args: .*'max_num_seqs': {_INTEGER}"),
    "max_batch_tokens": re.compile(rf"enabled with max_num_batched_tokens={_INTEGER}"),
    "kv_cache_tokens": re.compile(r"GPU KV cache size: ([\d,]+) tokens"),
}


class VllmBackend:
    """See :class:`fp8flow.backends.Backend`."""

    name = "vllm"
    uses_gpu = True
    starts_server = True
    streams_token_ids = True
    reports_prefix_reuse = True
    pages: Mapping[str, PageKind] = {"/version": "json", "/v1/models": "json", "/metrics": "text"}

    def serve_files(self, engine: Mapping[str, Any], served: Served) -> dict[str, str]:
        """Return no files: everything is on the command line."""
        return {}

    def serve_command(self, engine: Mapping[str, Any], served: Served, place: Place) -> list[str]:
        """Return the argv of ``vllm serve``; whatever changes its answers or speed is explicit.

        Raises:
            FlowError: for an option that a setting owns, or a scheduler for another version.
        """
        serve = engine["serve"]
        argv = ["vllm", "serve", str(served.checkpoint), "--served-model-name", place.model_name]
        argv += ["--host", place.host, "--port", str(place.port)]
        argv += ["--tokenizer", str(served.tokenizer)]
        if served.quant_algo is not None:
            argv += ["--quantization", "modelopt"]
        argv += ["--kv-cache-dtype", served.kv_cache]
        caching = "enable" if serve["prefix_caching"] else "no-enable"
        argv += [f"--{caching}-prefix-caching"]
        argv += setting_flags(serve, _SIZES)
        argv += ["--tensor-parallel-size", str(engine["tensor_parallel"])]
        # The model's own generation_config.json would change sampling; its end tokens still count.
        argv += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
        if serve["compilation"]:
            argv += ["--compilation-config", compact_json(serve["compilation"])]
        if serve["scheduler"] == "phased":
            argv += ["--scheduler-cls", _phased(engine["version"])]
        return argv + option_flags(serve["options"], _OWNERS, negated=True)

    def serve_environment(self, engine: Mapping[str, Any], threads: int) -> dict[str, str]:
        """Return the configured variables, on top of what keeps the server to itself.

        The CPU threads of torch stay at one, vLLM's own choice, whatever the job's launcher set:
        its processes share the cores with each other and with the client.
        """
        own = OFFLINE | {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        variables = own | engine["environment"]
        if engine["serve"]["scheduler"] == "phased":
            inherited = variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SCRIPTS), inherited]))
            # A container gets none of the host's paths but this one.
            variables["APPTAINERENV_PYTHONPATH"] = str(_SCRIPTS)
        return variables

    def request_fields(self, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return the greedy fields of vLLM's dialect, with token ids in the answer."""
        length = exact_length_fields(min_tokens, max_tokens)
        return {"top_k": 1, "return_token_ids": True, **length}

    def asked(self, engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
        """Return what vLLM's pages report again; the batch limits stand in its log only."""
        serve = engine["serve"]
        asked = {
            "engine": f"vllm {engine['version']}",
            "prefix_reuse": serve["prefix_caching"],
            "kv_cache_dtype": served.kv_cache,
            "gpu_memory_fraction": serve["gpu_memory_fraction"],
            "max_model_len": serve["max_seq_len"],
        }
        return {key: value for key, value in asked.items() if value is not None}

    def parse_settings(self, pages: Mapping[str, Any], log: str) -> dict[str, Any]:
        """Return the settings in effect.

        The page of metrics has them unless ``disable-log-stats`` is given; then the log at start-up
        must tell about prefixes, and nothing is counted.

        Raises:
            FlowError: if neither tells.
        """
        samples = parse_prometheus(pages.get("/metrics") or "")
        found = _from_log(startup_log(log)) | _cache_settings(samples)
        if "prefix_reuse" not in found:
            raise FlowError(
                f"neither vLLM's /metrics ({_CACHE}) nor its log tells about prefix caching. "
                "Leave out the option disable-log-stats, or log at level INFO"
            )
        return {
            **engine_version("vllm", pages, "/version"),
            **found,
            **model_length(pages),
            "counters": _counters(samples),
        }


def _phased(version: str) -> str:
    if version != _PHASED_VERSION:
        raise FlowError(
            f"engine.serve.scheduler: phased is made for vLLM {_PHASED_VERSION}, not {version}; "
            "use scheduler: engine"
        )
    return _PHASED_CLASS


def _from_log(log: str) -> dict[str, Any]:
    texts = {name: log_fact(pattern, log) for name, pattern in _LOG_TEXTS.items()}
    numbers = {name: log_fact(pattern, log) for name, pattern in _LOG_NUMBERS.items()}
    found: dict[str, Any] = {k: v for k, v in texts.items() if v not in (None, "None")}
    found |= {k: int(v.replace(",", "")) for k, v in numbers.items() if v is not None}
    if (caching := found.pop("prefix_caching", None)) is not None:
        found["prefix_reuse"] = caching == "True"
    return found


def _cache_settings(samples: list[Sample]) -> dict[str, Any]:
    """Return what the labels of the cache's configuration say (one sample per engine process)."""
    every = [_cache_labels(s.labels) for s in samples if s.name == _CACHE]
    if any(one != every[0] for one in every):
        raise FlowError(f"the processes of vLLM have different settings of the KV cache: {every}")
    return every[0] if every else {}


def _cache_labels(labels: Mapping[str, str]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {
            "prefix_reuse": {"True": True, "False": False}[labels["enable_prefix_caching"]],
            "kv_cache_dtype": common_kv_dtype(labels["cache_dtype"]),
            "gpu_memory_fraction": float(labels["gpu_memory_utilization"]),
        }
        tokens = labels.get("kv_cache_size_tokens", "None")
        return found | ({} if tokens == "None" else {"kv_cache_tokens": int(tokens)})
    except (KeyError, ValueError) as error:
        raise FlowError(f"vLLM's {_CACHE} cannot be read: {error!r} of {labels}") from error


def _counters(samples: list[Sample]) -> dict[str, int]:
    counters: dict[str, int] = {}
    for sample in samples:
        if (name := _COUNTERS.get(sample.name)) is not None:
            counters[name] = counters.get(name, 0) + round(sample.value)
    return counters


BACKEND = VllmBackend()
