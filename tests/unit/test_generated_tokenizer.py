"""The generated tokenizer: size, places of special tokens, decoding, determinism."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8flow.errors import FlowError
from fp8flow.generated_tokenizer import (
    BOS,
    EOS,
    LLAMA3_VOCAB_SIZE,
    special_tokens,
    vocabulary,
    write_tokenizer,
)
from fp8flow.prompts import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama3")
    write_tokenizer(LLAMA3_VOCAB_SIZE, 131072, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


def test_special_tokens_are_in_the_places_of_llama_3(tokenizer: Any) -> None:
    assert len(tokenizer) == LLAMA3_VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (128000, 128009)
    places = {
        "<|end_of_text|>": 128001,
        "<|finetune_right_pad_id|>": 128004,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|python_tag|>": 128010,
        "<|reserved_special_token_3|>": 128011,
        "<|reserved_special_token_247|>": 128255,
    }
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in places} == places
    special = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert special == set(range(128000, 128256))


@pytest.mark.parametrize("vocab_size", [133, 600, 49152])
def test_other_sizes_have_their_special_tokens_at_the_end(tmp_path: Path, vocab_size: int) -> None:
    write_tokenizer(vocab_size, 2048, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (vocab_size - 4, vocab_size - 1)
    assert tokenizer.model_max_length == 2048


def test_ids_are_whole_and_tokens_unique() -> None:
    entries = vocabulary(20_000)
    assert list(entries.values()) == list(range(20_000))
    assert list(entries)[-4:] == list(special_tokens(20_000))


def test_every_ordinary_id_streams_text_at_once(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(backend, number) for number in range(128000)]
    assert all(pieces)
    assert len(set(pieces)) == 128000
    assert "".join(map(str, pieces)) == backend.decode(list(range(128000)))


def test_words_come_back_as_the_same_ids(tokenizer: Any) -> None:
    ids = np.random.default_rng(0).integers(128, 128000, 3000).tolist()
    text = tokenizer.decode(ids)
    assert tokenizer(text)["input_ids"] == [tokenizer.bos_token_id, *ids]


def test_plain_text_is_spelt_in_letters_and_other_scripts_are_unknown(tokenizer: Any) -> None:
    text = 'Rain: 12 mm, \t"it\'s over"\n\x7f'
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    unknown = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert set(unknown) == {128002}


def test_special_tokens_are_recognised_in_text_and_left_out_of_answers(tokenizer: Any) -> None:
    ids = tokenizer(f"{BOS} baba{EOS}", add_special_tokens=False)["input_ids"]
    assert ids == [128000, tokenizer.convert_tokens_to_ids("Ġbaba"), 128009]
    assert tokenizer.decode(ids, skip_special_tokens=True) == " baba"


def test_files_are_the_same_every_time_small_and_read_by_older_transformers(
    folder: Path, tmp_path: Path
) -> None:
    write_tokenizer(LLAMA3_VOCAB_SIZE, 131072, tmp_path)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert all((folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in files)
    assert (folder / "tokenizer.json").stat().st_size < 12 << 20
    # transformers 4 does not know the class name that 5 would write.
    assert '"PreTrainedTokenizerFast"' in (folder / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("vocab_size", [1, 132])
def test_a_size_without_room_for_words_is_refused(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(FlowError, match=rf"vocab_size is {vocab_size}.*more than 132"):
        write_tokenizer(vocab_size, 2048, tmp_path)
