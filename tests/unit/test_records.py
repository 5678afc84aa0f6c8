"""Records: whole or not at all, verified when read, attempts kept."""

from __future__ import annotations

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


def test_edited_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_record(path, SPEC, {"tokens_per_s": 10.0})
    path.write_text(path.read_text().replace("10.0", "99.0"))
    with pytest.raises(FlowError, match="digest"):
        verify_record(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other"}'])
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
