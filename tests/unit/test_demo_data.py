"""The embedded demo data set is well formed, disjoint and free of near duplicates."""

import hashlib
import itertools
import json
import re
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "resources" / "demo"
ROW_COUNTS = {"validation": 32, "calibration": 24}
MIN_WORDS, MAX_WORDS = 150, 400
SHINGLE_WORDS = 8
# Share of the shorter article's 8-word runs that may also occur in another article: stock phrases
# collide now and then, a template with swapped names shares far more.
MAX_SHARED_SHINGLES = 0.02
# Jaccard similarity of the sets of words of five or more letters: catches a reworded copy.
MAX_WORD_OVERLAP = 0.25


def load_rows(split: str) -> list[dict[str, str]]:
    """Rows of one split, read as strict UTF-8 with LF line ends."""
    text = (DEMO / f"{split}.jsonl").read_bytes().decode("utf-8")
    assert text.endswith("\n") and "\r" not in text
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


def all_rows() -> list[dict[str, str]]:
    """Rows of both splits."""
    return [row for split in ROW_COUNTS for row in load_rows(split)]


def words_of(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return re.findall(r"\w+", text.lower())


def shingles(text: str) -> set[tuple[str, ...]]:
    """Runs of SHINGLE_WORDS consecutive words."""
    words = words_of(text)
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}


def shared_shingles(first: str, second: str) -> float:
    """Share of the shorter text's word runs that the other text contains too (0 to 1)."""
    one, two = shingles(first), shingles(second)
    return len(one & two) / min(len(one), len(two))


def word_overlap(first: str, second: str) -> float:
    """Jaccard similarity (0 to 1) of the longer words of two texts."""
    one, two = ({word for word in words_of(text) if len(word) >= 5} for text in (first, second))
    return len(one & two) / len(one | two)


@pytest.mark.parametrize(("split", "count"), ROW_COUNTS.items())
def test_row_count_and_fields(split: str, count: int) -> None:
    rows = load_rows(split)
    assert len(rows) == count
    for row in rows:
        assert list(row) == ["id", "article", "highlights"]
        assert all(isinstance(value, str) and value == value.strip() for value in row.values())


@pytest.mark.parametrize("split", ROW_COUNTS)
def test_article_length_and_shape(split: str) -> None:
    for row in load_rows(split):
        assert MIN_WORDS <= len(row["article"].split()) <= MAX_WORDS, row["id"]
        assert len(row["article"].split("\n\n")) >= 3, row["id"]
        assert row["article"][-1] in '."', row["id"]


@pytest.mark.parametrize("split", ROW_COUNTS)
def test_id_is_sha1_of_article(split: str) -> None:
    for row in load_rows(split):
        assert row["id"] == hashlib.sha1(row["article"].encode("utf-8")).hexdigest()


@pytest.mark.parametrize("split", ROW_COUNTS)
def test_highlights_are_two_to_four_sentences(split: str) -> None:
    for row in load_rows(split):
        sentences = row["highlights"].split("\n")
        assert 2 <= len(sentences) <= 4, row["id"]
        for sentence in sentences:
            assert sentence.endswith(" ."), row["id"]
            assert 4 <= len(sentence.removesuffix(" .").split()) <= 20, sentence
        assert len(row["highlights"]) < len(row["article"]) / 2, row["id"]


def test_ids_and_articles_are_unique_and_splits_disjoint() -> None:
    rows = all_rows()
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["article"] for row in rows}) == len(rows)
    assert len({row["highlights"] for row in rows}) == len(rows)
    validation, calibration = ({row["id"] for row in load_rows(split)} for split in ROW_COUNTS)
    assert not validation & calibration


def test_calibration_list_equals_calibration_file() -> None:
    data = (DEMO / "calibration-list.txt").read_bytes()
    expected = "".join(row["id"] + "\n" for row in load_rows("calibration"))
    assert data == expected.encode("ascii")


def test_no_near_duplicates() -> None:
    for first, second in itertools.combinations(all_rows(), 2):
        pair = f"{first['id']} {second['id']}"
        assert shared_shingles(first["article"], second["article"]) <= MAX_SHARED_SHINGLES, pair
        assert word_overlap(first["article"], second["article"]) <= MAX_WORD_OVERLAP, pair


def test_no_article_starts_like_another() -> None:
    openings = [tuple(words_of(row["article"])[:5]) for row in all_rows()]
    assert len(set(openings)) == len(openings)


def test_near_duplicate_measures_detect_a_swapped_name() -> None:
    article = all_rows()[0]["article"]
    names = re.compile(r"(?<=\w )[A-Z]\w+")
    swapped = names.sub("Zork", article)
    assert swapped != article
    assert shared_shingles(article, swapped) > MAX_SHARED_SHINGLES
    assert word_overlap(article, swapped) > MAX_WORD_OVERLAP


def test_readme_states_licence_and_bar() -> None:
    text = (DEMO / "README.md").read_text(encoding="utf-8")
    assert "Apache-2.0" in text
    assert "fictional" in text
    assert "never allowed in a submission" in text
