"""A small real tokenizer in the style of Llama 3: byte-level BPE, BOS in front, chat template."""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DEMO = Path(__file__).resolve().parents[2] / "resources" / "demo"
BOS, EOS = "<|begin_of_text|>", "<|eot_id|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if date_string is not defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|system|>Today: {{ date_string }}<|eot_id|>"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def demo_rows(name: str = "validation") -> list[dict[str, str]]:
    """Rows of a demo file."""
    lines = (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["article"] for row in demo_rows()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return str(tokenizer.to_str())


def save_tokenizer(folder: Path, **config: Any) -> Path:
    """Write the tokenizer's files into ``folder``; ``config`` overrides tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 64,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": True,
    } | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
