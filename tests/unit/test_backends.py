"""Backends: command lines that the server takes, request fields, settings read back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from fp8flow.backends import KNOWN, get_backend
from fp8flow.config import EngineConfig, ServeConfig
from fp8flow.errors import FlowError
from serve_transformers import parser

SETTINGS: dict[str, Any] = {
    "prefix_reuse": False,
    "allow_block_sharing": False,
    "counters": {"prefix_hit_tokens": 0},
    "max_batch_size": 16,
    "max_batch_tokens": 1024,
    "max_model_len": 8192,
    "kv_cache": {"tokens": 16384, "dtype": "bfloat16"},
    "quantization": {"kv_cache": {"emulated": True}},
    "dtype": "bfloat16",
    "versions": {"transformers": "5.24.0"},
}


def test_known_backends_are_those_of_the_configuration() -> None:
    allowed = EngineConfig.model_json_schema()["properties"]["backend"]
    assert set(KNOWN) == set(allowed.get("enum", [allowed.get("const")]))
    assert [get_backend(name).name for name in KNOWN] == list(KNOWN)


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(FlowError, match="'tensorrt' is not known; allowed: transformers"):
        get_backend("tensorrt")


def test_server_takes_its_command_line_and_every_serve_key_reaches_it() -> None:
    serve = ServeConfig(max_batch_size=3, max_batch_tokens=5, kv_cache_tokens=7).model_dump()
    argv = get_backend("transformers").serve_command(
        Path("a folder/ck"), serve, model_name="m", host="127.0.0.1", port=4321, threads=2
    )
    parsed = vars(parser().parse_args(argv[2:]))
    assert {key: parsed[key] for key in serve} == serve
    assert (parsed["model"], parsed["port"], parsed["threads"]) == (Path("a folder/ck"), 4321, 2)
    assert (parsed["host"], parsed["served_model_name"]) == ("127.0.0.1", "m")


def test_requests_are_greedy_and_carry_the_minimum() -> None:
    assert get_backend("transformers").request_fields(3) == {"min_tokens": 3, "top_k": 1}


def test_settings_read_back() -> None:
    found = get_backend("transformers").parse_settings(SETTINGS)
    assert found["prefix_reuse"] is False
    assert (found["kv_cache_dtype"], found["kv_cache_tokens"]) == ("fp8", 16384)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("prefix_reuse",), True),
        (("allow_block_sharing",), True),
        (("counters", "prefix_hit_tokens"), 3),
    ],
)
def test_any_sign_of_sharing_counts_as_reuse(path: tuple[str, ...], value: object) -> None:
    answer = copy.deepcopy(SETTINGS)
    node = answer
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert get_backend("transformers").parse_settings(answer)["prefix_reuse"] is True


@pytest.mark.parametrize("missing", SETTINGS)
def test_a_missing_setting_is_an_error_not_a_guess(missing: str) -> None:
    answer = {key: value for key, value in SETTINGS.items() if key != missing}
    with pytest.raises(FlowError, match=missing):
        get_backend("transformers").parse_settings(answer)
