"""The guide's tables of options, made from the dataclasses of `specengine.config`.

Owns the tables' form only; names, defaults and help texts are config's. `make format` rewrites them, a test compares.

    python tests/architecture/options.py
"""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from specengine.config import EngineOptions, ServerOptions, flag_name

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"
BEGIN, END = "<!-- options:begin -->\n", "<!-- options:end -->\n"


def allowed(about: Field[Any]) -> str:
    """What an option takes, in a few words."""
    meta = about.metadata
    if meta.get("kind") == "flag":
        return "a switch"
    if "choices" in meta:
        return ", ".join(f"`{choice}`" for choice in meta["choices"])
    if meta.get("kind") == "dtype":
        return "`auto`, `float32`, `bfloat16`, `float16`"
    if meta.get("kind") == "list":
        return "repeatable"
    low, high = meta.get("low"), meta.get("high")
    if low is None:
        return ""
    return f"from {low}" if high is None else f"{low} to {high}"


def default(about: Field[Any]) -> str:
    if about.default is None or about.default == ():
        return ""
    if isinstance(about.default, bool):
        return "on" if about.default else "off"
    return f"`{about.default}`"


def table(options: type) -> str:
    rows = ["| option | default | allowed | |", "|---|---|---|---|"]
    for about in fields(options):
        flag = flag_name(about.name)
        if about.default is True:
            flag = f"{flag}`, `--no-{flag[2:]}"
        rows.append(f"| `{flag}` | {default(about)} | {allowed(about)} | {about.metadata['help']} |")
    return "\n".join(rows)


def text() -> str:
    return (
        f"### Engine\n\n`serve`, `generate`, `bench`, and `LLM(...)` take these.\n\n{table(EngineOptions)}\n\n"
        f"### Server\n\n`serve` takes these as well.\n\n{table(ServerOptions)}\n"
    )


def with_tables(guide: str) -> str:
    """The guide's text with current tables between its markers."""
    head, rest = guide.split(BEGIN)
    return head + BEGIN + text() + END + rest.split(END)[1]


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
