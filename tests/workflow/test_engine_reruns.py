"""The rerun contract of the engines' settings: every key of every engine has a case."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan import copy_checkout, execute
from test_reruns import PACKAGE, QUANTIZE, SERVING, config_keys, edited

from fp8flow.config_engines import ENGINES

BUILD = {"build_engine fp8"} | SERVING
Cases = dict[str, tuple[Any, set[str]]]

COMMON: Cases = {
    "replicas": (2, SERVING),
    "environment": ({"NCCL_DEBUG": "WARN"}, SERVING),
    "serve.max_batch_size": (512, SERVING),
    "serve.max_batch_tokens": (4096, SERVING),
    "serve.max_seq_len": (4096, SERVING),
    "serve.prefix_caching": (True, SERVING),
}
TRTLLM: Cases = {
    "tensor_parallel": (2, SERVING),
    "serve.kv_cache_memory_fraction": (0.9, SERVING),
    "serve.scheduler_policy": ("GUARANTEED_NO_EVICT", SERVING),
    "serve.chunked_prefill": (False, SERVING),
    "serve.postprocess_workers": (2, SERVING),
}
CASES: dict[str, Cases] = {
    "vllm": COMMON
    | {
        "version": ("0.33.0", SERVING),
        "tensor_parallel": (2, SERVING),
        "serve.gpu_memory_fraction": (0.95, SERVING),
        "serve.stream_interval": (10, SERVING),
        "serve.api_servers": (2, SERVING),
        "serve.scheduler": ("phased", SERVING),
        "serve.compilation": ({"max_cudagraph_capture_size": 1024}, SERVING),
        "serve.options": ({"disable-log-stats": True}, SERVING),
    },
    "sglang": COMMON
    | {
        "tensor_parallel": (2, SERVING),
        "serve.memory_fraction": (0.85, SERVING),
        "serve.stream_interval": (10, SERVING),
        "serve.cuda_graph_max_batch_size": (512, SERVING),
        "serve.schedule_policy": ("lpm", SERVING),
        "serve.options": ({"log-level": "warning"}, SERVING),
    },
    "trtllm": COMMON
    | TRTLLM
    | {
        "version": ("1.0.0", SERVING),
        "path": ("engine", {"build_engine fp8"} | QUANTIZE),
        "serve.stream_interval": (10, SERVING),
        "serve.cuda_graph_max_batch_size": (512, SERVING),
        "serve.sampler": ("TRTLLMSampler", SERVING),
        "serve.options": ({"print_iter_log": True}, SERVING),
        # Settings of a build that this path does not make.
        "build.max_input_len": (2000, SERVING),
        "build.multiple_profiles": (False, SERVING),
        "build.options": ({"tokens_per_block": 64}, SERVING),
    },
    "trtllm engine": COMMON
    | TRTLLM
    | {
        "tensor_parallel": (2, {"build_engine fp8"} | QUANTIZE),
        "version": ("1.0.0", BUILD),
        "path": ("pytorch", QUANTIZE),
        "serve.max_batch_size": (512, BUILD),
        "serve.max_batch_tokens": (4096, BUILD),
        "serve.max_seq_len": (4096, BUILD),
        "serve.options": ({"normalize_log_probs": False}, SERVING),
        "build.max_input_len": (2000, BUILD),
        "build.multiple_profiles": (False, BUILD),
        "build.options": ({"tokens_per_block": 64}, BUILD),
    },
    "external": {"url": ("http://127.0.0.1:8001", SERVING)},
}
# These mean something on the PyTorch path only and are refused with an engine.
PYTORCH_ONLY = {"serve.stream_interval", "serve.cuda_graph_max_batch_size", "serve.sampler"}
BASES: dict[str, dict[str, Any]] = {
    "vllm": {"backend": "vllm"},
    "sglang": {"backend": "sglang"},
    "trtllm": {"backend": "trtllm"},
    "trtllm engine": {"backend": "trtllm", "path": "engine"},
    "external": {"backend": "external", "url": "http://127.0.0.1:8000"},
}


def write_engine(checkout: Path, engine: dict[str, Any]) -> None:
    path = checkout / "config" / "config.yaml"
    path.write_text(yaml.safe_dump(edited("engine", engine)))


def changed(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, _, inner = key.rpartition(".")
    return base | ({section: {inner: value}} if section else {inner: value})


@pytest.fixture(scope="module", params=BASES)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stub_python: str
) -> tuple[str, Path]:
    checkout = copy_checkout(tmp_path_factory.mktemp("engine") / "checkout", stub_python)
    write_engine(checkout, BASES[request.param])
    jobs = execute(checkout, dry=False)
    assert ("build_engine fp8" in jobs) == (request.param == "trtllm engine")
    return request.param, checkout


@pytest.mark.parametrize("name", BASES)
def test_every_engine_key_has_a_case(name: str) -> None:
    keys = config_keys(ENGINES[BASES[name]["backend"]])
    without = {"backend"} | (PYTORCH_ONLY if name == "trtllm engine" else set())
    if name == "sglang":
        without.add("version")  # one is known
    assert keys - without == set(CASES[name])


def test_engine_keys_rerun_exactly(built: tuple[str, Path], tmp_path: Path) -> None:
    name, finished = built
    checkout = Path(shutil.copytree(finished, tmp_path / "checkout", symlinks=True))
    assert execute(checkout, dry=True) == set()
    for key, (value, expected) in CASES[name].items():
        write_engine(checkout, changed(BASES[name], key, value))
        assert execute(checkout, dry=True) == expected, key


def test_another_backend_reruns_what_serves(built: tuple[str, Path], tmp_path: Path) -> None:
    name, finished = built
    checkout = Path(shutil.copytree(finished, tmp_path / "checkout", symlinks=True))
    write_engine(checkout, {"backend": "transformers"})
    expected = QUANTIZE if name == "trtllm engine" else SERVING
    assert execute(checkout, dry=True) == expected
    assert expected > PACKAGE
