"""The engine: one model, one paged KV cache, one thread of transformers' continuous batching."""

from __future__ import annotations

import importlib.metadata
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from fp8flow.embedded import attention, quantizer
from fp8flow.embedded.fp8 import native_bfloat16
from fp8flow.errors import FlowError

PAGE_TOKENS = 32
_REACHED = "fp8flow_reached"
# Tokens of prompts are counted at three places: when received, when computed in a forward pass,
# and when a forward pass starts behind them although no earlier one computed them.
COUNTERS = (
    "received",
    "completed",
    "failed",
    "cancelled",
    "prompt_tokens",
    "computed_prompt_tokens",
    "prefix_hit_tokens",
    "output_tokens",
)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class EngineOptions:
    """How to serve a checkpoint; sizes in tokens, ``threads`` 0 for all cores.

    ``share_prefixes`` lets requests reuse what others left in the cache, which no measurement may;
    the launcher cannot set it, and the tests that reuse is noticed do.
    """

    model: Path
    served_model_name: str
    max_batch_size: int = 16
    max_batch_tokens: int = 1024
    kv_cache_tokens: int = 16384
    threads: int = 0
    dtype: str = "auto"
    share_prefixes: bool = False


class EngineDeadError(RuntimeError):
    """The generation thread has ended; no request can be answered any more."""


class MinTokens(ContinuousBatchingLogitsProcessor):
    """Keeps end-of-sequence tokens out of the first ``min_tokens`` tokens of an answer."""

    supported_kwargs: ClassVar[dict[str, type]] = {"min_tokens": int}
    ignored_kwargs = ()

    def __init__(self, eos_ids: list[int]) -> None:
        self.eos_ids = eos_ids

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """No minimum."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Return 1 for each request that may not end with its next token."""
        return torch.tensor(
            [int(_must_go_on(r.state)) for r in requests_with_new_token], dtype=torch.int32
        )

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Mask the end tokens; ``scores`` is [requests, vocabulary]."""
        rows = tensor_arg[: scores.size(0)].nonzero().flatten()
        if rows.numel() and self.eos_ids:
            scores[rows.unsqueeze(1), torch.tensor(self.eos_ids)] = -math.inf
        return scores


def _must_go_on(state: Any) -> bool:
    """Tell whether the answer is still below its minimum.

    A request that was evicted from the cache restarts with its tokens appended to the prompt.
    """
    before = len(state.initial_tokens) - state._true_initial_tokens
    done = len(state.generated_tokens) + (before if state._true_initial_tokens else 0)
    return bool(done < state.logit_processor_kwargs.get("min_tokens", 0))


class PagedManager(ContinuousBatchingManager):
    """transformers' manager, with our attention and without a stop that waits for requests."""

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Keep the attention that the model was loaded with."""


class PrefillMeter:
    """Counts, at every forward pass of the model, prompt tokens computed and prompt tokens skipped.

    A hook of the model itself, so whatever put keys and values into the cache without computing
    them is noticed: the first pass of a request then starts at a position behind what its earlier
    passes have reached. It does not see values that are wrong or were replaced in the cache. A
    request that was evicted is computed, and counted as computed, again.
    """

    def __init__(self, inputs: Any, count: Callable[..., None]) -> None:
        self._inputs, self._count = inputs, count

    def __call__(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        """Look at a packed batch: position_ids [1, tokens], cu_seq_lens_q [requests + 1]."""
        starts, positions = kwargs["cu_seq_lens_q"].tolist(), kwargs["position_ids"][0]
        computed = skipped = 0
        for i, future in enumerate(self._inputs.requests_in_batch):
            state, first = future.state, int(positions[starts[i]])
            end = first + starts[i + 1] - starts[i]
            reached = getattr(state, _REACHED, 0)
            skipped += max(0, first - reached)
            computed += max(0, min(end, len(state.initial_tokens)) - first)
            setattr(state, _REACHED, max(reached, end))
        self._count(computed_prompt_tokens=computed, prefix_hit_tokens=skipped)


def compute_dtype(name: str) -> torch.dtype:
    """Return the dtype to compute in; auto is bfloat16 where the CPU has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if native_bfloat16() else torch.float32
    return _DTYPES[name]


def load_model(directory: Path, dtype: torch.dtype) -> Any:
    """Load a checkpoint (ModelOpt FP8, or not quantized) for the embedded engine.

    Raises:
        FlowError: if it is quantized in a way that the engine does not compute.
    """
    quantizer.register()
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    section = quantizer.quantization_section(directory)
    if section is not None:
        config.quantization_config = section
        if section.get("quant_method") != quantizer.METHOD:
            raise FlowError(
                f"{directory} is quantized with {section.get('quant_method')!r} "
                f"({section.get('quant_algo')}); the embedded engine serves ModelOpt FP8 "
                "checkpoints and unquantized ones"
            )
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=attention.NAME,
        local_files_only=True,
    )
    return model.eval()


class Engine:
    """Loads the model and generates; callbacks are called on the event loop of the caller."""

    def __init__(self, options: EngineOptions) -> None:
        if options.threads > 0:
            torch.set_num_threads(options.threads)
        self.options = options
        self.model = load_model(options.model, compute_dtype(options.dtype))
        self.tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        self.eos_ids = _eos_ids(self.model)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._lock = threading.Lock()
        self.manager = self._manager()
        processor = self.manager.batch_processor
        if processor is None:
            raise EngineDeadError("transformers made no batch processor")
        self.cache, self.scheduler = processor.cache, processor.scheduler
        attention.CacheAccess(self.cache, attention.kv_scales_by_layer(self.model))
        # Not before the warm-up of the manager, whose passes belong to no request.
        meter = PrefillMeter(processor.inputs_and_outputs, self.count)
        self.model.register_forward_pre_hook(meter, with_kwargs=True)

    def _manager(self) -> PagedManager:
        options = self.options
        generation = GenerationConfig(
            do_sample=False, eos_token_id=self.eos_ids or -1, max_new_tokens=1
        )
        batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=math.ceil(options.kv_cache_tokens / PAGE_TOKENS),
            max_batch_tokens=options.max_batch_tokens,
            max_requests_per_batch=options.max_batch_size,
            max_blocks_per_request=0,
            allow_block_sharing=options.share_prefixes,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        manager = PagedManager(self.model, generation, batching)
        processors = manager.logit_processor
        processors.logits_processor.append(MinTokens(self.eos_ids))
        processors.tensors_required += 1
        processors.do_processing = True
        processors._retrieve_processors_kwargs()
        manager.warmup()  # allocates the cache; there is nothing to compile on a CPU
        return manager

    def count(self, **increments: int) -> None:
        """Add to the counters; called from both threads."""
        with self._lock:
            for name, value in increments.items():
                self.counters[name] += value

    @property
    def max_model_len(self) -> int:
        """Tokens that one request, prompt and answer, can have."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        capacity = self.cache.num_blocks * PAGE_TOKENS
        return min(capacity, positions or capacity)

    def start(self) -> None:
        """Start the generation thread."""
        self.manager.start()

    def death(self) -> str | None:
        """Return why the generation thread does not run; None while it does."""
        if self.manager.is_running() and self.manager.background_thread_status.fatal_error is None:
            return None
        error = self.manager.background_thread_status.fatal_error
        return f"the generation thread died: {error!r}" if error else "the engine is stopped"

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        callback: Callable[[Any], None],
    ) -> None:
        """Queue a request; ``callback`` gets a GenerationOutput per step, on this event loop.

        Raises:
            EngineDeadError: if the generation thread does not run.
        """
        self.count(received=1, prompt_tokens=len(prompt))
        self.manager.register_result_handler(request_id, callback)
        accepted = self.manager.add_request(
            prompt,
            request_id=request_id,
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=-1 if ignore_eos else None,
            min_tokens=min_tokens,
        )
        reason = self.death()
        if accepted is None or reason is not None:
            self.forget(request_id)
            self.count(failed=1)
            raise EngineDeadError(reason or "the engine is stopping")

    def cancel(self, request_id: str) -> None:
        """Drop a request that nobody waits for any more."""
        self.forget(request_id)
        self.manager.cancel_request(request_id)
        self.count(cancelled=1)

    def forget(self, request_id: str) -> None:
        """Drop the callback of a request."""
        router = self.manager.output_router
        with router._lock:
            router.result_handlers.pop(request_id, None)

    def stop(self) -> None:
        """End the generation thread after the step it is in; open requests fail."""
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=10, hard_stop=True)

    def settings(self) -> dict[str, Any]:
        """Return the settings in effect, read from the live objects."""
        cache, batching = self.cache, self.manager.continuous_batching_config
        with self._lock:
            counters = dict(self.counters)
        return {
            "backend": "transformers",
            "prefix_reuse": bool(cache.use_prefix_sharing),
            "allow_block_sharing": bool(cache.allow_block_sharing),
            "model_path": str(self.options.model),
            "served_model_name": self.options.served_model_name,
            "max_model_len": self.max_model_len,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "quantization": quantizer.describe(self.model),
            "attention": self.model.config._attn_implementation,
            "decoding": "greedy",
            "eos_token_ids": self.eos_ids,
            "max_batch_size": self.scheduler.max_requests_per_batch,
            "max_batch_tokens": cache.max_batch_tokens,
            "kv_cache": {
                "blocks": cache.num_blocks,
                "block_tokens": batching.page_size,
                "tokens": cache.num_blocks * batching.page_size,
                "dtype": str(cache.dtype).removeprefix("torch."),
                "bytes": cache.cache_tensor.numel(),
            },
            "scheduler": type(self.scheduler).__name__,
            "batches": getattr(self.manager, "current_batch", 0),
            "counters": counters,
            "threads": torch.get_num_threads(),
            "versions": {n: importlib.metadata.version(n) for n in ("transformers", "torch")},
        }


def _eos_ids(model: Any) -> list[int]:
    """Return the end-of-sequence ids of generation_config.json, else of config.json."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.eos_token_id
    if found is None:
        return []
    return sorted(found) if isinstance(found, list) else [int(found)]


def settings_text(engine: Engine) -> str:
    """Return the settings for the log, on one line."""
    return json.dumps(engine.settings(), sort_keys=True)
