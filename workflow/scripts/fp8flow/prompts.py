"""Prompts of the summarization benchmark and their token ids."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fp8flow.errors import FlowError
from fp8flow.records import Record, sha256_file
from fp8flow.spec import canonical_json, sha256_text

Template = Literal["reference", "chat"]

# The prompt of the MLPerf Inference v6.1 reference (mlcommons/inference, language/llama3.1-8b,
# download_cnndm.py and prepare-calibration.py). Every character counts: it is what is measured.
INSTRUCTION = (
    "Summarize the following news article in 128 tokens. "
    "Please output the summary only, without any other text."
)
REFERENCE_TEMPLATE = INSTRUCTION + "\n\nArticle:\n{input}\n\nSummary:"
CHAT_TEMPLATE = INSTRUCTION + "\n\nArticle:\n{input}"

# Some chat templates put the current date into the system message, which would make the prompts
# depend on the day they were made.
CHAT_DATE = "26 Jul 2024"

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model folder, read from disk only.

    Args:
        folder: Hugging Face model folder.
        trust_remote_code: let the folder run its own Python code.

    Raises:
        FlowError: if the folder has no tokenizer that can be read.
    """
    from transformers import AutoTokenizer

    if not tokenizer_files(folder):
        raise FlowError(f"{folder} has no tokenizer file; run fetch_model, or complete model.path")
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlowError(f"the tokenizer in {folder} cannot be read: {error}") from error


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the commands that make a data set."""
    parser.add_argument(
        "--model", type=Path, required=True, help="manifest of the model (results/model/...)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="manifest to write; samples.parquet is beside it"
    )


def open_tokenizer(model: Record) -> Any:
    """Return the tokenizer of a model product."""
    trusted = model.spec["settings"].get("model", {}).get("trust_remote_code", False)
    return load_tokenizer(model.root, trust_remote_code=trusted)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of ``folder`` that determine how text becomes token ids."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def tokenizer_sha256(folder: Path) -> str:
    """Return one SHA-256 over the names and contents of the tokenizer's files."""
    return sha256_text(canonical_json({p.name: sha256_file(p) for p in tokenizer_files(folder)}))


def template_sha256(template: Template) -> str:
    """Return the SHA-256 of the template text that articles are put into."""
    return sha256_text(REFERENCE_TEMPLATE if template == "reference" else CHAT_TEMPLATE)


def check_template(tokenizer: Any, template: str) -> None:
    """Check that the tokenizer can do what ``dataset.template`` asks for.

    Raises:
        FlowError: for an unknown template, or ``chat`` with a tokenizer that has no chat template.
    """
    if template not in ("reference", "chat"):
        raise FlowError(f"dataset.template is {template!r}; allowed: reference, chat")
    if template == "chat" and not getattr(tokenizer, "chat_template", None):
        raise FlowError(
            "dataset.template is chat, but the model's tokenizer has no chat template; "
            "use an instruct model, or dataset.template: reference"
        )


def make_prompts(tokenizer: Any, articles: Sequence[str], template: Template) -> list[str]:
    """Return the prompt text of each article.

    ``reference`` is the plain text of the MLPerf reference; the tokenizer adds BOS when it makes
    token ids. ``chat`` is the tokenizer's chat template around one user message with the same
    instruction and article; special tokens are part of the text.
    """
    if template == "reference":
        return [REFERENCE_TEMPLATE.format(input=article) for article in articles]
    messages = [
        [{"role": "user", "content": CHAT_TEMPLATE.format(input=article)}] for article in articles
    ]
    return list(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string=CHAT_DATE
        )
    )


def encode_prompts(tokenizer: Any, prompts: Sequence[str], template: Template) -> list[list[int]]:
    """Return the token ids of each prompt, as the tokenizer's ``encode`` gives them, never cut.

    Special tokens are added for ``reference`` (BOS, where the tokenizer has that rule) and not
    for ``chat``, whose text already holds them.
    """
    if not prompts:
        return []
    encoded = tokenizer(
        list(prompts),
        add_special_tokens=template == "reference",
        padding=False,
        truncation=False,
        return_attention_mask=False,
        verbose=False,  # longer than model_max_length is allowed here, and checked by our own limit
    )
    return [list(ids) for ids in encoded["input_ids"]]


class TextDigest:
    """SHA-256 over a sequence of texts, each in UTF-8 and ended by ``end``."""

    def __init__(self, end: str = "\n") -> None:
        self._digest = hashlib.sha256()
        self._end = end

    def update(self, texts: Sequence[str]) -> None:
        """Add texts in order."""
        for text in texts:
            self._digest.update((text + self._end).encode("utf-8", "surrogatepass"))

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()
