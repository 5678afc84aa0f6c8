"""Hash of the code that computes a product: syntax trees, so layout and comments do not count.

Starting from a rule's programs, every ``fp8flow`` module that is imported, also inside functions,
is followed. Infrastructure that cannot change a product's content is left out by one named list.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from fp8flow.errors import FlowError

PACKAGE = "fp8flow"

# How work is started, logged, recorded and cleaned up; not what comes out of it.
INFRASTRUCTURE = frozenset(
    {
        "fp8flow.accelerator",
        "fp8flow.cli",
        "fp8flow.errors",
        "fp8flow.guard",
        "fp8flow.launch",
        "fp8flow.log",
        "fp8flow.ports",
        "fp8flow.records",
        "fp8flow.server",
        "fp8flow.tools",
    }
)


def module_file(root: Path, module: str) -> Path | None:
    """Return the file of a package module below ``root``, or None if there is none."""
    base = root.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _module_name(root: Path, path: Path) -> str | None:
    relative = path.relative_to(root)
    if relative.parts[0] != PACKAGE:
        return None
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or not node.module:
                raise FlowError(f"line {node.lineno}: import modules by their full name")
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _with_parents(name: str) -> list[str]:
    """Return a module of the package and the sub-packages it lies in; the package's own
    ``__init__`` holds the version and no code."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return []
    return [".".join(parts[:end]) for end in range(2, len(parts) + 1)]


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _tokens(node: object) -> Iterator[str]:
    """Yield a text form of a syntax tree that is the same in every Python version used."""
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if name in ("type_comment", "type_ignores", "kind") or value in (None, []):
                continue
            if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
                value = value[1:]
            yield f".{name}"
            yield from _tokens(value)
    elif isinstance(node, list):
        yield f"[{len(node)}"
        for item in node:
            yield from _tokens(item)
    else:
        yield repr(node)


@cache
def _parsed(source: bytes) -> tuple[str, tuple[str, ...], frozenset[str]]:
    """Return the tree hash of a source text, the package modules and the others it imports."""
    tree = ast.parse(source)
    digest = hashlib.sha256("\0".join(_tokens(tree)).encode("utf-8", "surrogatepass"))
    imported = set(_imports(tree))
    names = {part for name in imported for part in _with_parents(name)}
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    return digest.hexdigest(), tuple(sorted(names)), frozenset(others - {PACKAGE})


def _parse(path: Path) -> tuple[str, tuple[str, ...], frozenset[str]]:
    try:
        return _parsed(path.read_bytes())
    except FlowError as error:
        raise FlowError(f"{path}, {error}") from error
    except SyntaxError as error:
        raise FlowError(f"{path}, line {error.lineno}: {error.msg}") from error


def closure(root: Path, programs: Iterable[str]) -> list[Path]:
    """Return the programs and every package module they import, infrastructure left out.

    Args:
        root: the folder that holds the programs and the package (workflow/scripts).
        programs: file names below ``root``.
    """
    pending = [root / program for program in programs]
    if missing := [path for path in pending if not path.is_file()]:
        raise FlowError(f"program {missing[0]} does not exist")
    found: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in found or _module_name(root, path) in INFRASTRUCTURE:
            continue
        found.add(path)
        modules = (module_file(root, name) for name in _parse(path)[1])
        pending += [module for module in modules if module is not None]
    return sorted(found)


def code_hash(root: Path, programs: Iterable[str]) -> str:
    """Return one hash over the syntax trees of the programs and what they import."""
    digest = hashlib.sha256()
    for path in closure(root, programs):
        digest.update(f"{path.relative_to(root).as_posix()} {_parse(path)[0]}\n".encode())
    return digest.hexdigest()


def third_party(root: Path, programs: Iterable[str]) -> set[str]:
    """Return the modules from outside the project that the programs import, by their first name."""
    local = {path.stem for path in root.glob("*.py")}
    return {name for path in closure(root, programs) for name in _parse(path)[2]} - local
