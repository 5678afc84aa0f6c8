from pathlib import Path
from typing import Any

import pytest
import smalltokenizer

from fp8flow.errors import FlowError
from fp8flow.prompts import (
    check_template,
    encode_prompts,
    load_tokenizer,
    make_prompts,
    template_sha256,
    tokenizer_sha256,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(smalltokenizer.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_reference_prompt_is_exact(tokenizer: Any) -> None:
    (prompt,) = make_prompts(tokenizer, ["It rained.\n\nIt {stopped}. "], "reference")
    assert prompt == (
        "Summarize the following news article in 128 tokens. Please output the summary only, "
        "without any other text.\n\nArticle:\nIt rained.\n\nIt {stopped}. \n\nSummary:"
    )


def test_reference_ids_equal_encode_and_are_never_cut(tokenizer: Any) -> None:
    articles = [row["article"] for row in smalltokenizer.demo_rows()[:5]] + ["naïve 🙂 {x}"]
    prompts = make_prompts(tokenizer, articles, "reference")
    encoded = encode_prompts(tokenizer, prompts, "reference")
    assert encoded == [tokenizer.encode(prompt) for prompt in prompts]
    assert all(ids[0] == tokenizer.bos_token_id for ids in encoded)
    assert all(ids.count(tokenizer.bos_token_id) == 1 for ids in encoded)
    assert not any(tokenizer.eos_token_id in ids for ids in encoded)
    assert max(map(len, encoded)) > tokenizer.model_max_length
    decoded = [tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) for ids in encoded]
    assert decoded == prompts


def test_chat_prompt_carries_instruction_and_article_and_opens_the_answer(tokenizer: Any) -> None:
    (prompt,) = make_prompts(tokenizer, ["It rained."], "chat")
    assert prompt.endswith("\n\nArticle:\nIt rained.<|eot_id|><|assistant|>")
    assert "<|user|>Summarize the following news article in 128 tokens." in prompt
    (ids,) = encode_prompts(tokenizer, [prompt], "chat")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_chat_prompt_does_not_depend_on_the_day(tokenizer: Any) -> None:
    (prompt,) = make_prompts(tokenizer, ["It rained."], "chat")
    assert "Today: 26 Jul 2024" in prompt


def test_no_prompts_give_no_ids(tokenizer: Any) -> None:
    assert encode_prompts(tokenizer, [], "reference") == []


def test_chat_needs_a_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    plain = load_tokenizer(smalltokenizer.save_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(FlowError, match="no chat template"):
        check_template(plain, "chat")
    check_template(plain, "reference")
    check_template(tokenizer, "chat")


def test_unknown_template_is_refused(tokenizer: Any) -> None:
    with pytest.raises(FlowError, match="allowed: reference, chat"):
        check_template(tokenizer, "raw")


def test_templates_have_different_digests() -> None:
    assert template_sha256("reference") != template_sha256("chat")


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FlowError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    smalltokenizer.save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(FlowError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_tokenizer_digest_follows_content_not_other_files(tmp_path: Path) -> None:
    one, two = (smalltokenizer.save_tokenizer(tmp_path / name) for name in "ab")
    (two / "config.json").write_text("{}")
    assert tokenizer_sha256(one) == tokenizer_sha256(two)
    smalltokenizer.save_tokenizer(two, model_max_length=65)
    assert tokenizer_sha256(one) != tokenizer_sha256(two)
