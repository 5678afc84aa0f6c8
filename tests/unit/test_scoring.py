import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import smalltokenizer
from rouge_score.rouge_scorer import RougeScorer

from fp8flow.errors import FlowError
from fp8flow.prompts import load_tokenizer
from fp8flow.records import atomic_write_text, verify_record, write_record
from fp8flow.scoring import (
    METRICS,
    Responses,
    SampleScore,
    _load_metric,
    accuracy_text,
    clean_up,
    compare_with_client,
    decode,
    mean_scores,
    read_responses,
    read_run,
    score_all,
    summarize,
)
from fp8flow.sentences import load_splitter
from fp8flow.spec import Spec

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
# How the official checker (v6.1, submission_checker/constants.py) finds the numbers.
CHECKER_PATTERNS = {
    "rouge1": r".*'rouge1':\s+'?([\d.]+)'?.*",
    "rouge2": r".*'rouge2':\s+'?([\d.]+)'?.*",
    "rougeL": r".*'rougeL':\s+'?([\d.]+)'?.*",
    "rougeLsum": r".*'rougeLsum':\s+'?([\d.]+)'?.*",
    "gen_len": r".*'gen_len':\s([\d.]+).*",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smalltokenizer.save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def references() -> list[str]:
    return [row["highlights"] for row in smalltokenizer.demo_rows()]


@pytest.fixture(scope="module")
def answers(tokenizer: Any) -> dict[int, list[int]]:
    """Token ids by sample index: the start of each article, in an order unlike the data set's."""
    rows = smalltokenizer.demo_rows()
    order = [*range(31, -1, -2), *range(0, 31, 2)]
    return {
        n: [
            *tokenizer.encode(f" {rows[n]['article'][: 150 + 12 * n]} ", add_special_tokens=False),
            tokenizer.eos_token_id,
        ]
        for n in order
    }


def entry(index: int, ids: list[int], number: int = 0) -> dict[str, Any]:
    data = np.asarray(ids, dtype="<i4").tobytes().hex().upper()
    return {"seq_id": number, "qsl_idx": index, "data": data, "token_count": len(ids)}


def write_log(path: Path, entries: list[Any]) -> Path:
    path.write_text(json.dumps(entries, indent=1))
    return path


def reference_scores(
    answers: dict[int, list[int]], references: list[str], tokenizer: Any
) -> dict[str, Any]:
    """The official definition, written down a second time with the libraries alone."""
    from nltk.stem import porter
    from rouge_score import rouge_scorer

    assert porter.PorterStemmer().stem("running") == "run"
    split = load_splitter().tokenize
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    characters = 0
    for index, ids in answers.items():
        kept = [i for i in ids if i not in (tokenizer.bos_token_id, tokenizer.eos_token_id)]
        text = tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=False)
        for mark in (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"):
            text = text.replace(f" {mark}", mark)
        text = text.replace(" ' ", "'")
        prediction = "\n".join(split(text.strip()))
        target = "\n".join(split(references[index].strip()))
        characters += len(prediction)
        for name, score in scorer.score(target, prediction).items():
            values[name].append(score.fmeasure)
    means = {name: round(100 * sum(v) / len(v), 4) for name, v in values.items()}
    return means | {"gen_len": characters, "gen_num": len(answers)}


def test_scores_equal_the_definition(
    answers: dict[int, list[int]], references: list[str], tokenizer: Any, model: Path
) -> None:
    responses = Responses({n: np.asarray(ids, dtype="<i4") for n, ids in answers.items()})
    scores = score_all(responses.token_ids, references, model)
    result = summarize(responses, scores, 32)
    expected = reference_scores(answers, references, tokenizer)
    for name in METRICS:
        assert result[name] == pytest.approx(expected[name], abs=1e-4)
        assert 5 < result[name] < 95
    assert result["rougeLsum"] != result["rougeL"]
    assert (result["gen_len"], result["gen_num"]) == (expected["gen_len"], 32)
    assert (result["state"], result["reason"]) == ("complete", None)
    assert list(scores) == list(answers)


def test_more_processes_give_the_same_scores(
    answers: dict[int, list[int]], references: list[str], model: Path
) -> None:
    many = {n: np.asarray(answers[n % 32], dtype="<i4") for n in range(150)}
    targets = [references[n % 32] for n in range(150)]
    one = score_all(many, targets, model, processes=1)
    assert score_all(many, targets, model, processes=2) == one
    assert len(one) == 150


@pytest.mark.parametrize("use_stemmer", [True, False])
def test_metric_equals_rouge_score_bit_by_bit(tmp_path: Path, use_stemmer: bool) -> None:
    rows = smalltokenizer.demo_rows()
    odd = [
        "",
        " ",
        "Running runners ran; dying, lying: skies!",
        "na\u00efve \u4e2d\u6587 x2 RUNNING",
    ]
    split = load_splitter().tokenize
    targets = ["\n".join(split(row["highlights"])) for row in rows] + odd
    predictions = ["\n".join(split(row["article"][:900])) for row in rows] + odd[::-1]
    metric = _load_metric(tmp_path)
    found = [
        metric.compute(predictions=predictions, references=targets, use_stemmer=use_stemmer)
        for _ in range(2)  # the second time all stems are known
    ]
    scorer = RougeScorer(list(METRICS), use_stemmer=use_stemmer)
    expected = [scorer.score(*pair) for pair in zip(targets, predictions, strict=True)]
    for name in METRICS:
        values = [score[name].fmeasure for score in expected]
        assert found[0][name] == found[1][name] == values
        assert len(set(values)) > 20


def test_stemmer_is_used(tokenizer: Any, model: Path) -> None:
    ids = tokenizer.encode("the runner was running", add_special_tokens=False)
    scores = score_all({0: np.asarray(ids)}, ["a runners runs"], model)
    assert scores[0].fmeasures[0] == pytest.approx(2 * 2 / (4 + 3))


def test_special_tokens_are_left_out_and_texts_are_stripped(tokenizer: Any, model: Path) -> None:
    ids = [tokenizer.bos_token_id, *tokenizer.encode(" It rained. It stopped.\n")[1:]]
    scores = score_all({0: np.asarray([*ids, tokenizer.eos_token_id])}, ["It rained."], model)
    assert scores[0].text == " It rained. It stopped.\n"
    assert scores[0].characters == len("It rained.\nIt stopped.")


def test_spaces_before_punctuation_go_as_in_the_reference(tmp_path: Path, tokenizer: Any) -> None:
    ids = tokenizer.encode("It rained . It did n't stop !", add_special_tokens=False)
    (text,) = decode(tokenizer, [ids])
    assert text == "It rained . It did n't stop !"
    assert clean_up(tokenizer, text) == "It rained. It didn't stop!"
    other = smalltokenizer.save_tokenizer(tmp_path, clean_up_tokenization_spaces=False)
    assert clean_up(load_tokenizer(other), text) == text


def test_counts_of_missing_empty_and_duplicate_responses(
    tmp_path: Path, tokenizer: Any, references: list[str], model: Path
) -> None:
    hello = tokenizer.encode("It rained.", add_special_tokens=False)
    blank = [*tokenizer.encode(" \n", add_special_tokens=False), tokenizer.eos_token_id]
    entries = [entry(3, hello), entry(1, []), entry(3, blank), entry(0, blank), entry(4, hello)]
    responses = read_responses(write_log(tmp_path / "log.json", [*entries, entry(3, blank)]), 6)
    assert list(responses.token_ids) == [3, 1, 0, 4]
    assert responses.token_ids[3].tolist() == hello
    scores = score_all(responses.token_ids, references, model)
    result = summarize(responses, scores, 6)
    assert result["responses"] == {
        "expected": 6,
        "scored": 4,
        "missing": 2,
        "empty": 2,
        "duplicates": 2,
    }
    assert result["listed"]["missing"] == [2, 5]
    assert result["listed"]["empty"] == [0, 1]
    assert result["listed"]["duplicates"] == [3, 3]
    assert (result["state"], result["gen_num"]) == ("incomplete", 4)
    assert result["reason"] == "2 of 6 responses are missing"
    assert result["gen_len"] == 2 * len("It rained.")
    # An empty response counts as zero; a missing one is not in the mean, as in the reference.
    only = mean_scores([scores[3], scores[4]])
    assert result["rouge1"] == pytest.approx(only["rouge1"] / 2, abs=1e-4)


def test_no_response_is_no_number() -> None:
    result = summarize(Responses(), {}, 3)
    assert result["state"] == "failed"
    assert [result[name] for name in METRICS] == [None] * 4
    assert result["gen_len"] is None
    assert result["responses"]["missing"] == 3
    text = accuracy_text(result)
    assert "nan" not in text
    assert not any(re.match(pattern, text) for pattern in CHECKER_PATTERNS.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"qsl_idx": 0, "data": "01000000"},', "cut or damaged"),
        ('{"qsl_idx": 0}', "must be a JSON array"),
        ('[{"qsl_idx": 0}]', "entry 0 is no LoadGen response"),
        ('[{"qsl_idx": 0, "data": "xy"}]', "entry 0 is no LoadGen response"),
        ("[5]", "entry 0 is no LoadGen response"),
        ('[{"qsl_idx": 0, "data": "010000"}]', "3 bytes, which are no int32"),
        ('[{"qsl_idx": 2, "data": "01000000"}]', "sample 2, but the data set has 2"),
        ('[{"qsl_idx": -1, "data": "01000000"}]', "sample -1"),
        ('[{"qsl_idx": 0, "data": "FFFFFFFF"}]', "negative token id -1"),
    ],
)
def test_bad_logs_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "log.json").write_text(content)
    with pytest.raises(FlowError, match=message):
        read_responses(tmp_path / "log.json", 2)


def test_log_of_a_failed_run_is_a_result_not_an_error(tmp_path: Path) -> None:
    failed = {"state": "failed", "reason": "server died"}
    path = tmp_path / "log.json"
    with pytest.raises(FlowError, match="left no responses"):
        read_run(path, 2, {"state": "complete"})
    responses, problems = read_run(path, 2, failed)
    assert responses.token_ids == {}
    assert summarize(responses, {}, 2, problems)["state"] == "failed"
    assert problems[0] == "the accuracy run is failed: server died"
    write_log(path, [entry(0, [5]), entry(1, [6])])
    responses, problems = read_run(path, 2, failed)
    score = SampleScore("a", 1, (0.1, 0.2, 0.3, 0.4))
    result = summarize(responses, {0: score, 1: score}, 2, problems)
    assert result["state"] == "incomplete"
    assert "server died" in result["reason"]


def test_accuracy_text_is_what_the_checker_reads() -> None:
    score = SampleScore("a", 8_167_644, (0.387792123, 0.15907499, 0.2449570, 0.357930))
    result = summarize(Responses({0: np.asarray([5])}), {0: score}, 1)
    text = accuracy_text(result)
    assert text == (
        "{'rouge1': '38.7792', 'rouge2': '15.9075', 'rougeL': '24.4957', 'rougeLsum': '35.793', "
        "'gen_len': 8167644, 'gen_num': 1}\n"
    )
    assert ast.literal_eval(text)["gen_len"] == 8167644
    found = {}
    for name, pattern in CHECKER_PATTERNS.items():
        match = re.match(pattern, text)
        assert match, name
        found[name] = float(match[1])
    assert found == {name: result[name] for name in found}
    json.dumps(result)  # plain JSON types only


def test_client_outputs_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "outputs.parquet"
    ids = [[5, 6], [7], [8], [9]]
    rows = [
        {"index": 0, "token_ids": ids[0], "text": " same "},
        {"index": 1, "token_ids": [7, 2], "text": "same"},
        {"index": 2, "token_ids": ids[2], "text": "other"},
    ]
    layout = pa.schema(
        [("index", pa.int64()), ("token_ids", pa.list_(pa.int32())), ("text", pa.string())]
    )
    pq.write_table(pa.Table.from_pylist(rows, layout), path)
    responses = Responses({n: np.asarray(i) for n, i in enumerate(ids)})
    scores = {n: SampleScore("same", 4, (0.0,) * 4) for n in range(4)}
    assert compare_with_client(path, responses, scores) == {
        "compared": 3,
        "token_mismatches": 1,
        "text_mismatches": 1,
        "not_in_outputs": 1,
        "first_mismatches": [1, 2],
    }
    missing = compare_with_client(tmp_path / "no-such.parquet", responses, scores)
    assert missing == {"compared": 0, "reason": "no-such.parquet is missing"}


def prepared_run(
    folder: Path, answers: dict[int, list[int]], references: list[str], tokenizer: Any
) -> dict[str, Path]:
    """Write the records that the command reads; sample 7 has no response."""
    model = smalltokenizer.save_tokenizer(folder / "model")
    names = ["tokenizer.json", "tokenizer_config.json"]
    write_record(model / "manifest.json", Spec("fetch_model"), {}, files=names)
    data, run = folder / "data", folder / "run"
    attempt = run / "attempts" / "2"
    data.mkdir()
    attempt.mkdir(parents=True)
    pq.write_table(pa.table({"reference": references}), data / "samples.parquet")
    write_record(data / "manifest.json", Spec("prepare_dataset"), {}, files=["samples.parquet"])
    kept = {n: ids for n, ids in answers.items() if n != 7}
    write_log(attempt / "mlperf_log_accuracy.json", [entry(n, ids) for n, ids in kept.items()])
    rows = [
        {"index": n, "token_ids": ids, "text": decode(tokenizer, [ids])[0]}
        for n, ids in kept.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), attempt / "outputs.parquet")
    result = {"mode": "accuracy", "state": "complete", "attempt": 2, "scenario": "Server"}
    names = ["attempts/2/mlperf_log_accuracy.json", "attempts/2/outputs.parquet"]
    write_record(run / "run.json", Spec("run_accuracy"), result, files=names)
    return {
        "--model": model / "manifest.json",
        "--dataset": data / "manifest.json",
        "--run": run / "run.json",
        "--output": run / "accuracy.json",
    }


def test_command_works_offline_and_leaves_nothing_behind(
    tmp_path: Path, answers: dict[int, list[int]], references: list[str], tokenizer: Any
) -> None:
    paths = prepared_run(tmp_path, answers, references, tokenizer)
    home = tmp_path / "home"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
        "NLTK_DATA": str(tmp_path / "no-such"),
        "TMPDIR": str(tmp_path / "scratch"),
    }
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, str(SCRIPTS / "score_accuracy.py")]
    command += ["--spec", Spec("score_accuracy").canonical()]
    command += [str(part) for pair in paths.items() for part in pair]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    record = verify_record(paths["--output"])
    result = record.result
    assert sorted(record.data["files"]) == ["accuracy.txt", "accuracy_samples.parquet"]
    assert result["responses"]["missing"] == 1
    assert (result["state"], result["scenario"]) == ("incomplete", "Server")
    assert result["client_check"] == {
        "compared": 31,
        "token_mismatches": 0,
        "text_mismatches": 0,
        "not_in_outputs": 0,
        "first_mismatches": [],
    }
    kept = {n: ids for n, ids in answers.items() if n != 7}
    expected = reference_scores(kept, references, tokenizer)
    text = (paths["--run"].parent / "accuracy.txt").read_text()
    assert ast.literal_eval(text) == {
        name: f"{value}" if name in METRICS else value for name, value in expected.items()
    }
    rows = pq.read_table(paths["--run"].parent / "accuracy_samples.parquet").to_pylist()
    assert [row["index"] for row in rows] == list(range(32))
    assert [row["state"] for row in rows].count("missing") == 1
    assert rows[7]["rouge1"] is None
    assert [row["output_tokens"] for row in rows if row["index"] != 7] == [
        len(kept[n]) for n in sorted(kept)
    ]
    scored = [row["rougeLsum"] for row in rows if row["rougeLsum"] is not None]
    assert round(100 * float(np.mean(scored)), 4) == result["rougeLsum"]
    assert not home.exists()
    assert not any((tmp_path / "scratch").iterdir())

    atomic_write_text(paths["--run"].parent / "attempts" / "2" / "mlperf_log_accuracy.json", "[]")
    again = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 1
    assert "mlperf_log_accuracy.json has" in again.stderr
