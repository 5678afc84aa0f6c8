"""TensorRT-LLM: ``trtllm-serve`` on a TensorRT engine or, with PyTorch, on the FP8 checkpoint.

The program is the ``trtllm-serve`` on PATH, as in NVIDIA's release container. Sizes stand on the
command line, because 1.0 takes them from nowhere else; all else stands in one YAML, complete,
because what a YAML leaves out of a group falls back to other defaults than those of trtllm-serve.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import yaml

from fp8flow.backends import PageKind, Place, Served
from fp8flow.backends.common import (
    OFFLINE,
    OPTIONS,
    WORKFLOW,
    engine_version,
    exact_length_fields,
    instead,
    log_fact,
    setting_flags,
    startup_log,
)
from fp8flow.errors import FlowError

FILE = "trtllm.yaml"
# `trt` is the one spelling that 1.0 and 1.2 both take.
_BACKENDS = {"engine": "trt", "pytorch": "pytorch"}
_SIZES = {
    "max_batch_size": "max_batch_size",
    "max_batch_tokens": "max_num_tokens",
    "max_seq_len": "max_seq_len",
    "postprocess_workers": "num_postprocess_workers",
}
_REUSE_KEYS = ("enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse")
_KV, _GRAPHS = "kv_cache_config", "cuda_graph_config"
Path = tuple[str, ...]
# Key of the YAML -> the setting that it belongs to.
_OWNERS: dict[Path, str] = {
    **{(_KV, key): "engine.serve.prefix_caching" for key in _REUSE_KEYS},
    (_KV, "free_gpu_memory_fraction"): "engine.serve.kv_cache_memory_fraction",
    (_KV, "dtype"): "quantization.kv_cache",
    ("scheduler_config", "capacity_scheduler_policy"): "engine.serve.scheduler_policy",
    ("enable_chunked_prefill",): "engine.serve.chunked_prefill",
    (_GRAPHS, "max_batch_size"): "engine.serve.cuda_graph_max_batch_size",
    ("stream_interval",): "engine.serve.stream_interval",
    ("sampler_type",): "engine.serve.sampler",
    **{(key,): f"engine.serve.{setting}" for setting, key in _SIZES.items()},
    ("tensor_parallel_size",): "engine.tensor_parallel",
    ("backend",): "engine.path",
    **{(key,): WORKFLOW for key in ("model", "tokenizer", "max_beam_width")},
}
# Written by the model runner and by the KV cache manager; the last one is the one in effect, since
# the PyTorch path makes a small cache first, to measure.
_LOG_NUMBERS = {
    "max_model_len": re.compile(r"max_seq_len=(\d+), max_num_requests=\d+"),
    "max_batch_tokens": re.compile(r"max_num_requests=\d+, max_num_tokens=(\d+)"),
    "max_batch_size": re.compile(r"max_num_tokens=\d+, max_batch_size=(\d+)"),
    "kv_cache_tokens": re.compile(r"GiB for max tokens in paged KV cache \((\d+)\)"),
}


class TrtllmBackend:
    """See :class:`fp8flow.backends.Backend`."""

    name = "trtllm"
    uses_gpu = True
    starts_server = True
    # An answer carries either text or token ids; the time of the first text is needed.
    streams_token_ids = False
    reports_prefix_reuse = False
    pages: Mapping[str, PageKind] = {"/version": "json"}

    def serve_files(self, engine: Mapping[str, Any], served: Served) -> dict[str, str]:
        """Return the YAML of trtllm-serve.

        Raises:
            FlowError: for a setting that the path does not have, or an option that a setting owns.
        """
        data = _yaml_data(engine, served)
        merged = _merge(data, engine["serve"]["options"], ())
        return {FILE: yaml.safe_dump(merged, sort_keys=True)}

    def serve_command(self, engine: Mapping[str, Any], served: Served, place: Place) -> list[str]:
        """Return the argv of trtllm-serve; nothing on it concerns the KV cache.

        Raises:
            FlowError: if the path needs a TensorRT engine and there is none.
        """
        path, serve = engine["path"], engine["serve"]
        model = served.engine if path == "engine" else served.checkpoint
        if model is None:
            raise FlowError("engine.path: engine needs a TensorRT engine; none was built")
        argv = ["trtllm-serve", "serve", str(model), "--backend", _BACKENDS[path]]
        argv += ["--tokenizer", str(served.tokenizer)]
        argv += ["--host", place.host, "--port", str(place.port)]
        argv += setting_flags(serve, _SIZES)
        argv += ["--max_beam_width", "1", "--tp_size", str(engine["tensor_parallel"])]
        return [*argv, "--extra_llm_api_options", str(place.files / FILE)]

    def serve_environment(self, engine: Mapping[str, Any], threads: int) -> dict[str, str]:
        """Return the configured variables, on top of what keeps the server offline."""
        return OFFLINE | engine["environment"]

    def request_fields(self, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return the greedy fields of TensorRT-LLM's dialect.

        ``top_k`` must not be -1, which 1.0 does not survive. A missing ``continuous_usage_stats``
        means true there: usage in every event.
        """
        usage = {"include_usage": True, "continuous_usage_stats": False}
        length = exact_length_fields(min_tokens, max_tokens)
        return {"top_k": 1, "stream_options": usage, **length}

    def asked(self, engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
        """Return the version, the one thing that its pages report."""
        return {"engine": f"trtllm {engine['version']}"}

    def parse_settings(self, pages: Mapping[str, Any], log: str) -> dict[str, Any]:
        """Return the version, and the sizes that the log tells at start-up.

        Raises:
            FlowError: if the server does not tell its version.
        """
        started = startup_log(log)
        numbers = {name: log_fact(pattern, started) for name, pattern in _LOG_NUMBERS.items()}
        return {
            **engine_version("trtllm", pages, "/version"),
            "prefix_reuse": None,
            "counters": {},
            **{name: int(number) for name, number in numbers.items() if number is not None},
        }


def _yaml_data(engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
    serve, pytorch = engine["serve"], engine["path"] == "pytorch"
    kv_cache = dict.fromkeys(_REUSE_KEYS, serve["prefix_caching"])
    kv_cache["free_gpu_memory_fraction"] = serve["kv_cache_memory_fraction"]
    data: dict[str, Any] = {
        _KV: kv_cache,
        "scheduler_config": {
            "capacity_scheduler_policy": serve["scheduler_policy"],
            "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
        },
        "enable_chunked_prefill": serve["chunked_prefill"],
    }
    only_pytorch = {
        "cuda_graph_max_batch_size": (_GRAPHS, {"enable_padding": True}),
        "stream_interval": ("stream_interval", None),
        "sampler": ("sampler_type", None),
    }
    for setting, (key, group) in only_pytorch.items():
        value = serve[setting]
        if value is None:
            continue
        if not pytorch:
            raise FlowError(f"engine.serve.{setting}: only engine.path: pytorch has this setting")
        data[key] = value if group is None else group | {"max_batch_size": value}
    if pytorch:
        # The precision of an engine's cache was decided when it was built.
        kv_cache["dtype"] = served.kv_cache
    return data


def _merge(data: Mapping[str, Any], options: Mapping[str, Any], at: Path) -> dict[str, Any]:
    """Return ``data`` with the options in it, group by group."""
    merged = copy.deepcopy(dict(data))
    for key, value in options.items():
        path, present = (*at, key), merged.get(key)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(present, value, path)
            continue
        _refuse_owned(path, value, present)
        merged[key] = copy.deepcopy(value)
    return merged


def _refuse_owned(path: Path, value: Any, present: Any) -> None:
    given = {path, *((*path, key) for key in value)} if isinstance(value, Mapping) else {path}
    # Replacing a whole group that is set would drop the settings in it.
    group = isinstance(present, Mapping) and not isinstance(value, Mapping)
    for owned, setting in _OWNERS.items():
        if owned in given or (group and owned[: len(path)] == path):
            raise FlowError(f"{OPTIONS}: {'.'.join(owned)}: {instead(setting)}")


BACKEND = TrtllmBackend()
