"""Rules about the text of the tree that no import contract can see."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FILES = sorted((ROOT / "specengine").rglob("*.py"))
MAY_READ_ENVIRONMENT = {"specengine/config.py", "specengine/hub.py", "setup.py"}
TEXT_SUFFIXES = {
    ".py",
    ".pyi",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".cpp",
    ".h",
    ".txt",
    ".json",
    ".jsonl",
    ".cfg",
    ".html",
    ".js",
    ".css",
    "",
}
# Folders of one machine, at the start of a word: a home, a mount, a scratch folder.
MACHINE_PATH = re.compile(r"(?<![\w./:<>~-])/(?:work|root|home|Users|opt|tmp)/[\w.]")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_files() -> list[Path]:
    """The files that a commit would hold; outside a git clone, everything that isn't hidden or built."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        files = [
            p for p in ROOT.rglob("*") if not any(part.startswith(".") or part in ("build", "site") for part in p.relative_to(ROOT).parts)
        ]
    return [path for path in files if path.is_file() and path.suffix in TEXT_SUFFIXES]


def names_the_extension(text: str) -> list[int]:
    """Lines that import `specengine._C` or `specengine_kernels`, or reach for `torch.ops.specengine`."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            names = [str(node.args[0].value)] if "import_module" in ast.unparse(node.func) else []
        else:
            continue
        if any(re.match(r"(specengine\._C|specengine_kernels|torch\.ops\.specengine)(\.|$)", name) for name in names):
            lines.append(node.lineno)
    return lines


def reads_environment(text: str) -> list[int]:
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv", "os.putenv"):
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {"environ", "getenv"}:
            lines.append(node.lineno)
    return lines


def test_only_ops_reaches_for_kernels():
    found = {relative(p): names_the_extension(p.read_text(encoding="utf-8")) for p in PYTHON_FILES}
    assert {path: lines for path, lines in found.items() if lines and not path.startswith("specengine/ops/")} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import specengine._C",
        "from specengine import _C",
        "from specengine_kernels import verify",
        "import specengine_kernels.verify as v",
        "torch.ops.specengine.rms_norm(x)",
        "importlib.import_module('specengine._C')",
    ],
)
def test_reaching_for_kernels_is_seen(line: str):
    assert names_the_extension("import torch, importlib\n" + line) != []


def test_environment_is_read_in_one_place():
    found = {relative(p): reads_environment(p.read_text(encoding="utf-8")) for p in PYTHON_FILES}
    assert {path: lines for path, lines in found.items() if lines and path not in MAY_READ_ENVIRONMENT} == {}
    native = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h")]
    assert [relative(p) for p in native if "getenv" in p.read_text(encoding="utf-8")] == []


def test_reading_the_environment_is_seen():
    assert reads_environment("import os\nos.environ['A']\nx = os.getenv('B')\n") == [2, 3]
    assert reads_environment("from os import environ\n") == [1]
    assert reads_environment("import os\nos.path.join('a')\n") == []


def test_no_machine_s_paths():
    found = []
    for path in tree_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line) and path != Path(__file__):
                found.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize("text", ['path = "/home/someone/model"', "see /tmp/x.json", "cd /work/tree", "(/root/.cache)"])
def test_a_machine_s_path_is_seen(text: str):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize(
    "text", ["https://example.org/home/x", "docs/work/a.md", "$HOME/tmp/x", "{root}/tmp/x", "root / opt", "GET /v1/models"]
)
def test_other_paths_pass(text: str):
    assert not MACHINE_PATH.search(text.replace("{root}", "folder"))


def test_no_unowned_todo():
    """A TODO names the issue that it waits for, as in `TODO(#12)`."""
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")
    found = [relative(p) for p in PYTHON_FILES if marks.search(p.read_text(encoding="utf-8"))]
    assert found == []


def test_no_exception_is_swallowed():
    """No `except: pass`, whatever it catches: what may be ignored is named with contextlib.suppress, and why."""
    found = []
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in node.body):
                found.append(f"{relative(path)}:{node.lineno}")
    assert found == []
