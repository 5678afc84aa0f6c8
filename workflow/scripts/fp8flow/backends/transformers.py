"""The embedded default: serve_transformers.py, transformers' continuous batching on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8flow.backends import PageKind, Place, Served
from fp8flow.errors import FlowError

PROGRAM = Path(__file__).resolve().parents[2] / "serve_transformers.py"
_PAGE = "/fp8flow/settings"
_SERVE_KEYS = ("max_batch_size", "max_batch_tokens", "kv_cache_tokens")


class TransformersBackend:
    """See :class:`fp8flow.backends.Backend`."""

    name = "transformers"
    uses_gpu = False
    starts_server = True
    streams_token_ids = True
    reports_prefix_reuse = True
    pages: Mapping[str, PageKind] = {_PAGE: "json"}

    def serve_files(self, engine: Mapping[str, Any], served: Served) -> dict[str, str]:
        """Return no files: everything is on the command line."""
        return {}

    def serve_command(self, engine: Mapping[str, Any], served: Served, place: Place) -> list[str]:
        """Return the argv of the embedded server."""
        argv = [sys.executable, str(PROGRAM), "--model", str(served.checkpoint)]
        argv += ["--served-model-name", place.model_name]
        argv += ["--host", place.host, "--port", str(place.port), "--threads", str(place.threads)]
        for key in _SERVE_KEYS:
            argv += [f"--{key.replace('_', '-')}", str(engine["serve"][key])]
        return argv

    def serve_environment(self, engine: Mapping[str, Any], threads: int) -> dict[str, str]:
        """Return the OpenMP settings; torch reads them when it is loaded."""
        # Threads that wait by spinning lose whole time slices when a client shares their cores.
        return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}

    def request_fields(self, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return the greedy fields of this server's dialect."""
        return {"min_tokens": min_tokens, "top_k": 1}

    def asked(self, engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
        """Return the batch limits."""
        return {key: engine["serve"][key] for key in ("max_batch_size", "max_batch_tokens")}

    def parse_settings(self, pages: Mapping[str, Any], log: str) -> dict[str, Any]:
        """Return the settings in effect; prefixes count as reused if blocks may be shared.

        Raises:
            FlowError: if the server does not report what is needed to tell.
        """
        answer = pages[_PAGE]
        try:
            counters, cache = answer["counters"], answer["kv_cache"]
            shared = answer["prefix_reuse"] or answer["allow_block_sharing"]
            emulated = answer["quantization"]["kv_cache"]["emulated"]
            return {
                "prefix_reuse": bool(shared or counters["prefix_hit_tokens"]),
                "counters": dict(counters),
                "max_batch_size": answer["max_batch_size"],
                "max_batch_tokens": answer["max_batch_tokens"],
                "max_model_len": answer["max_model_len"],
                "kv_cache_tokens": cache["tokens"],
                "kv_cache_dtype": "fp8" if emulated else cache["dtype"],
                "quantization": answer["quantization"],
                "dtype": answer["dtype"],
                "engine": f"transformers {answer['versions']['transformers']}",
            }
        except (KeyError, TypeError) as error:
            raise FlowError(
                f"the server's {_PAGE} lacks {error}: is another program listening on its port?"
            ) from error


BACKEND = TransformersBackend()
