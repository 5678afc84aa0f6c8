import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import smalltokenizer

from fp8flow.articles import Source
from fp8flow.calibration import (
    OFFICIAL_LIST_SHA256,
    IdList,
    build_calibration,
    closed_obstacles,
    read_id_list,
)
from fp8flow.dataset import SAMPLES
from fp8flow.errors import FlowError
from fp8flow.prompts import load_tokenizer
from fp8flow.records import verify_record, write_record
from fp8flow.spec import Spec, sha256_text

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
ROWS = [
    {"id": f"id{n}", "article": f"Article {n} says: it rained.", "highlights": f"Rain {n} ."}
    for n in range(7)
]
DEMO = Source("demo", "calibration", "train")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(smalltokenizer.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Source("file", "calibration", "train", path=path)


def id_list(*ids: str, sha256: str = "0" * 64) -> IdList:
    return IdList("list.txt", sha256, ids)


def build(folder: Path, source: Source, tokenizer: Any, **options: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    defaults = {"template": "reference", "id_list": None, "samples": 3, "max_length": 2048}
    return build_calibration(folder, source, tokenizer, **(defaults | options))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(folder / SAMPLES).to_pylist())


def test_first_rows_of_the_list_in_list_order_with_duplicates(
    tmp_path: Path, source: Source, tokenizer: Any
) -> None:
    chosen = id_list("id5", "id1", "id5", "id0", "id3")
    result = build(tmp_path / "a", source, tokenizer, id_list=chosen, samples=4)
    rows = rows_of(tmp_path / "a")
    assert [row["id"] for row in rows] == ["id5", "id1", "id5", "id0"]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["token_ids"] == rows[2]["token_ids"] != rows[1]["token_ids"]
    assert "Article 5 says" in rows[0]["prompt"]
    assert rows[0]["token_ids"] == tokenizer.encode(rows[0]["prompt"])
    assert (result["rows"], result["unique_ids"], result["list_rows"]) == (4, 3, 5)
    assert result["duplicate_ids"] == ["id5"]
    assert result["ids_sha256"] == sha256_text("id5\nid1\nid5\nid0\n")


def test_without_a_list_the_source_gives_the_order(
    tmp_path: Path, source: Source, tokenizer: Any
) -> None:
    result = build(tmp_path / "a", source, tokenizer, samples=3)
    assert [row["id"] for row in rows_of(tmp_path / "a")] == ["id0", "id1", "id2"]
    assert result["list_sha256"] is None
    assert result["allowed_in_closed"] is False


def test_ids_that_the_source_lacks_are_named_in_list_order(
    tmp_path: Path, source: Source, tokenizer: Any
) -> None:
    chosen = id_list("x9", "id1", "x3", "x9", "x1", *(f"y{n}" for n in range(5)))
    with pytest.raises(FlowError, match=r"8 of 9 ids .* x9, x3, x1, y0, y1, \.\.\."):
        build(tmp_path / "a", source, tokenizer, id_list=chosen, samples=10)
    build(tmp_path / "b", source, tokenizer, id_list=id_list("id1", "x3"), samples=1)


def test_too_many_samples_are_refused(tmp_path: Path, source: Source, tokenizer: Any) -> None:
    with pytest.raises(FlowError, match=r"samples is 3, but list\.txt has 2 ids"):
        build(tmp_path / "a", source, tokenizer, id_list=id_list("id0", "id1"), samples=3)
    with pytest.raises(FlowError, match=r"samples is 8, but .*rows\.jsonl has 7 rows"):
        build(tmp_path / "a", source, tokenizer, samples=8)


def test_long_sequences_are_cut_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    whole = build(tmp_path / "a", DEMO, tokenizer, samples=24)
    lengths = sorted(row["input_tokens"] for row in rows_of(tmp_path / "a"))
    limit = lengths[20]
    result = build(tmp_path / "b", DEMO, tokenizer, samples=24, max_length=limit)
    pairs = zip(rows_of(tmp_path / "a"), rows_of(tmp_path / "b"), strict=True)
    for full, short in pairs:
        assert short["token_ids"] == full["token_ids"][:limit]
        assert short["input_tokens"] == len(short["token_ids"])
    assert whole["truncated_rows"] == 0
    assert result["truncated_rows"] == sum(length > limit for length in lengths) > 0
    assert result["tokens_cut"] == sum(max(0, length - limit) for length in lengths)
    assert result["tokens_total"] == whole["tokens_total"] - result["tokens_cut"]
    assert result["max_length"] == limit


def test_empty_article_is_refused_only_if_it_is_used(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in [ROWS[0] | {"article": ""}, ROWS[1]]))
    source = Source("file", "calibration", "train", path=path)
    with pytest.raises(FlowError, match=r"line 1 \(id id0\): the article is empty"):
        build(tmp_path / "a", source, tokenizer, id_list=id_list("id1", "id0"), samples=2)
    build(tmp_path / "b", source, tokenizer, id_list=id_list("id1"), samples=1)


def mlcommons(path: Path, numbers: list[int]) -> Source:
    items = [{"input": ROWS[n]["article"], "output": ROWS[n]["highlights"]} for n in numbers]
    path.write_text(json.dumps(items))
    return Source("mlcommons", "calibration", "train", path=path)


def test_mlcommons_file_takes_its_ids_from_the_list(tmp_path: Path, tokenizer: Any) -> None:
    source = mlcommons(tmp_path / "calibration.json", [4, 2, 4])
    result = build(tmp_path / "a", source, tokenizer, id_list=id_list("a", "b", "a"), samples=2)
    rows = rows_of(tmp_path / "a")
    assert [row["id"] for row in rows] == ["a", "b"]
    assert "Article 4 says" in rows[0]["prompt"]
    assert result["rows"] == 2


def test_mlcommons_file_in_other_order_than_the_list_is_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    source = mlcommons(tmp_path / "calibration.json", [4, 2, 3])
    with pytest.raises(FlowError, match="not in list order"):
        build(tmp_path / "a", source, tokenizer, id_list=id_list("a", "b", "a"), samples=2)
    with pytest.raises(FlowError, match=r"has 3 rows, but list\.txt has 2 ids"):
        build(tmp_path / "b", source, tokenizer, id_list=id_list("a", "b"), samples=2)


def test_id_list_file_and_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"b\na\n\nb\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_id_list(str(path), None) == IdList(str(path), digest, ("b", "a", "b"))
    assert read_id_list(str(path), digest.upper()).ids == ("b", "a", "b")
    wrong = "1" * 64
    with pytest.raises(FlowError, match=f"has SHA-256 {digest}, .*is {wrong}"):
        read_id_list(str(path), wrong)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"\n \n", "is empty"), (b"\xff\xfe", "not text")]
)
def test_bad_id_lists_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(FlowError, match=message):
        read_id_list(str(tmp_path / "list.txt"), None)


def test_missing_id_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"cannot read .*no-such"):
        read_id_list(str(tmp_path / "no-such"), None)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "list.txt").write_bytes(b"b\na\n")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path / "web"))

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_id_list_from_a_url_needs_and_checks_its_digest(web: str) -> None:
    digest = hashlib.sha256(b"b\na\n").hexdigest()
    assert read_id_list(f"{web}/list.txt", digest).ids == ("b", "a")
    with pytest.raises(FlowError, match="id_list_sha256 is required"):
        read_id_list(f"{web}/list.txt", None)
    with pytest.raises(FlowError, match=f"{digest}.*{'1' * 64}"):
        read_id_list(f"{web}/list.txt", "1" * 64)
    with pytest.raises(FlowError, match=r"cannot download .*404"):
        read_id_list(f"{web}/other.txt", digest)
    with pytest.raises(FlowError, match="must start with https"):
        read_id_list("file:///etc/hostname", digest)


def hub(hub_id: str = "abisee/cnn_dailymail", revision: str = "3.0.0") -> Source:
    return Source("hub", "calibration", "train", hub_id=hub_id, revision=revision)


def test_only_the_official_list_is_allowed_in_closed() -> None:
    official = id_list("a", sha256=OFFICIAL_LIST_SHA256)
    assert official.is_official
    assert closed_obstacles(hub(), official, "reference") == []
    cases = {
        "not the official one": closed_obstacles(hub(), id_list("a"), "reference"),
        "no id list": closed_obstacles(hub(), None, "reference"),
        "demo": closed_obstacles(DEMO, official, "reference"),
        "template is chat": closed_obstacles(hub(), official, "chat"),
        "is not CNN/DailyMail": closed_obstacles(hub("someone/news"), official, "reference"),
        "2.0.0 is not": closed_obstacles(hub(revision="2.0.0"), official, "reference"),
    }
    for text, reasons in cases.items():
        assert len(reasons) == 1, text
        assert text in reasons[0]


def test_command_uses_the_demo_list(tmp_path: Path) -> None:
    model = smalltokenizer.save_tokenizer(tmp_path / "model")
    files = ["tokenizer.json", "tokenizer_config.json"]
    write_record(model / "manifest.json", Spec("fetch_model"), {}, files=files)
    ids = smalltokenizer.DEMO / "calibration-list.txt"
    calibration = {
        "source": "demo",
        "path": None,
        "id_list": str(ids),
        "id_list_sha256": hashlib.sha256(ids.read_bytes()).hexdigest(),
        "samples": 24,
        "max_length": 300,
    }
    dataset = {"id": "abisee/cnn_dailymail", "revision": "3.0.0", "template": "chat"}
    spec = Spec("prepare_calibration", {"calibration": calibration, "dataset": dataset})
    output = tmp_path / "data" / "calibration" / "manifest.json"
    command = [sys.executable, str(SCRIPTS / "prepare_calibration.py"), "--spec", spec.canonical()]
    command += ["--model", str(model / "manifest.json"), "--output", str(output)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    record = verify_record(output)
    table = pq.read_table(output.parent / SAMPLES)
    assert table.column_names == ["index", "id", "prompt", "token_ids", "input_tokens"]
    assert table["id"].to_pylist() == ids.read_text().split()
    assert max(table["input_tokens"].to_pylist()) == 300
    assert record.result["list_sha256"] == calibration["id_list_sha256"]
    assert record.result["official_list"] is False
    assert record.result["allowed_in_closed"] is False
