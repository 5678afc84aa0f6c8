"""The embedded default: serve_transformers.py, transformers' continuous batching on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError

PROGRAM = Path(__file__).resolve().parents[2] / "serve_transformers.py"
_SERVE_KEYS = ("max_batch_size", "max_batch_tokens", "kv_cache_tokens")


class TransformersBackend:
    """See :class:`fp8flow.backends.Backend`."""

    name = "transformers"
    uses_gpu = False
    settings_path = "/fp8flow/settings"
    streams_token_ids = True

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
        """Return the argv of the embedded server."""
        argv = [sys.executable, str(PROGRAM), "--model", str(checkpoint)]
        argv += ["--served-model-name", model_name, "--host", host, "--port", str(port)]
        argv += ["--threads", str(threads)]
        for key in _SERVE_KEYS:
            argv += [f"--{key.replace('_', '-')}", str(serve[key])]
        return argv

    def serve_environment(self, threads: int) -> dict[str, str]:
        """Return the OpenMP settings; torch reads them when it is loaded."""
        # Threads that wait by spinning lose whole time slices when a client shares their cores.
        return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}

    def request_fields(self, min_tokens: int) -> dict[str, Any]:
        """Return the greedy fields of this server's dialect."""
        return {"min_tokens": min_tokens, "top_k": 1}

    def parse_settings(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in effect; prefixes count as reused if blocks may be shared.

        Raises:
            FlowError: if the server does not report what is needed to tell.
        """
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
                f"the server's {self.settings_path} lacks {error}: is another program listening "
                "on its port?"
            ) from error


BACKEND = TransformersBackend()
