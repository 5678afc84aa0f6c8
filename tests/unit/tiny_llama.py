"""A tiny Llama 3.1-style model folder and the products around it, built in a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8flow.records import Record, write_record
from fp8flow.spec import Spec

THETA = 500000.0
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}: {{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
VOCAB_SIZE = 272


def save_tokenizer(folder: Path) -> Any:
    """Save and return a byte-level tokenizer: one token per byte, and two special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|begin|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(special + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[1],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def hub_spelling(folder: Path) -> None:
    """Rewrite config.json as Llama 3.1 on the hub has it: RoPE and dtype in the old spelling."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2))


def build_model(
    folder: Path,
    *,
    layers: int = 2,
    tied: bool = False,
    scaling: dict[str, Any] | None = LLAMA3_SCALING,
    old_spelling: bool = True,
    max_shard_size: str = "5GB",
    seed: int = 0,
) -> Path:
    """Write a random bf16 Llama with tokenizer and generation config; return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": THETA, **(scaling or {"rope_type": "default"})},
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = [1, 0]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if old_spelling:
        hub_spelling(folder)
    save_tokenizer(folder)
    return folder


def token_rows(lengths: Sequence[int] = (5, 9, 9, 12), seed: int = 0) -> list[list[int]]:
    """Return rows of random token ids of the given lengths."""
    import random

    numbers = random.Random(seed)
    return [[numbers.randrange(2, VOCAB_SIZE - 20) for _ in range(length)] for length in lengths]


def write_samples(path: Path, rows: Sequence[Sequence[int]]) -> Path:
    """Write a samples.parquet with the columns that quantization needs; return its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "index": pa.array(range(len(rows)), pa.int64()),
        "token_ids": pa.array([list(row) for row in rows], pa.list_(pa.int32())),
        "input_tokens": pa.array([len(row) for row in rows], pa.int32()),
    }
    pq.write_table(pa.table(columns), path)
    return path


def model_record(folder: Path) -> Record:
    """Write the record of a model folder, as fetch_model does."""
    from fp8flow.model_folder import check_model_folder

    result = {
        "source": "local", "id": None, "revision": None, "submittable": True, "notes": [],
        **check_model_folder(folder),
    }  # fmt: skip
    settings = {"model": {"source": "local", "trust_remote_code": False}}
    files = sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")
    spec = Spec("fetch_model", settings)
    return write_record(folder / "manifest.json", spec, result, files=files)


def calibration_record(folder: Path, rows: Sequence[Sequence[int]]) -> Record:
    """Write a calibration product with the given rows."""
    write_samples(folder / "samples.parquet", rows)
    spec = Spec("prepare_calibration", {})
    return write_record(
        folder / "manifest.json", spec, {"rows": len(rows)}, files=["samples.parquet"]
    )
