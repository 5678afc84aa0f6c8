"""A scheduler for vLLM that gives prompts and answers steps of their own.

vLLM puts new prompts and running answers into one forward pass. On Hopper its attention kernel then
works on every answer with the tile of a prompt, most of which is empty. Passes of one kind each do
the same work on the same tokens with the kernel that fits; the linear layers reach their speed
with either kind. Outputs do not depend on it beyond the rounding of differently sized batches.

Loaded by the vLLM server itself (``--scheduler-cls fp8flow.vllm_scheduler.PhasedScheduler``), for
vLLM 0.25.1. vLLM calls this interface not public: the backend checks the version it is used with.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class PhasedScheduler(AsyncScheduler):
    """Takes prompts and answers in turns; one kind alone goes on without waiting."""

    # vLLM's own, named here because it is not part of this project's environment.
    running: list[Any]
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts_next = True

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Return the next step: only prompts, or only answers."""
        answers = [r for r in self.running if not r.is_prefill_chunk]
        prompts = len(answers) < len(self.running) or self._has_room_for_waiting()
        take_prompts = prompts and (self._prompts_next or not answers)
        self._prompts_next = not take_prompts
        if take_prompts:
            return self._schedule_prompts(answers)
        # vLLM's own means to hold prompts back, made for data parallel serving.
        self.prefill_capacity_bound = False
        return super().schedule(throttle_prefills=bool(answers))

    def _has_room_for_waiting(self) -> bool:
        waiting = bool(self.waiting or self.skipped_waiting)
        return waiting and len(self.running) < self.max_num_running_reqs

    def _schedule_prompts(self, answers: list[Any]) -> Any:
        """Schedule a step that does not see the running answers, yet counts them."""
        most = self.max_num_running_reqs
        self.running = [r for r in self.running if r.is_prefill_chunk]
        self.max_num_running_reqs = most - len(answers)
        try:
            return super().schedule()
        finally:
            self.running = answers + self.running
            self.max_num_running_reqs = most
