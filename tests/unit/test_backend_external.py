"""A server of somebody else: nothing is started, set, or assumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8flow.backends import Place, Served
from fp8flow.backends.external import BACKEND
from fp8flow.config_engines import ExternalEngine
from fp8flow.errors import FlowError

ENGINE = ExternalEngine(backend="external", url="http://host:8000").model_dump(mode="json")
SERVED = Served(Path("/ck"), Path("/tok"), quant_algo="FP8", kv_cache="fp8")
PLACE = Place(host="host", port=8000, model_name="m", threads=1, files=Path("/files"))


def test_nothing_is_started() -> None:
    assert not BACKEND.starts_server
    with pytest.raises(FlowError, match="starts no server; start it yourself at http://host:8000"):
        BACKEND.serve_command(ENGINE, SERVED, PLACE)
    assert BACKEND.serve_files(ENGINE, SERVED) == {}
    assert BACKEND.serve_environment(ENGINE, 4) == {}


def test_requests_hold_only_what_the_api_has() -> None:
    assert BACKEND.request_fields(1, 128) == {}
    assert BACKEND.request_fields(1, 1) == {}


@pytest.mark.parametrize("lengths", [(2, 128), (128, 128)])
def test_a_minimum_cannot_be_asked_for(lengths: tuple[int, int]) -> None:
    with pytest.raises(FlowError, match="min_output_tokens"):
        BACKEND.request_fields(*lengths)


def test_models_are_read_where_there_is_a_list() -> None:
    models = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 2668}]}
    assert BACKEND.parse_settings({"/v1/models": models}, "") == {
        "engine": "external",
        "prefix_reuse": None,
        "counters": {},
        "models": ["m"],
        "owned_by": ["vllm"],
        "max_model_len": 2668,
    }


@pytest.mark.parametrize("answer", [None, {}, [], {"data": None}, {"data": ["m"]}, "text"])
def test_any_other_answer_tells_nothing(answer: Any) -> None:
    found = BACKEND.parse_settings({"/v1/models": answer}, "")
    assert (found["prefix_reuse"], found["models"]) == (None, [])
    assert BACKEND.asked(ENGINE, SERVED) == {}
