"""Inference engines: how each is started, asked, and read back.

A backend consists of pure functions. Nothing here starts a process or opens a connection: the load
job does (:mod:`fp8flow.load_job`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from fp8flow.errors import FlowError

KNOWN = ("transformers", "trtllm", "vllm", "sglang", "external")
PageKind = Literal["json", "text"]
# Engines size their KV cache by the memory that they find free, which varies a little.
_CACHE_TOLERANCE = 0.02


@dataclass(frozen=True)
class Served:
    """What a server loads.

    Attributes:
        checkpoint: folder of the checkpoint.
        tokenizer: folder with the tokenizer's files and a Hugging Face config.json.
        quant_algo: ``FP8``, ``FP8_PER_CHANNEL_PER_TOKEN``, or None for unquantized weights.
        kv_cache: ``fp8`` or ``auto`` (the precision of the activations).
        engine: folder of the TensorRT engine, for the backend that needs one.
    """

    checkpoint: Path
    tokenizer: Path
    quant_algo: str | None
    kv_cache: str
    engine: Path | None = None


@dataclass(frozen=True)
class Place:
    """Where and how one server runs; nothing here changes what it answers.

    Attributes:
        host: address that it listens on.
        port: port that it listens on.
        model_name: name that it gives the model.
        threads: CPU threads.
        files: folder that holds the backend's ``serve_files``.
    """

    host: str
    port: int
    model_name: str
    threads: int
    files: Path


class Backend(Protocol):
    """What a load job needs to know of an inference engine.

    ``engine`` is always the configuration's section ``engine``, with all defaults filled in.

    Attributes:
        name: value of ``engine.backend``.
        uses_gpu: whether the server occupies GPUs; else the whole host.
        starts_server: whether the job starts the server; else it runs already.
        streams_token_ids: whether answers carry their token ids.
        reports_prefix_reuse: whether the server says if it reuses prefixes. Where it does not,
            only the probe's measurement can show it.
        pages: what is read from the server about its settings: path -> how to read it.
    """

    name: str
    uses_gpu: bool
    starts_server: bool
    streams_token_ids: bool
    reports_prefix_reuse: bool
    pages: Mapping[str, PageKind]

    def serve_files(self, engine: Mapping[str, Any], served: Served) -> dict[str, str]:
        """Return the files that the server reads: name -> text."""

    def serve_command(self, engine: Mapping[str, Any], served: Served, place: Place) -> list[str]:
        """Return the server's command line."""

    def serve_environment(self, engine: Mapping[str, Any], threads: int) -> dict[str, str]:
        """Return the variables that the server needs."""

    def request_fields(self, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return the fields of a greedy request beyond the common ones.

        With ``min_tokens == max_tokens`` every answer has exactly that length.
        """

    def asked(self, engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
        """Return what the server was told, under the names of :meth:`parse_settings`.

        Only what the server reports again: each value here must come back unchanged.
        """

    def parse_settings(self, pages: Mapping[str, Any], log: str) -> dict[str, Any]:
        """Return the effective settings under common names.

        ``engine`` (name and version), ``prefix_reuse`` (None: not told), ``max_batch_size``,
        ``max_batch_tokens``, ``max_model_len``, ``kv_cache_tokens``, ``kv_cache_dtype``,
        ``quantization``, ``dtype``; what an engine does not tell is left out. ``counters`` is the
        one part that may change while the server runs; its ``prefix_hit_tokens``, if the engine
        has it, counts tokens of prompts that were taken from the cache of another request.

        Args:
            pages: the answers to :attr:`pages`, by path.
            log: the server's log so far.

        Raises:
            FlowError: if the answers lack what is needed to tell.
        """


def differing_settings(
    one: Mapping[str, Any], other: Mapping[str, Any], *, same_server: bool = False
) -> list[str]:
    """Return the names of effective settings that differ; counters are none.

    Args:
        one: what ``Backend.parse_settings`` returned.
        other: what it returned at another time or of another server.
        same_server: whether both are of one server, whose cache keeps its size.
    """
    tolerance = 0.0 if same_server else _CACHE_TOLERANCE
    return [
        name
        for name in sorted({*one, *other} - {"counters"})
        if not (name in one and name in other and _alike(name, one[name], other[name], tolerance))
    ]


def _alike(name: str, one: Any, other: Any, cache_tolerance: float) -> bool:
    if name == "kv_cache_tokens" and one and other:
        return bool(abs(one - other) <= cache_tolerance * max(one, other))
    return bool(one == other)


def get_backend(name: str) -> Backend:
    """Return the backend ``name``.

    Raises:
        FlowError: for an unknown name, with the known ones.
    """
    if name not in KNOWN:
        raise FlowError(f"engine.backend: {name!r} is not known; allowed: {', '.join(KNOWN)}")
    backend: Backend = importlib.import_module(f"fp8flow.backends.{name}").BACKEND
    return backend
