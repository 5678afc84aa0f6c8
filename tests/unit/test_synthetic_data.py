"""Random prompts: lengths, ids, determinism, and what their products say of themselves."""

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import smalltokenizer
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8flow.articles import Source
from fp8flow.calibration import IdList, build_calibration, closed_obstacles
from fp8flow.dataset import OFFICIAL_ROWS, SAMPLES, build_dataset
from fp8flow.errors import FlowError
from fp8flow.generated_tokenizer import write_tokenizer
from fp8flow.prompts import load_tokenizer
from fp8flow.records import verify_record, write_record
from fp8flow.spec import Spec
from fp8flow.synthetic_data import Lengths, ordinary_ids, random_rows, read_lengths

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
ASKED: dict[str, Any] = {
    "mean_tokens": 870, "min_tokens": 64, "max_tokens": 2048, "sigma": 0.5, "seed": 0,
}  # fmt: skip


def lengths(**changes: Any) -> Lengths:
    return Lengths(**ASKED | changes)


def synthetic(section: str = "dataset", **changes: Any) -> Source:
    return Source("synthetic", section, "validation", lengths=lengths(**changes))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("generated")
    write_tokenizer(5000, 4096, folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with other special tokens, in the front of its vocabulary."""
    return load_tokenizer(smalltokenizer.save_tokenizer(tmp_path_factory.mktemp("small")))


def rows(tokenizer: Any, count: int, section: str = "dataset", **changes: Any) -> list[Any]:
    return list(itertools.chain(*random_rows(lengths(**changes), count, tokenizer, section)))


@pytest.mark.parametrize("count", [100, 4000, OFFICIAL_ROWS])
def test_lengths_have_the_mean_and_the_tail_that_are_asked_for(count: int) -> None:
    made = lengths().quantiles(count)
    assert np.mean(made) == pytest.approx(870, abs=1)
    assert max(made) == 2048
    assert min(made) >= 64
    assert np.median(made) < 800
    inner = np.log([length for length in made if length < 1500])
    middle, lower = np.median(np.log(made)), np.quantile(np.log(made), 0.1587)
    assert middle - lower == pytest.approx(0.5, abs=0.05 if count < 1000 else 0.01)
    assert inner.size > count / 2


@given(
    low=st.integers(1, 500), mean=st.integers(2, 3000), high=st.integers(3, 4000),
    sigma=st.floats(0.05, 3),
)  # fmt: skip
def test_the_clipped_mean_is_right_wherever_it_lies(
    low: int, mean: int, high: int, sigma: float
) -> None:
    assume(low < mean < high)
    made = Lengths(mean, low, high, sigma, 0).quantiles(4000)
    assert low <= made[0] <= made[-1] <= high
    assert np.mean(made) == pytest.approx(mean, rel=0.01, abs=1)


def test_equal_limits_give_one_length(tokenizer: Any) -> None:
    made = rows(tokenizer, 5, mean_tokens=90, min_tokens=90, max_tokens=90)
    assert [len(row.token_ids) for row in made] == [90] * 5


@pytest.mark.parametrize(
    "changes",
    [
        {"mean_tokens": 64}, {"mean_tokens": 2048}, {"mean_tokens": 3000}, {"sigma": 0.0},
        {"min_tokens": 0}, {"min_tokens": 900},
    ],
)  # fmt: skip
def test_impossible_lengths_are_refused(tokenizer: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(FlowError, match=r"calibration\.synthetic: min_tokens .* must hold"):
        rows(tokenizer, 5, "calibration", **changes)


def test_ids_are_ordinary_and_uniform_after_bos(tokenizer: Any) -> None:
    made = rows(tokenizer, 600)
    assert {row.token_ids[0] for row in made} == {tokenizer.bos_token_id}
    drawn = np.concatenate([row.token_ids[1:] for row in made])
    counts = np.bincount(drawn, minlength=5000)
    assert counts[4996:].sum() == 0
    expected = drawn.size / 4996
    chi_square = float(((counts[:4996] - expected) ** 2 / expected).sum())
    assert abs(chi_square - 4995) < 5 * np.sqrt(2 * 4995)


def test_special_tokens_are_never_drawn_whatever_their_place(small: Any) -> None:
    found = ordinary_ids(small)
    assert not set(found.tolist()) & {small.bos_token_id, small.eos_token_id}
    assert len(found) == len(small) - 2


def test_rows_share_no_more_than_chance(tokenizer: Any) -> None:
    starts = [tuple(row.token_ids[1:4]) for row in rows(tokenizer, 2000)]
    assert len(set(starts)) == 2000


def test_too_few_different_rows_are_refused(tokenizer: Any) -> None:
    with pytest.raises(FlowError, match=r"rows repeat .* raise min_tokens"):
        rows(tokenizer, 600, mean_tokens=2, min_tokens=1, max_tokens=3)


def test_rows_follow_seed_and_section_and_nothing_else(tokenizer: Any) -> None:
    one, same, seed, section = (
        [row.token_ids for row in rows(tokenizer, 300, **options)]
        for options in ({}, {}, {"seed": 1}, {"section": "calibration"})
    )
    assert one == same
    assert not set(map(tuple, one)) & set(map(tuple, seed))
    assert not set(map(tuple, one)) & set(map(tuple, section))


def test_rows_are_the_same_on_every_machine(tokenizer: Any) -> None:
    made = rows(tokenizer, 300)
    body = b"".join(np.array(row.token_ids, "<i4").tobytes() for row in made)
    assert hashlib.sha256(body).hexdigest() == (
        "ae38df39491a33f226344a91baed0ea2f9f2189ef7e7223d7b577bc38d777354"
    )


def test_evaluation_set_says_that_it_is_synthetic(tmp_path: Path, tokenizer: Any) -> None:
    result = build_dataset(tmp_path, synthetic(), tokenizer, template="reference", samples=300)
    table = pq.read_table(tmp_path / SAMPLES).to_pylist()
    assert result["source"] == "synthetic"
    assert result["notes"] == [
        "random tokens: for sizing only, answers mean nothing, not submittable"
    ]
    assert result["synthetic"] == ASKED | {
        "vocabulary": 4996,
        "first_token": "BOS",
        "prompt_text": "a label; the prompts are the token ids",
    }
    assert (result["template"], result["template_sha256"], result["ids"]) == (
        "none", None, "row numbers",
    )  # fmt: skip
    assert result["token_check"]["state"] == "not compared"
    assert result["starts_with_bos"] is True
    sizes = [len(row["token_ids"]) for row in table]
    assert result["input_tokens"] == {
        "min": min(sizes), "mean": round(sum(sizes) / 300, 3), "max": 2048, "total": sum(sizes),
    }  # fmt: skip
    assert result["rows"] == result["unique_ids"] == 300
    assert [row["index"] for row in table] == list(range(300))
    assert [row["input_tokens"] for row in table] == sizes
    assert table[7]["prompt"] == f"{sizes[7]} random tokens, row 7 of seed 0"
    assert len({row["reference"] for row in table}) == 300
    assert all(len(row["reference"].split()) > 40 for row in table)


def test_a_synthetic_set_of_official_size_is_not_official(tmp_path: Path, tokenizer: Any) -> None:
    source = synthetic(mean_tokens=8, min_tokens=4, max_tokens=16)
    result = build_dataset(tmp_path, source, tokenizer, template="reference", samples=OFFICIAL_ROWS)
    assert result["rows"] == OFFICIAL_ROWS
    assert result["is_official_size"] is False


def test_prompt_limit_applies(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(FlowError, match=r"more than dataset\.max_input_tokens = 1000 tokens"):
        build_dataset(
            tmp_path, synthetic(), tokenizer, template="chat", samples=50, max_input_tokens=1000
        )


@pytest.mark.parametrize(
    ("source", "samples", "named"),
    [
        (synthetic(), None, r"dataset\.samples is not set"),
        (Source("synthetic", "dataset", "validation"), 5, r"dataset\.synthetic is not set"),
    ],
)
def test_missing_values_are_refused(
    tmp_path: Path, tokenizer: Any, source: Source, samples: int | None, named: str
) -> None:
    with pytest.raises(FlowError, match=named):
        build_dataset(tmp_path, source, tokenizer, template="reference", samples=samples)


def calibrate(folder: Path, tokenizer: Any, id_list: IdList | None = None) -> dict[str, Any]:
    return build_calibration(
        folder, synthetic("calibration"), tokenizer,
        template="reference", id_list=id_list, samples=64, max_length=1500,
    )  # fmt: skip


def test_calibration_set_is_cut_and_not_allowed_in_closed(tmp_path: Path, tokenizer: Any) -> None:
    result = calibrate(tmp_path, tokenizer)
    sizes = pq.read_table(tmp_path / SAMPLES)["input_tokens"].to_pylist()
    whole = lengths().quantiles(64)
    assert max(sizes) == 1500
    assert result["truncated_rows"] == sum(length > 1500 for length in whole) > 0
    assert result["tokens_total"] + result["tokens_cut"] == sum(whole)
    assert result["allowed_in_closed"] is False
    assert "random tokens are not an MLPerf calibration set" in result["reason"]
    assert (result["source"], result["official_list"]) == ("synthetic", False)
    assert result["synthetic"]["mean_tokens"] == 870


def test_the_official_list_makes_no_random_set_official(tmp_path: Path, tokenizer: Any) -> None:
    official = IdList("list", "0" * 64, ("a",))
    assert any("random tokens" in text for text in closed_obstacles(
        synthetic("calibration"), official, "reference"
    ))  # fmt: skip
    with pytest.raises(FlowError, match="id_list has nothing to choose from"):
        calibrate(tmp_path, tokenizer, official)


def test_lengths_belong_to_the_synthetic_source_only() -> None:
    assert read_lengths({"source": "synthetic", "synthetic": ASKED}) == lengths()
    assert read_lengths({"source": "demo", "synthetic": ASKED}) is None
    assert read_lengths({"source": "synthetic", "synthetic": None}) is None
    assert read_lengths({"source": "demo"}) is None


def test_commands_make_different_sets_from_equal_seeds(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(600, 4096, model)
    files = sorted(path.name for path in model.iterdir())
    write_record(model / "manifest.json", Spec("fetch_model"), {}, files=files)
    asked = {"source": "synthetic", "path": None, "synthetic": ASKED, "samples": 20}
    dataset = asked | {
        "id": "abisee/cnn_dailymail", "revision": "3.0.0", "split": "validation",
        "template": "reference", "max_input_tokens": None,
    }  # fmt: skip
    calibration = asked | {"id_list": None, "id_list_sha256": None, "max_length": 2048}
    prompts = []
    for name, settings in (
        ("prepare_dataset", {"dataset": dataset}),
        ("prepare_calibration", {"calibration": calibration, "dataset": dataset}),
    ):
        output = tmp_path / name / "manifest.json"
        command = [sys.executable, str(SCRIPTS / f"{name}.py")]
        command += ["--spec", Spec(name, settings).canonical()]
        command += ["--model", str(model / "manifest.json"), "--output", str(output)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
        subprocess.run(command, check=True, env=environment, cwd=tmp_path)
        assert verify_record(output).result["source"] == "synthetic"
        table = pq.read_table(output.parent / SAMPLES)
        prompts.append({tuple(ids) for ids in table["token_ids"].to_pylist()})
    assert len(prompts[0]) == len(prompts[1]) == 20
    assert not prompts[0] & prompts[1]
