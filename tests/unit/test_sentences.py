import shutil
from pathlib import Path

import pytest
import smalltokenizer

from fp8flow.errors import FlowError
from fp8flow.sentences import (
    FILES,
    FOLDER,
    Splitter,
    check_files,
    describe_sentence_data,
    load_splitter,
)

# What nltk.sent_tokenize gives with NLTK's own punkt_tab, in NLTK 3.8.1 and in 3.10.4.
SPLITS = {
    "": [],
    "one": ["one"],
    "It rained. It stopped.": ["It rained.", "It stopped."],
    "Dr. Smith met U.S. officials at 5 p.m. Monday. He left.": [
        "Dr. Smith met U.S. officials at 5 p.m. Monday.",
        "He left.",
    ],
    '"Really?" he asked. J.P. Morgan rose 3.5 percent.': [
        '"Really?"',
        "he asked.",
        "J.P. Morgan rose 3.5 percent.",
    ],
    "It rose, e.g. in May. (See p. 12.) Then it fell...": [
        "It rose, e.g.",
        "in May.",
        "(See p.",
        "12.)",
        "Then it fell...",
    ],
    "Rain fell .\nRoads closed .": ["Rain fell .", "Roads closed ."],
}


@pytest.fixture(scope="module")
def splitter() -> Splitter:
    return load_splitter()


@pytest.mark.parametrize("text", SPLITS)
def test_known_splits(splitter: Splitter, text: str) -> None:
    assert splitter.tokenize(text) == SPLITS[text]


def test_same_as_nltk_with_its_own_loader(
    splitter: Splitter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk
    from nltk import tokenize

    shutil.copytree(FOLDER, tmp_path / "tokenizers" / "punkt_tab" / "english")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    tokenize._get_punkt_tokenizer.cache_clear()
    rows = smalltokenizer.demo_rows() + smalltokenizer.demo_rows("calibration")
    texts = [row[key] for row in rows for key in ("article", "highlights")]
    texts += [row["article"][:n] for row in rows for n in (101, 333)] + list(SPLITS)
    try:
        theirs = [nltk.sent_tokenize(text) for text in texts]
        parameters = tokenize._get_punkt_tokenizer("english")._params
    finally:
        tokenize._get_punkt_tokenizer.cache_clear()
    assert [splitter.tokenize(text) for text in texts] == theirs
    assert sum(map(len, theirs)) > 1000
    for table in ("abbrev_types", "collocations", "sent_starters", "ortho_context"):
        ours = getattr(splitter._params, table)  # type: ignore[attr-defined]
        assert ours == getattr(parameters, table)
        assert len(ours) > 30


def test_works_without_any_nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert load_splitter().tokenize("Mr. A came. He sat.") == ["Mr. A came.", "He sat."]


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(FOLDER, folder / "english"))


@pytest.mark.parametrize("name", FILES)
def test_changed_or_missing_parameters_are_refused(tmp_path: Path, name: str) -> None:
    folder = copied(tmp_path)
    check_files(folder)
    with (folder / name).open("a", encoding="utf-8") as stream:
        stream.write("\nx")
    with pytest.raises(FlowError, match=f"{name} differs from NLTK's"):
        load_splitter(folder)
    (folder / name).unlink()
    with pytest.raises(FlowError, match=f"{name} is missing"):
        load_splitter(folder)


def test_record_names_data_and_digest() -> None:
    described = describe_sentence_data()
    assert described["from"] == "resources/nltk/punkt_tab/english"
    assert len(described["sha256"]) == 64
