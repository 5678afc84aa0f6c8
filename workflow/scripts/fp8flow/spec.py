"""The identity of a product: everything that determines it, as one canonical JSON text.

Snakemake compares rule params as an unnamed set of values and cannot see imported modules, so each
rule carries exactly one param, the canonical text of a :class:`Spec`. The job reads its settings
from that text and from nothing else.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no blanks; equal values give equal texts.

    Raises:
        TypeError: for anything but plain JSON types, so that no Path or object slips in.
        ValueError: for NaN and infinities, which JSON does not have.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )


def sha256_text(text: str) -> str:
    """Return the SHA-256 hex digest of ``text`` in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Spec:
    """What determines one product.

    Attributes:
        rule: the rule that makes it.
        settings: the config values it depends on, with their names; plain JSON types.
        code: hash over the syntax trees of the code that computes it.
        tools: pinned version of each distribution it is computed with.
    """

    rule: str
    settings: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    tools: dict[str, str] = field(default_factory=dict)

    def canonical(self) -> str:
        """Return the canonical JSON text."""
        return canonical_json(asdict(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as plain JSON types."""
        return asdict(self)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read a spec from JSON text, or from a file when ``text`` is ``@path``.

        Raises:
            FlowError: if the text is not JSON or lacks ``rule`` or ``settings``.
        """
        source = "--spec"
        if text.startswith("@"):
            source = text[1:]
            try:
                text = Path(source).read_text(encoding="utf-8")
            except OSError as error:
                raise FlowError(f"cannot read the spec file {source}: {error.strerror}") from error
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise FlowError(f"{source} is not JSON: {error}") from error
        if not isinstance(data, dict) or not {"rule", "settings"} <= data.keys():
            raise FlowError(f"{source} must be a JSON object with the keys rule and settings")
        known = {key: data[key] for key in ("rule", "settings", "code", "tools") if key in data}
        return cls(**known)
