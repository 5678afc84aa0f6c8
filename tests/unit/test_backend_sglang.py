"""SGLang: the command line, and the page of settings in the names of its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8flow.backends import Place, Served
from fp8flow.backends.sglang import BACKEND
from fp8flow.config_engines import SglangEngine
from fp8flow.errors import FlowError

PLACE = Place(host="127.0.0.1", port=8000, model_name="llama", threads=4, files=Path("/files"))
FP8 = Served(Path("/ck"), Path("/tok"), quant_algo="FP8", kv_cache="fp8")
# sglang/srt/entrypoints/http_server.py, server_info: ServerArgs, Scheduler.get_init_info,
# Scheduler.get_internal_state of each rank, the version (here: the part that is read).
INFO: dict[str, Any] = {
    "disable_radix_cache": True,
    "max_running_requests": 1024,
    "chunked_prefill_size": 8192,
    "mem_fraction_static": 0.9,
    "kv_cache_dtype": "fp8_e4m3",
    "quantization": "modelopt_fp8",
    "dtype": "auto",
    "attention_backend": "fa3",
    "schedule_policy": "fcfs",
    "stream_interval": 1,
    "status": "ready",
    "max_total_num_tokens": 1500000,
    "internal_states": [
        {"effective_max_running_requests_per_dp": 1024, "last_gen_throughput": 12.5}
    ],
    "version": "0.5.10.post1",
}
PAGES = {"/server_info": INFO, "/v1/models": {"data": [{"id": "llama", "max_model_len": 2668}]}}


def section(**serve: Any) -> dict[str, Any]:
    """Return a section engine."""
    made = SglangEngine.model_validate({"backend": "sglang", "serve": serve})
    return made.model_dump(mode="json")


ASKED = section(max_seq_len=2668)


def test_command_of_the_fp8_checkpoint() -> None:
    expected = (
        "python3 -m sglang.launch_server --model-path /ck --tokenizer-path /tok "
        "--served-model-name llama --host 127.0.0.1 --port 8000 --quantization modelopt_fp8 "
        "--kv-cache-dtype fp8_e4m3 --disable-radix-cache --max-running-requests 1024 "
        "--chunked-prefill-size 8192 --context-length 2668 --mem-fraction-static 0.9 "
        "--stream-interval 1 --schedule-policy fcfs --tensor-parallel-size 1 "
        "--enable-cache-report --sampling-defaults openai --log-level-http warning"
    )
    assert BACKEND.serve_command(ASKED, FP8, PLACE) == expected.split()


def test_unquantized_weights() -> None:
    served = Served(Path("/ck"), Path("/tok"), quant_algo=None, kv_cache="auto")
    argv = BACKEND.serve_command(section(), served, PLACE)
    assert "--quantization" not in argv
    assert argv[argv.index("--kv-cache-dtype") + 1] == "auto"


def test_weights_that_it_would_misread_are_refused() -> None:
    served = Served(Path("/ck"), Path("/tok"), "FP8_PER_CHANNEL_PER_TOKEN", kv_cache="fp8")
    with pytest.raises(FlowError, match=r"FP8_PER_CHANNEL_PER_TOKEN; use quantization\.method"):
        BACKEND.serve_command(section(), served, PLACE)


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("disable-radix-cache", "engine.serve.prefix_caching"),
        ("tp-size", "engine.tensor_parallel"),
        ("context-length", "engine.serve.max_seq_len"),
        ("admin-api-key", "no password"),
    ],
)
def test_options_with_a_setting_are_refused(option: str, setting: str) -> None:
    with pytest.raises(FlowError, match=setting):
        BACKEND.serve_command(section(options={option: 1}), FP8, PLACE)


def test_settings_come_back_as_asked() -> None:
    found = BACKEND.parse_settings(PAGES, "")
    asked = BACKEND.asked(ASKED, FP8)
    assert asked == {key: found[key] for key in asked}
    assert (found["kv_cache_tokens"], found["counters"]) == (1500000, {})
    assert (found["dtype"], found["quantization"]) == ("auto", "modelopt_fp8")


def test_settings_do_not_hold_what_changes_or_is_secret() -> None:
    busy = INFO | {"api_key": "secret", "internal_states": [{**INFO["internal_states"][0]}]}
    busy["internal_states"][0]["last_gen_throughput"] = 99.0
    found = BACKEND.parse_settings(PAGES | {"/server_info": busy}, "anything")
    assert found == BACKEND.parse_settings(PAGES, "")
    assert "secret" not in repr(found)


def test_the_batch_size_is_the_one_that_memory_allows() -> None:
    states = [{"effective_max_running_requests_per_dp": n} for n in (1024, 900)]
    found = BACKEND.parse_settings(PAGES | {"/server_info": INFO | {"internal_states": states}}, "")
    assert found["max_batch_size"] == 900


def test_reuse_is_reported() -> None:
    found = BACKEND.parse_settings(
        PAGES | {"/server_info": INFO | {"disable_radix_cache": False}}, ""
    )
    assert found["prefix_reuse"] is True


@pytest.mark.parametrize("missing", ["disable_radix_cache", "kv_cache_dtype", "internal_states"])
def test_a_missing_setting_is_an_error(missing: str) -> None:
    info = {key: value for key, value in INFO.items() if key != missing}
    with pytest.raises(FlowError, match=missing):
        BACKEND.parse_settings({"/server_info": info}, "")


def test_a_server_without_version_is_an_error() -> None:
    info = {key: value for key, value in INFO.items() if key != "version"}
    with pytest.raises(FlowError, match="tells no version"):
        BACKEND.parse_settings({"/server_info": info}, "")
