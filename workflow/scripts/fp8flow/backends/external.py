"""A server that runs already, with OpenAI's completions API; nothing about it can be set here.

It must serve the model under ``model.name``, and take token ids as prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8flow.backends import PageKind, Place, Served
from fp8flow.backends.common import model_length
from fp8flow.errors import FlowError

_MODELS = "/v1/models"


class ExternalBackend:
    """See :class:`fp8flow.backends.Backend`."""

    name = "external"
    uses_gpu = False
    starts_server = False
    streams_token_ids = False
    reports_prefix_reuse = False
    pages: Mapping[str, PageKind] = {_MODELS: "json"}

    def serve_files(self, engine: Mapping[str, Any], served: Served) -> dict[str, str]:
        """Return no files."""
        return {}

    def serve_command(self, engine: Mapping[str, Any], served: Served, place: Place) -> list[str]:
        """Refuse: there is nothing to start.

        Raises:
            FlowError: always.
        """
        raise FlowError(
            f"engine.backend external starts no server; start it yourself at {engine['url']}"
        )

    def serve_environment(self, engine: Mapping[str, Any], threads: int) -> dict[str, str]:
        """Return nothing."""
        return {}

    def request_fields(self, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return nothing: OpenAI's API has no top_k, no minimum and no way past the end token.

        Raises:
            FlowError: if answers must have more than one token.
        """
        if min_tokens > 1:
            raise FlowError(
                f"harness.min_output_tokens: OpenAI's API knows no minimum, so {min_tokens} cannot "
                "be asked of an external server; set it to 1"
            )
        return {}

    def asked(self, engine: Mapping[str, Any], served: Served) -> dict[str, Any]:
        """Return nothing: the server was told nothing."""
        return {}

    def parse_settings(self, pages: Mapping[str, Any], log: str) -> dict[str, Any]:
        """Return what the list of models says, if the server has one."""
        answer = pages.get(_MODELS)
        cards = answer.get("data") if isinstance(answer, dict) else None
        models = [card for card in cards or [] if isinstance(card, dict)]
        return {
            "engine": "external",
            "prefix_reuse": None,
            "counters": {},
            "models": [card.get("id") for card in models],
            "owned_by": sorted({str(card["owned_by"]) for card in models if "owned_by" in card}),
            **model_length(pages),
        }


BACKEND = ExternalBackend()
