"""Who may import whom: the contracts of pyproject.toml hold, and they would notice if they didn't."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True, limit_to_contracts={}))"

# contract, file that gets a line, the line, words of the report
BREACHES = [
    ("layers", "specengine/tree.py", "from specengine.engine import messages", "specengine.tree -> specengine.engine.messages"),
    ("layers", "specengine/misc.py", "", "specengine.misc"),
    ("core-is-pure", "specengine/core/plan.py", "import numpy", "specengine.core.plan -> numpy"),
    ("kernels-know-nothing", "kernels/specengine_kernels/__init__.py", "import specengine", "specengine_kernels -> specengine"),
    ("only-ops-calls-kernels", "specengine/runner/kv_cache.py", "import specengine_kernels", "specengine.runner.kv_cache"),
    ("drafters-are-independent", "specengine/spec/drafters/ngram.py", "from specengine.spec.drafters import draft", "ngram"),
    ("engine-holds-no-tensors", "specengine/engine/messages.py", "import torch", "specengine.engine.messages -> torch"),
    ("server-and-cli-are-light", "specengine/server/app.py", "import transformers", "specengine.server.app -> transformers"),
    ("server-and-cli-are-light", "specengine/cli/main.py", "from specengine.spec import verifier", "specengine.cli.main"),
]


def run_python(code: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter that sees the tree at `root` and nothing else of ours."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    return subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=120)


def test_contracts_hold():
    run = run_python(LINT.format("()"))
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(("contract", "file", "line", "words"), BREACHES, ids=[f"{b[0]}-{i}" for i, b in enumerate(BREACHES)])
def test_contract_notices_a_breach(tmp_path: Path, contract: str, file: str, line: str, words: str):
    only_python = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("specengine", "kernels/specengine_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=only_python)
    with open(tmp_path / file, "a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    run = run_python(LINT.format((contract,)), tmp_path)
    assert run.returncode == 1
    assert words in " ".join(run.stdout.split()), run.stdout


@pytest.mark.parametrize("package", ["specengine.cli", "specengine.server"])
def test_clients_of_the_engine_load_no_tensors(package: str):
    code = (
        "import importlib, pkgutil, sys\n"
        f"module = importlib.import_module({package!r})\n"
        "for found in pkgutil.walk_packages(getattr(module, '__path__', []), module.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(sum(name.startswith(module.__name__) for name in sys.modules))"
    )
    run = run_python(code)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 1


def test_import_of_the_package_is_lazy():
    run = run_python("import sys, specengine\nprint([m for m in sys.modules if m.startswith('specengine.') or m == 'torch'])")
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


@pytest.mark.skipif(not (ROOT / "specengine/cli/main.py").is_file(), reason="the command line isn't in the tree yet")
def test_help_answers_fast():
    """0.3 s is the aim; three times that is allowed, and the best of three counts, since tests share the machine."""
    code = (
        "import sys\n"
        "from specengine.cli.main import main\n"
        "try:\n"
        "    code = main(['--help'])\n"
        "except SystemExit as leave:\n"
        "    code = leave.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        run = run_python(code)
        seconds.append(time.perf_counter() - begin)
        assert run.returncode == 0, run.stderr
        assert "serve" in run.stdout
    assert min(seconds) < 0.9, seconds
