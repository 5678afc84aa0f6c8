"""Inference engines: how each is started, asked, and read back.

A backend consists of pure functions. Nothing here starts a process or opens a connection: the load
job does (:mod:`fp8flow.load_job`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fp8flow.errors import FlowError

KNOWN = ("transformers",)


class Backend(Protocol):
    """What a load job needs to know of an inference engine.

    Attributes:
        name: value of ``engine.backend``.
        uses_gpu: whether the server occupies a GPU; else the whole host.
        settings_path: where the server shows its effective settings (GET, JSON).
        streams_token_ids: whether answers carry their token ids.
    """

    name: str
    uses_gpu: bool
    settings_path: str
    streams_token_ids: bool

    def serve_command(
        self,
        checkpoint: Path,
        serve: Mapping[str, Any],
        *,
        model_name: str,
        host: str,
        port: int,
        threads: int,
    ) -> list[str]:
        """Return the server's command line; ``serve`` is the config section engine.serve."""

    def serve_environment(self, threads: int) -> dict[str, str]:
        """Return the variables that the server needs."""

    def request_fields(self, min_tokens: int) -> dict[str, Any]:
        """Return the fields of a greedy request beyond the common ones."""

    def parse_settings(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the effective settings under common names.

        ``prefix_reuse`` is among them. ``counters`` is the one part that may change while the
        server runs; its ``prefix_hit_tokens``, if the engine has it, counts tokens of prompts that
        were taken from the cache of another request.

        Raises:
            FlowError: if the answer lacks what is needed to tell.
        """


def get_backend(name: str) -> Backend:
    """Return the backend ``name``.

    Raises:
        FlowError: for an unknown name, with the known ones.
    """
    if name not in KNOWN:
        raise FlowError(f"engine.backend: {name!r} is not known; allowed: {', '.join(KNOWN)}")
    backend: Backend = importlib.import_module(f"fp8flow.backends.{name}").BACKEND
    return backend
