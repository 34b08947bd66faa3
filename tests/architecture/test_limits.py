"""Sizes of files and functions; the numbers are in pyproject.toml, the counting in limits.py."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.architecture import limits
from tests.architecture.limits import Limits

LIMITS = Limits.load()


def test_sizes():
    assert limits.check_all() == []


def test_limits_are_the_agreed_ones():
    assert (LIMITS.file_lines, LIMITS.file_lines_hard, LIMITS.function_lines, LIMITS.max_exceptions) == (400, 600, 60, 10)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("specengine/x.py", "a = 1\n" * 401, "401 lines"),
        ("csrc/x.cpp", "//\n" * 801, "801 lines"),
        ("specengine/x.py", "def f():\n" + "    a = 1\n" * 60, "f has 61 lines"),
        ("specengine/x.py", "class C:\n    def f(self):\n" + "        a = 1\n" * 60, "C.f has 61 lines"),
        ("specengine/x.py", "def f():\n" + "".join(" " * 4 * i + "if x:\n" for i in range(1, 6)) + " " * 24 + "pass\n", "nests 5"),
        ("kernels/x.py", f"def f({', '.join(f'a{i}' for i in range(26))}): ...\n", "26 parameters"),
    ],
)
def test_a_fault_is_found(path: str, text: str, words: str):
    faults = limits.check_file(path, text, LIMITS)
    assert len(faults) == 1
    assert words in faults[0]


def test_what_is_allowed_passes():
    body = '    """' + "Words.\n" * 100 + '    """\n' + "    a = 1\n" * 59
    assert limits.check_file("specengine/x.py", "def f():\n" + body, LIMITS) == []
    assert limits.check_file("csrc/x.cpp", "//\n" * 800, LIMITS) == []
    chain = "def f(x):\n    if x == 0:\n        pass\n" + "".join(f"    elif x == {i}:\n        pass\n" for i in range(1, 9))
    assert limits.nesting(ast.parse(chain).body[0]) == 1


def test_exceptions_need_a_reason_and_a_need():
    long, short = "a = 1\n" * 450, "a = 1\n"
    entry = {"path": "specengine/x.py", "lines": 450, "reason": "one table, which splitting would hide"}
    listed = replace(LIMITS, exceptions=[entry])
    assert limits.check_file("specengine/x.py", long, listed) == []
    assert limits.check_exceptions(listed, {"specengine/x.py": long}) == []
    assert "isn't needed" in limits.check_exceptions(listed, {"specengine/x.py": short})[0]
    assert "names no file" in limits.check_exceptions(listed, {})[0]
    assert "no reason" in limits.check_exceptions(replace(LIMITS, exceptions=[{**entry, "reason": ""}]), {"specengine/x.py": long})[0]
    assert "11 exceptions" in limits.check_exceptions(replace(LIMITS, exceptions=[entry] * 11), {"specengine/x.py": long})[0]
    over = replace(LIMITS, exceptions=[{**entry, "lines": 900}])
    assert limits.check_file("specengine/x.py", "a = 1\n" * 700, over) == ["specengine/x.py: 700 lines; allowed are 600"]
