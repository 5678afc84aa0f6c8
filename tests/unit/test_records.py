"""Records: whole or not at all, verified when read, attempts kept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fp8flow.errors import FlowError
from fp8flow.records import (
    build_product,
    new_attempt,
    read_record,
    verify_record,
    write_record,
)
from fp8flow.spec import Spec

SPEC = Spec("quantize", {"a": 1}, "code", {})


def make(folder: Path, text: str = "weights") -> Path:
    manifest = folder / "manifest.json"
    with build_product(manifest, SPEC) as product:
        (product.folder / "sub").mkdir()
        (product.folder / "sub" / "w.bin").write_text(text)
        product.result["rows"] = 3
    return manifest


def test_product_round_trip(tmp_path: Path) -> None:
    record = verify_record(make(tmp_path / "p"))
    assert record.result == {"rows": 3}
    assert record.spec == SPEC.as_dict()
    assert record.data["files"]["sub/w.bin"]["bytes"] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_equal_content_has_equal_digest(tmp_path: Path) -> None:
    one, two = read_record(make(tmp_path / "1")), read_record(make(tmp_path / "2"))
    other = read_record(make(tmp_path / "3", "changed"))
    assert one.digest == two.digest != other.digest


def test_failure_keeps_the_older_product_and_leaves_no_half_one(tmp_path: Path) -> None:
    manifest = make(tmp_path / "p")
    with pytest.raises(RuntimeError), build_product(manifest, SPEC) as product:
        (product.folder / "half").write_text("x")
        raise RuntimeError
    assert verify_record(manifest).result == {"rows": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_a_folder_with_foreign_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "mine.txt").write_text("mine")
    with pytest.raises(FlowError, match=r"did not make \(keep/mine\.txt\)"):
        make(tmp_path)
    assert (tmp_path / "keep" / "mine.txt").read_text() == "mine"
    product = build_product(tmp_path / "new" / "out.json", SPEC)
    with pytest.raises(FlowError, match=r"must be FOLDER/manifest\.json"), product:
        pass


def test_own_product_is_replaced_without_its_manifest_but_not_with_additions(
    tmp_path: Path,
) -> None:
    manifest = make(tmp_path / "p")
    write_record(tmp_path / "p" / "verdict.json", Spec("validate", {}), {"ok": True})
    manifest.unlink()
    verify_record(make(tmp_path / "p", "again"))
    (tmp_path / "p" / "notes.txt").write_text("mine")
    with pytest.raises(FlowError, match=r"notes\.txt"):
        make(tmp_path / "p", "third")


def test_product_of_another_rule_is_not_replaced(tmp_path: Path) -> None:
    make(tmp_path / "p")
    product = build_product(tmp_path / "p" / "manifest.json", Spec("fetch_model", {}))
    with pytest.raises(FlowError, match="fetch_model did not make"), product:
        pass


def test_folder_that_snakemake_made_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    verify_record(make(tmp_path / "p"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.write_text("weightz"), "other content"),
        (lambda f: f.write_text("longer than before"), "18 bytes, not 7"),
        (lambda f: f.unlink(), "is missing"),
    ],
)
def test_changed_files_are_refused(tmp_path: Path, change, message: str) -> None:
    manifest = make(tmp_path / "p")
    change(tmp_path / "p" / "sub" / "w.bin")
    with pytest.raises(FlowError, match=message):
        verify_record(manifest)


@pytest.mark.parametrize("files", [[], ["queries.parquet"]])
@pytest.mark.parametrize(("old", "new"), [("10.0", "99.0"), ('"a": 1', '"a": 2')])
def test_edited_record_is_refused(tmp_path: Path, files: list[str], old: str, new: str) -> None:
    path = tmp_path / "run.json"
    (tmp_path / "queries.parquet").write_text("raw")
    write_record(path, SPEC, {"tokens_per_s": 10.0}, files=files)
    verify_record(path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FlowError, match="seal does not match"):
        verify_record(path)


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftovers_of_killed_jobs_are_swept(tmp_path: Path) -> None:
    dead, alive = dead_pid(), os.getpid()
    for pid in (dead, alive):
        (tmp_path / f".p.{pid}.making").mkdir()
    (tmp_path / f".p.{alive}.making").rename(tmp_path / ".p.1.making")
    make(tmp_path / "p")
    assert sorted(x.name for x in tmp_path.iterdir()) == [".p.1.making", "p"]


def test_product_set_aside_by_a_killed_job_comes_back(tmp_path: Path) -> None:
    make(tmp_path / "p")
    (tmp_path / "p").rename(tmp_path / f".p.{dead_pid()}.old")
    with pytest.raises(RuntimeError), build_product(tmp_path / "p" / "manifest.json", SPEC):
        raise RuntimeError
    verify_record(tmp_path / "p" / "manifest.json")


def test_file_added_to_a_product_is_refused(tmp_path: Path) -> None:
    manifest = make(tmp_path / "p")
    (tmp_path / "p" / "sub" / "adapter.json").write_text("{}")
    with pytest.raises(FlowError, match=r"sub/adapter\.json was added"):
        verify_record(manifest)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other"}', '{"schema": "fp8flow/1"}'])
def test_unreadable_record_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(FlowError, match=r"r\.json"):
        read_record(path)


def test_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_record(tmp_path / "r.json", SPEC, {"x": float("nan")})


def test_attempts_are_numbered_and_kept(tmp_path: Path) -> None:
    first, second = new_attempt(tmp_path), new_attempt(tmp_path)
    (first / "log").write_text("kept")
    assert (first.name, second.name, new_attempt(tmp_path).name) == ("1", "2", "3")
    assert (first / "log").read_text() == "kept"
