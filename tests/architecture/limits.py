"""Sizes of files and functions against `[tool.specengine.limits]` of pyproject.toml; part of `make check`.

Owns what counts as a line, a level of nesting and a parameter. A file of `file_lines` to `file_lines_hard` lines, or a
function over `function_lines`, passes only with an entry in `exceptions` that gives a reason. Style is ruff's affair.

    python tests/architecture/limits.py
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("specengine", "kernels", "csrc", "tests", "benchmarks")
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Limits:
    """The numbers of pyproject.toml, under the same names."""

    file_lines: int
    file_lines_hard: int
    kernel_file_lines: int
    function_lines: int
    nesting: int
    kernel_parameters: int
    max_exceptions: int
    exceptions: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path = ROOT / "pyproject.toml") -> Limits:
        return cls(**tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["specengine"]["limits"])

    def allowed(self, path: str, function: str | None, default: int) -> int:
        """The limit of one file or function: the listed exception's, or `default`."""
        for entry in self.exceptions:
            if entry["path"] == path and entry.get("function") == function:
                return int(entry["lines"])
        return default


def source_files(root: Path = ROOT) -> list[Path]:
    return sorted(
        path
        for folder in SOURCE_FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts
    )


def check_file(path: str, text: str, limits: Limits) -> list[str]:
    """One sentence a fault of the file `path` (relative to the root) with the content `text`."""
    lines = len(text.splitlines())
    kernel = path.startswith(("kernels/", "csrc/"))
    soft = limits.kernel_file_lines if kernel else limits.file_lines
    hard = limits.kernel_file_lines if kernel else limits.file_lines_hard
    allowed = min(limits.allowed(path, None, soft), hard)
    faults = [f"{path}: {lines} lines; allowed are {allowed}"] if lines > allowed else []
    if path.endswith(".py"):
        for name, node in functions(ast.parse(text)):
            faults += _check_function(path, name, node, limits)
    return faults


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a module with its dotted name, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
        named = isinstance(node, (*FUNCTIONS, ast.ClassDef))
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring: explaining more is never too long."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def nesting(node: ast.AST) -> int:
    """The deepest nesting of blocks in a function; an `elif` is as deep as its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            continue
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not chained))
    return deepest


def _check_function(path: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, limits: Limits) -> list[str]:
    faults = []
    lines, allowed = function_lines(node), limits.allowed(path, name, limits.function_lines)
    if lines > allowed:
        faults.append(f"{path}:{node.lineno}: {name} has {lines} lines; allowed are {allowed}")
    depth = nesting(node)
    if depth > limits.nesting:
        faults.append(f"{path}:{node.lineno}: {name} nests {depth} blocks; allowed are {limits.nesting}")
    arguments = node.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    if path.startswith("kernels/") and count > limits.kernel_parameters:
        faults.append(f"{path}:{node.lineno}: {name} has {count} parameters; allowed are {limits.kernel_parameters}")
    return faults


def check_exceptions(limits: Limits, texts: dict[str, str]) -> list[str]:
    """Faults of the list of exceptions itself: too long, without a reason, or no longer needed."""
    faults = []
    if len(limits.exceptions) > limits.max_exceptions:
        faults.append(f"pyproject.toml: {len(limits.exceptions)} exceptions; allowed are {limits.max_exceptions}")
    for entry in limits.exceptions:
        path, function = entry["path"], entry.get("function")
        where = path if function is None else f"{path}: {function}"
        if len(entry.get("reason", "")) < 20:
            faults.append(f"pyproject.toml: the exception for {where} gives no reason")
        if path not in texts:
            faults.append(f"pyproject.toml: the exception for {where} names no file")
            continue
        limit = limits.file_lines if function is None else limits.function_lines
        if function is None:
            size = len(texts[path].splitlines())
        else:
            size = max((function_lines(n) for name, n in functions(ast.parse(texts[path])) if name == function), default=0)
        if size <= limit:
            faults.append(f"pyproject.toml: the exception for {where} isn't needed: it has {size} lines, allowed are {limit}")
    return faults


def check_all(root: Path = ROOT) -> list[str]:
    limits = Limits.load(root / "pyproject.toml")
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in source_files(root)}
    faults = check_exceptions(limits, texts)
    for path, text in texts.items():
        faults += check_file(path, text, limits)
    return faults


def main() -> int:
    faults = check_all()
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"sizes: {len(faults)} faults in {len(source_files())} files")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
