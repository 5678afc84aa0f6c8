"""The scheduler that vLLM loads: whose turn it is, and what the base class gets to see.

vLLM is not installed here, so the base class is a stand-in that notes what it is called with.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NAME = "fp8flow.vllm_scheduler"
BASE = "vllm.v1.core.sched.async_scheduler"


class Recorder:
    """Takes the place of vLLM's AsyncScheduler."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.skipped_waiting: list[Any] = []
        self.max_num_running_reqs = 4
        self.prefill_capacity_bound = True
        self.fail = False

    def schedule(self, throttle_prefills: bool = False) -> tuple[str, list[str], int]:
        if self.fail:
            raise RuntimeError("no")
        if throttle_prefills:
            assert self.prefill_capacity_bound is False, "vLLM would not hold prompts back"
            seen = [r.name for r in self.running if not r.is_prefill_chunk]
            return "answers", seen, self.max_num_running_reqs
        # A prompt that waits is taken in while there is room, as vLLM does.
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            self.running.append(self.waiting.pop(0))
        return "prompts", [r.name for r in self.running], self.max_num_running_reqs


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    parts = BASE.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(parts[length - 1]))
    sys.modules[BASE].AsyncScheduler = Recorder  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME).PhasedScheduler()
    sys.modules.pop(NAME, None)


def request(name: str, chunk: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name=name, is_prefill_chunk=chunk)


def test_prompts_and_answers_take_turns(scheduler: Any) -> None:
    scheduler.running = [request("a"), request("b")]
    scheduler.waiting = [request("w1"), request("w2"), request("w3")]
    assert scheduler.schedule() == ("prompts", ["w1", "w2"], 2)
    assert [r.name for r in scheduler.running] == ["a", "b", "w1", "w2"]
    assert scheduler.schedule() == ("answers", ["a", "b", "w1", "w2"], 4)
    # No room for w3: answers go on alone, and prompts have the next turn that they can use.
    assert scheduler.schedule()[0] == "answers"
    scheduler.running.pop(0)
    assert scheduler.schedule() == ("prompts", ["w3"], 1)
    assert scheduler.max_num_running_reqs == 4


def test_a_cut_prompt_goes_on_without_waiting_prompts(scheduler: Any) -> None:
    scheduler.running = [request("a"), request("cut", chunk=True)]
    assert scheduler.schedule() == ("prompts", ["cut"], 3)
    assert scheduler.schedule() == ("answers", ["a"], 4)
    assert scheduler.schedule() == ("prompts", ["cut"], 3)


def test_one_kind_alone_does_not_wait(scheduler: Any) -> None:
    scheduler.waiting = [request("w")]
    assert scheduler.schedule()[0] == "prompts"
    scheduler.running, scheduler.waiting = [], [request("w")]
    assert scheduler.schedule()[0] == "prompts"
    scheduler.running = [request("a")]
    assert [scheduler.schedule()[0] for _ in range(3)] == ["answers"] * 3


def test_answers_are_not_lost_when_vllm_fails(scheduler: Any) -> None:
    scheduler.running, scheduler.waiting = [request("a")], [request("w")]
    scheduler.fail = True
    with pytest.raises(RuntimeError):
        scheduler.schedule()
    assert [r.name for r in scheduler.running] == ["a"]
    assert scheduler.max_num_running_reqs == 4
