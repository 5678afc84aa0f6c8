"""A self-made tokenizer of any size: sizes a system whose real vocabulary is not at hand.

It is a byte-level BPE tokenizer in the manner of Llama 3. Its ordinary entries are the 128 ASCII
characters and made-up words of two or three syllables with a blank in front, so every ordinary id
has text of its own and text made of such words comes back as the same ids. Nothing is random and
nothing is trained: equal sizes give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, Final

from fp8flow.errors import FlowError
from fp8flow.weights import write_json

GENERATED: Final = "generated"
BOS, TEXT_END, UNKNOWN, EOS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|eot_id|>",
)
# Llama 3.1: 128,000 ordinary entries, then 256 special ones in this order.
LLAMA3_VOCAB_SIZE = 128_256
_LLAMA3_NAMED = (
    BOS, TEXT_END, UNKNOWN, "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    EOS, "<|python_tag|>",
)  # fmt: skip
_LLAMA3_SPECIAL_COUNT = 256
_FIRST_RESERVED = 3
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwxyz", "aeiou"
_ASCII = 128
_BLANK = "\u0120"  # the byte-level alphabet's letter for a blank


def special_tokens(vocab_size: int) -> tuple[str, ...]:
    """Return the special tokens in order of id; they are the last entries of the vocabulary.

    With the size of Llama 3.1's vocabulary they are Llama 3.1's, so ``<|begin_of_text|>`` is
    128000 and ``<|eot_id|>`` 128009. Other sizes have beginning, end, unknown and end of turn.
    """
    if vocab_size != LLAMA3_VOCAB_SIZE:
        return BOS, TEXT_END, UNKNOWN, EOS
    reserved = _LLAMA3_SPECIAL_COUNT - len(_LLAMA3_NAMED)
    numbers = range(_FIRST_RESERVED, _FIRST_RESERVED + reserved)
    return (*_LLAMA3_NAMED, *(f"<|reserved_special_token_{number}|>" for number in numbers))


def _ascii_letters() -> list[str]:
    """Return what byte-level BPE writes for the bytes 0 to 127: printable ones as they are."""
    shifted = chain(range(33), (_ASCII - 1,))
    stands_for = {byte: chr(256 + place) for place, byte in enumerate(shifted)}
    return [stands_for.get(byte, chr(byte)) for byte in range(_ASCII)]


def _words() -> Iterator[str]:
    syllables = ["".join(pair) for pair in product(_CONSONANTS, _VOWELS)]
    for count in (2, 3, 4):
        yield from ("".join(parts) for parts in product(syllables, repeat=count))


def vocabulary(vocab_size: int) -> dict[str, int]:
    """Return all entries and their ids, which are 0 to ``vocab_size`` - 1.

    Raises:
        FlowError: if the size leaves no room for words.
    """
    special = special_tokens(vocab_size)
    words = vocab_size - _ASCII - len(special)
    if words < 1:
        raise FlowError(
            f"model.synthetic.vocab_size is {vocab_size}, but a generated tokenizer needs more "
            f"than {_ASCII + len(special)} entries"
        )
    made = (_BLANK + word for word in islice(_words(), words))
    return {token: number for number, token in enumerate(chain(_ascii_letters(), made, special))}


def _build(vocab_size: int) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    entries = vocabulary(vocab_size)
    # Without merges, ignore_merges finds a word as a whole, and letters where there is none.
    model = models.BPE(vocab=entries, merges=[], unk_token=UNKNOWN, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, entries[BOS])]
    )
    special = [AddedToken(name, special=True) for name in special_tokens(vocab_size)]
    tokenizer.add_special_tokens(special)
    return tokenizer


def write_tokenizer(vocab_size: int, max_tokens: int, folder: Path) -> None:
    """Write the files of a tokenizer with exactly ``vocab_size`` entries.

    The settings are spelt as transformers 4 writes them, which 5 reads too; the other way round
    does not hold.

    Args:
        vocab_size: number of entries, special ones included.
        max_tokens: longest sequence of the model, tokens.
        folder: an existing folder.

    Raises:
        FlowError: if the size leaves no room for words.
    """
    _build(vocab_size).save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": BOS, "eos_token": EOS}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings | names)
    write_json(folder / "special_tokens_map.json", names)
