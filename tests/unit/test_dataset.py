import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import smalltokenizer
from hypothesis import given
from hypothesis import strategies as st

from fp8flow.articles import Source, json_items, text_id
from fp8flow.dataset import SAMPLES, build_dataset
from fp8flow.errors import FlowError
from fp8flow.prompts import load_tokenizer, tokenizer_sha256
from fp8flow.records import verify_record, write_record
from fp8flow.spec import Spec, sha256_text

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
ROWS = [
    {"id": f"id{n}", "article": f"Article {n} says: it rained.", "highlights": f"Rain {n} ."}
    for n in range(7)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(smalltokenizer.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def local(path: Path, kind: str = "file") -> Source:
    return Source(kind=kind, section="dataset", split="validation", path=path)


def build(folder: Path, source: Source, tokenizer: Any, **options: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return build_dataset(folder, source, tokenizer, **({"template": "reference"} | options))


def test_demo_set(tmp_path: Path, tokenizer: Any) -> None:
    result = build(tmp_path, Source("demo", "dataset", "validation"), tokenizer, template="chat")
    table = pq.read_table(tmp_path / SAMPLES)
    demo = smalltokenizer.demo_rows()
    assert table.schema.equals(
        pa.schema(
            [
                ("index", pa.int64()),
                ("id", pa.string()),
                ("prompt", pa.string()),
                ("token_ids", pa.list_(pa.int32())),
                ("input_tokens", pa.int32()),
                ("reference", pa.string()),
            ]
        )
    )
    rows = table.to_pylist()
    assert [row["index"] for row in rows] == list(range(32))
    assert [row["id"] for row in rows] == [row["id"] for row in demo]
    assert [row["reference"] for row in rows] == [row["highlights"] for row in demo]
    assert all(d["article"] in row["prompt"] for row, d in zip(rows, demo, strict=True))
    lengths = [len(row["token_ids"]) for row in rows]
    assert [row["input_tokens"] for row in rows] == lengths
    assert result["input_tokens"] == {
        "min": min(lengths),
        "mean": round(sum(lengths) / 32, 3),
        "max": max(lengths),
        "total": sum(lengths),
    }
    assert result["rows"] == result["unique_ids"] == 32
    assert result["source"] == "demo"
    assert result["is_official_size"] is False
    assert result["ids_sha256"] == sha256_text("".join(f"{row['id']}\n" for row in demo))
    assert result["starts_with_bos"] is True


def test_jsonl_and_parquet_give_the_same_samples(tmp_path: Path, tokenizer: Any) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    one = build(tmp_path / "a", local(write_jsonl(tmp_path / "rows.jsonl", ROWS)), tokenizer)
    two = build(tmp_path / "b", local(tmp_path / "rows.parquet"), tokenizer)
    assert pq.read_table(tmp_path / "a" / SAMPLES) == pq.read_table(tmp_path / "b" / SAMPLES)
    assert one["prompt_sha256"] == two["prompt_sha256"]
    assert one["token_ids_sha256"] == two["token_ids_sha256"]
    assert one["file_sha256"] != two["file_sha256"]


def test_digests_see_order_and_content(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    first = build(tmp_path / "a", local(write_jsonl(path, ROWS)), tokenizer)
    swapped = build(tmp_path / "b", local(write_jsonl(path, ROWS[::-1])), tokenizer)
    for key in ("ids_sha256", "prompt_sha256", "token_ids_sha256"):
        assert first[key] != swapped[key]


def test_more_rows_than_a_batch_keep_their_order(tmp_path: Path, tokenizer: Any) -> None:
    rows = [ROWS[0] | {"id": str(n)} for n in range(600)]
    result = build(tmp_path / "a", local(write_jsonl(tmp_path / "r.jsonl", rows)), tokenizer)
    table = pq.read_table(tmp_path / "a" / SAMPLES)
    assert table["index"].to_pylist() == list(range(600))
    assert table["id"].to_pylist() == [str(n) for n in range(600)]
    assert result["rows"] == 600


def test_samples_takes_the_first_rows_and_reads_no_further(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:3])
    path.write_text(path.read_text() + "this is not JSON\n")
    result = build(tmp_path / "a", local(path), tokenizer, samples=3)
    assert result["rows"] == 3
    with pytest.raises(FlowError, match=r"rows\.jsonl, line 4 is not JSON"):
        build(tmp_path / "b", local(path), tokenizer)


def test_more_samples_than_rows_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(FlowError, match=r"dataset\.samples is 8, but .*rows\.jsonl has 7 rows"):
        build(tmp_path / "a", local(path), tokenizer, samples=8)


def test_long_prompts_are_refused_by_name_and_never_cut(tmp_path: Path, tokenizer: Any) -> None:
    rows = [*ROWS, {"id": "long", "article": "It rained. " * 200, "highlights": "Rain ."}]
    source = local(write_jsonl(tmp_path / "rows.jsonl", rows))
    whole = build(tmp_path / "a", source, tokenizer)
    longest, second = whole["input_tokens"]["max"], 100
    assert longest > second
    with pytest.raises(FlowError, match=rf"row 7 \(id long\): {longest}"):
        build(tmp_path / "b", source, tokenizer, max_input_tokens=longest - 1)
    same = build(tmp_path / "c", source, tokenizer, max_input_tokens=longest)
    assert same["token_ids_sha256"] == whole["token_ids_sha256"]


def test_duplicate_ids_are_kept_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    source = local(write_jsonl(tmp_path / "rows.jsonl", [*ROWS, ROWS[2]]))
    result = build(tmp_path / "a", source, tokenizer)
    assert (result["rows"], result["unique_ids"]) == (8, 7)
    assert result["duplicate_ids"] == ["id2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "x", "highlights": "Rain ."}, "line 8 has no 'article'; it has: id, highlights"),
        ({"id": "x", "article": "Rain."}, "line 8 has no 'highlights'"),
        ({"article": "Rain.", "highlights": "Rain ."}, "line 8: 'id' must be"),
        ({"id": True, "article": "a", "highlights": "b"}, "line 8: 'id' must be"),
        ({"id": "x", "article": 5, "highlights": "b"}, "'article' must be text, not int"),
        ({"id": "x", "article": " \n", "highlights": "b"}, r"\(id x\): the article is empty"),
        ({"id": "x", "article": "a", "highlights": " "}, r"\(id x\): the highlights are empty"),
        ({"id": "x", "article": "a\ud800", "highlights": "b"}, "half a surrogate pair"),
        (["x"], "line 8 must be an object"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, tokenizer: Any, row: Any, message: str) -> None:
    source = local(write_jsonl(tmp_path / "rows.jsonl", [*ROWS, row]))
    with pytest.raises(FlowError, match=message):
        build(tmp_path / "a", source, tokenizer)


def test_whole_number_ids_become_text(tmp_path: Path, tokenizer: Any) -> None:
    build(tmp_path, local(write_jsonl(tmp_path / "r.jsonl", [ROWS[0] | {"id": 12}])), tokenizer)
    assert pq.read_table(tmp_path / SAMPLES)["id"].to_pylist() == ["12"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"", r"rows\.jsonl is empty"),
        ("rows.jsonl", b"\n\n", "has no rows"),
        ("rows.jsonl", b"\xff\xfe{}", "not UTF-8"),
        ("rows.parquet", b"PAR1 no", "not a parquet file"),
        ("rows.csv", b"id,article", r"allowed: \.parquet, \.jsonl"),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, tokenizer: Any, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FlowError, match=message):
        build(tmp_path / "a", local(tmp_path / name), tokenizer)


def test_missing_file_and_missing_path_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(FlowError, match="no-such is not a file"):
        build(tmp_path / "a", local(tmp_path / "no-such"), tokenizer)
    with pytest.raises(FlowError, match=r"dataset\.path"):
        build(tmp_path / "a", Source("mlcommons", "dataset", "validation"), tokenizer)


def test_parquet_without_a_column_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    table = pa.Table.from_pylist(ROWS).drop_columns(["highlights"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(FlowError, match=r"lacks the column\(s\) highlights; it has: id, article"):
        build(tmp_path / "a", local(tmp_path / "rows.parquet"), tokenizer)


def test_parquet_null_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    pq.write_table(
        pa.Table.from_pylist([*ROWS, ROWS[0] | {"article": None}]), tmp_path / "r.parquet"
    )
    with pytest.raises(FlowError, match=r"row 7: 'article' must be text, not NoneType"):
        build(tmp_path / "a", local(tmp_path / "r.parquet"), tokenizer)


def mlcommons_file(path: Path, tokenizer: Any, rows: list[dict[str, str]]) -> Path:
    template = (
        "Summarize the following news article in 128 tokens. Please output the summary only, "
        "without any other text.\n\nArticle:\n{input}\n\nSummary:"
    )
    items = [
        {
            "instruction": {"llama": template},
            "input": row["article"],
            "tok_input": tokenizer.encode(template.format_map({"input": row["article"]})),
            "output": row["highlights"],
        }
        for row in rows
    ]
    path.write_text(json.dumps(items, indent=4, ensure_ascii=False), encoding="utf-8")
    return path


def test_mlcommons_file_agrees_with_the_other_sources(tmp_path: Path, tokenizer: Any) -> None:
    demo = smalltokenizer.demo_rows()
    path = mlcommons_file(tmp_path / "cnn_eval.json", tokenizer, demo)
    result = build(tmp_path / "a", local(path, "mlcommons"), tokenizer)
    other = build(tmp_path / "b", Source("demo", "dataset", "validation"), tokenizer)
    assert result["prompt_sha256"] == other["prompt_sha256"]
    assert result["token_ids_sha256"] == other["token_ids_sha256"]
    assert result["token_check"] == {
        "state": "identical",
        "compared": 32,
        "mismatches": 0,
        "first_mismatch": None,
    }
    assert result["ids"] == "SHA-1 of the article"
    ids = pq.read_table(tmp_path / "a" / SAMPLES)["id"].to_pylist()
    assert ids == [text_id(row["article"]) for row in demo]
    assert other["token_check"]["state"] == "not compared"


def test_mlcommons_mismatch_is_reported_with_its_place(tmp_path: Path, tokenizer: Any) -> None:
    path = mlcommons_file(tmp_path / "cnn_eval.json", tokenizer, ROWS)
    items = json.loads(path.read_text())
    items[3]["tok_input"][5] += 1
    items[6]["tok_input"].pop()
    path.write_text(json.dumps(items))
    check = build(tmp_path / "a", local(path, "mlcommons"), tokenizer)["token_check"]
    assert (check["state"], check["compared"], check["mismatches"]) == ("different", 7, 2)
    assert (check["first_mismatch"]["index"], check["first_mismatch"]["position"]) == (3, 5)
    assert check["first_mismatch"]["source"][0] == check["first_mismatch"]["ours"][0] + 1
    chat = build(tmp_path / "b", local(path, "mlcommons"), tokenizer, template="chat")
    assert chat["token_check"]["state"] == "not compared"


def test_mlcommons_file_without_token_ids(tmp_path: Path, tokenizer: Any) -> None:
    items = [{"input": row["article"], "output": row["highlights"]} for row in ROWS]
    (tmp_path / "eval.json").write_text(json.dumps(items))
    result = build(tmp_path / "a", local(tmp_path / "eval.json", "mlcommons"), tokenizer)
    assert result["rows"] == 7
    assert result["token_check"]["state"] == "not compared"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "a"}', "must be a JSON array"),
        ('[{"input": "a", "output": "b"}, {"input": "c"', "item 1 is not JSON"),
        ('[{"input": "a", "output": "b"}', "after item 0"),
        ('[{"input": "a", "output": "b"} {"input": "c"}]', "after item 0"),
        ('[{"output": "b"}]', "item 0 has no 'input'"),
        ('[{"input": "a", "output": "b", "tok_input": [1, "x"]}]', "list of token ids"),
        ("[5]", "item 0 must be an object"),
        ("[]", "has no rows"),
    ],
)
def test_bad_mlcommons_files_are_refused(
    tmp_path: Path, tokenizer: Any, text: str, message: str
) -> None:
    (tmp_path / "eval.json").write_text(text)
    with pytest.raises(FlowError, match=message):
        build(tmp_path / "a", local(tmp_path / "eval.json", "mlcommons"), tokenizer)


@given(
    items=st.lists(
        st.dictionaries(st.text(max_size=3), st.lists(st.integers()) | st.text()), max_size=6
    ),
    indent=st.none() | st.integers(0, 4),
    chunk=st.integers(1, 40),
)
def test_json_items_equals_json_load(items: list[Any], indent: int | None, chunk: int) -> None:
    import tempfile
    from unittest import mock

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.json"
        path.write_text(json.dumps(items, indent=indent), encoding="utf-8")
        with mock.patch("fp8flow.articles._CHUNK_CHARACTERS", chunk):
            assert list(json_items(path)) == items


def test_json_items_holds_only_a_part_of_the_file(tmp_path: Path) -> None:
    item = {"input": "x" * 10_000, "tok_input": list(range(2000)), "output": "y"}
    path = tmp_path / "items.json"
    path.write_text(json.dumps([item] * 1500, indent=4))
    assert path.stat().st_size > 40_000_000
    tracemalloc.start()
    try:
        count = sum(1 for _ in json_items(path))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 1500
    assert peak_bytes < 12_000_000


def hub_folder(folder: Path) -> Path:
    """Return a data set folder that ``load_dataset`` reads like a hub repository."""
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "validation.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), folder / "train.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: 3.0.0\n  data_files:\n"
        "  - split: validation\n    path: validation.parquet\n"
        "  - split: train\n    path: train.parquet\n---\n"
    )
    return folder


def hub(folder: Path, **changes: str) -> Source:
    named = {"split": "validation", "hub_id": str(folder), "revision": "3.0.0"} | changes
    return Source(kind="hub", section="dataset", **named)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("hub_cache")
def test_hub_rows_equal_file_rows(tmp_path: Path, tokenizer: Any) -> None:
    folder = hub_folder(tmp_path / "hub")
    result = build(tmp_path / "a", hub(folder), tokenizer)
    other = build(tmp_path / "b", local(write_jsonl(tmp_path / "rows.jsonl", ROWS)), tokenizer)
    assert result["token_ids_sha256"] == other["token_ids_sha256"]
    assert (result["revision"], result["split"]) == ("3.0.0", "validation")


@pytest.mark.usefixtures("hub_cache")
def test_hub_errors_name_the_data_set_and_a_way_out(tmp_path: Path, tokenizer: Any) -> None:
    folder = hub_folder(tmp_path / "hub")
    with pytest.raises(FlowError, match=r"configuration 2\.0\.0.*cannot be loaded"):
        build(tmp_path / "a", hub(folder, revision="2.0.0"), tokenizer)
    with pytest.raises(FlowError, match="source: file or mlcommons"):
        build(tmp_path / "a", hub(folder, split="test"), tokenizer)


def test_command_writes_a_verified_product(tmp_path: Path) -> None:
    model = smalltokenizer.save_tokenizer(tmp_path / "model")
    files = ["tokenizer.json", "tokenizer_config.json"]
    write_record(model / "manifest.json", Spec("fetch_model"), {}, files=files)
    dataset = {
        "source": "demo",
        "path": None,
        "id": "abisee/cnn_dailymail",
        "revision": "3.0.0",
        "split": "validation",
        "template": "reference",
        "samples": 4,
        "max_input_tokens": None,
    }
    spec = Spec("prepare_dataset", {"dataset": dataset})
    output = tmp_path / "data" / "validation" / "manifest.json"
    command = [sys.executable, str(SCRIPTS / "prepare_dataset.py"), "--spec", spec.canonical()]
    command += ["--model", str(model / "manifest.json"), "--output", str(output)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    record = verify_record(output)
    assert list(record.data["files"]) == [SAMPLES]
    assert record.result["rows"] == 4
    assert record.result["tokenizer_sha256"] == tokenizer_sha256(model)
    assert pq.read_table(output.parent / SAMPLES).num_rows == 4

    (model / "tokenizer.json").write_text("{}")
    again = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 1
    assert "tokenizer.json" in again.stderr
    assert verify_record(output).digest == record.digest
