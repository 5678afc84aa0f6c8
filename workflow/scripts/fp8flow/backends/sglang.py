"""SGLang: ``python3 -m sglang.launch_server`` on the unified Hugging Face checkpoint.

The interpreter is the ``python3`` on PATH, not that of the workflow: the server may run in a
container, where the workflow's does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8flow.backends import PageKind, Place, Served
from fp8flow.backends.common import (
    OFFLINE,
    WORKFLOW,
    common_kv_dtype,
    engine_version,
    exact_length_fields,
    model_length,
    option_flags,
    page,
    setting_flags,
)
from fp8flow.errors import FlowError

_INFO = "/server_info"
_KV_DTYPES = {"fp8": "fp8_e4m3"}
_FLAGS = {
    "max_batch_size": "max-running-requests",
    "max_batch_tokens": "chunked-prefill-size",
    "max_seq_len": "context-length",
    "memory_fraction": "mem-fraction-static",
    "stream_interval": "stream-interval",
    "cuda_graph_max_batch_size": "cuda-graph-max-bs",
    "schedule_policy": "schedule-policy",
}
_OWNERS = {
    **{flag: f"engine.serve.{key}" for key, flag in _FLAGS.items()},
    "disable-radix-cache": "engine.serve.prefix_caching",
    "tensor-parallel-size": "engine.tensor_parallel",
    "tp-size": "engine.tensor_parallel",
    "data-parallel-size": "engine.replicas",
    "dp-size": "engine.replicas",
    "kv-cache-dtype": "quantization.kv_cache",
    "api-key": "no password: servers listen on this host only",
    "admin-api-key": "no password: servers listen on this host only",
    **dict.fromkeys(
        (
            *("model-path", "model", "tokenizer-path", "served-model-name", "host", "port"),
            *("quantization", "sampling-defaults", "enable-cache-report", "log-level-http"),
            # It makes each event repeat only its own text, which this version's completions cut.
            *("incremental-streaming-output", "stream-output", "skip-tokenizer-init", "config"),
        ),
        WORKFLOW,
    ),
}
# Common name -> name in the page of settings.
_REPORTED = {
    "max_batch_tokens": "chunked_prefill_size",
    "kv_cache_tokens": "max_total_num_tokens",
    "quantization": "quantization",
    "dtype": "dtype",
    "gpu_memory_fraction": "mem_fraction_static",
    "attention_backend": "attention_backend",
    "schedule_policy": "schedule_policy",
    "stream_interval": "stream_interval",
}
_EFFECTIVE_BATCH = "effective_max_running_requests_per_dp"


class SglangBackend:
    """See :class:`fp8flow.backends.Backend`."""

    name = "sglang"
    uses_gpu = True
    starts_server = True
    streams_token_ids = False
    reports_prefix_reuse = True
    pages: Mapping[str, PageKind] = {_INFO: "json", "/v1/models": "json"}

    def serve_files(self, engine: Mapping[str, Any], served: Served) -> dict[str, str]:
        """Return no files: everything is on the command line."""
        return {}

    def serve_command(self, engine: Mapping[str, Any], served: Served, place: Place) -> list[str]:
        """Return the argv of SGLang's server.

        Raises:
            FlowError: for an option that a setting owns, or weights that this version misreads.
        """
        serve = engine["serve"]
        argv = ["python3", "-m", "sglang.launch_server", "--model-path", str(served.checkpoint)]
        argv += ["--tokenizer-path", str(served.tokenizer)]
        argv += ["--served-model-name", place.model_name]
        argv += ["--host", place.host, "--port", str(place.port)]
        argv += _quantization(served.quant_algo)
        argv += ["--kv-cache-dtype", _KV_DTYPES.get(served.kv_cache, served.kv_cache)]
        argv += [] if serve["prefix_caching"] else ["--disable-radix-cache"]
        argv += setting_flags(serve, _FLAGS)
        argv += ["--tensor-parallel-size", str(engine["tensor_parallel"])]
        # Reports cached tokens in the usage; sampling as asked, not by generation_config.json.
        argv += ["--enable-cache-report", "--sampling-defaults", "openai"]
        argv += ["--log-level-http", "warning"]
        return argv + option_flags(serve["options"], _OWNERS)

    def serve_environment(self, engine: Mapping[str, Any], threads: int) -> dict[str, str]:
        """Return the configured variables, on top of what keeps the server offline."""
        return OFFLINE | engine["environment"]

    def request_fields(self, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return the greedy fields of SGLang's dialect, which has no token ids in answers."""
        return {"top_k": 1, **exact_length_fields(min_tokens, max_tokens)}

    def asked(self, engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
        """Return what SGLang reports again."""
        serve = engine["serve"]
        asked = {
            "engine": f"sglang {engine['version']}",
            "prefix_reuse": serve["prefix_caching"],
            "kv_cache_dtype": served.kv_cache,
            "max_batch_size": serve["max_batch_size"],
            "max_batch_tokens": serve["max_batch_tokens"],
            "max_model_len": serve["max_seq_len"],
            "gpu_memory_fraction": serve["memory_fraction"],
            "schedule_policy": serve["schedule_policy"],
            "stream_interval": serve["stream_interval"],
        }
        return {key: value for key, value in asked.items() if value is not None}

    def parse_settings(self, pages: Mapping[str, Any], log: str) -> dict[str, Any]:
        """Return the settings in effect; the batch size is the one that memory allows.

        Raises:
            FlowError: if the server does not report what is needed to tell.
        """
        info = page(pages, _INFO)
        try:
            prefix_reuse = not info["disable_radix_cache"]
            states = [state[_EFFECTIVE_BATCH] for state in info["internal_states"]]
            found = {
                "prefix_reuse": prefix_reuse,
                "kv_cache_dtype": common_kv_dtype(info["kv_cache_dtype"]),
                "max_batch_size": min(states),
            }
        except (KeyError, TypeError, ValueError) as error:
            raise FlowError(
                f"the server's {_INFO} lacks {error}: is it another version of SGLang?"
            ) from error
        reported = {name: info.get(key) for name, key in _REPORTED.items()}
        found |= {name: value for name, value in reported.items() if value is not None}
        version = engine_version("sglang", pages, _INFO)
        return {**version, **found, **model_length(pages), "counters": {}}


def _quantization(quant_algo: str | None) -> list[str]:
    if quant_algo is None:
        return []
    if quant_algo != "FP8":
        # Its reader takes every name with FP8 in it for one scale per tensor.
        raise FlowError(
            f"SGLang reads only checkpoints of algorithm FP8, not {quant_algo}; use "
            "quantization.method: fp8_static, or another engine.backend"
        )
    return ["--quantization", "modelopt_fp8"]


BACKEND = SglangBackend()
