"""The public names: a list under test, since each one is a promise."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import specengine

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ["LLM", "RequestOutput", "SamplingParams", "SpeculativeConfig"]


def test_exported_names():
    assert specengine.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(specengine))


@pytest.mark.parametrize("name", PUBLIC)
def test_name_loads(name: str):
    assert getattr(specengine, name).__name__ == name


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        specengine.LMM  # noqa: B018


def test_version_is_the_changelog_s():
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert specengine.__version__ == newest[1]


def test_version_is_the_installed_one():
    try:
        installed = version("specengine")
    except PackageNotFoundError:
        pytest.skip("specengine is used from its folder, not installed")
    assert installed == specengine.__version__


def test_typed():
    assert (ROOT / "specengine" / "py.typed").is_file()


def test_every_package_says_what_it_is():
    folders = {path.parent for path in (ROOT / "specengine").rglob("*.py")}
    silent = [str(f) for f in folders if not (f / "__init__.py").is_file() or not (f / "__init__.py").read_text().startswith('"""')]
    assert silent == []
