"""Checkpoints that are whole, broken, or hold more than the model wants (decision 34, field cases 59 and 61)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from specengine.errors import LoadError
from specengine.models.loader import expected_shapes
from tests import fixtures
from tests.harness import Harness, load_folder

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
TOKENS = list(range(30))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return fixtures.write_rand(tmp_path / "whole", 3)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return fixtures.write_rand(tmp_path / "sharded", 3, folder={"shards": 3})


def change(folder: Path, tensors: dict[str, Any], *, drop: str | None = None) -> None:
    """Writes the single file again, with some tensors replaced or added."""
    kept = load_file(folder / SINGLE) | tensors
    save_file({name: values for name, values in kept.items() if name != drop}, folder / SINGLE)


def logits(folder: Path) -> torch.Tensor:
    return Harness(load_folder(folder), max_len=32).logits(TOKENS)


def failure(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_expected_tensors_are_those_of_the_fixture():
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        folder = fixtures.rand(architecture=architecture)
        model = load_folder(folder)
        config = json.loads((folder / "config.json").read_text())
        assert expected_shapes(model.config) == fixtures.tensor_shapes(config)


def test_a_missing_shard(sharded: Path):
    (sharded / SHARDS[1]).unlink()
    assert failure(sharded) == f"the file {sharded / SHARDS[1]} is missing, and the index names it"


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_shard(sharded: Path, size: int):
    data = (sharded / SHARDS[2]).read_bytes()
    (sharded / SHARDS[2]).write_bytes(data[:size])
    assert failure(sharded).startswith(f"{sharded / SHARDS[2]} is not a whole safetensors file: ")


def test_a_truncated_single_file(whole: Path):
    data = (whole / SINGLE).read_bytes()
    (whole / SINGLE).write_bytes(data[: len(data) // 2])
    assert failure(whole).startswith(f"{whole / SINGLE} is not a whole safetensors file: ")


def test_a_shard_without_a_tensor_that_the_index_puts_there(sharded: Path):
    name = sorted(load_file(sharded / SHARDS[1]))[0]
    tensors = load_file(sharded / SHARDS[1])
    save_file({key: values for key, values in tensors.items() if key != name}, sharded / SHARDS[1])
    assert failure(sharded) == f"the tensor {name} is missing from {sharded / SHARDS[1]}, where the index puts it"


def test_files_and_tensors_that_the_index_does_not_name(sharded: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Only what the index names is read; the rest is passed over with one warning."""
    monkeypatch.setattr(logging.getLogger("specengine"), "propagate", True)
    before = logits(sharded)
    tensors = load_file(sharded / SHARDS[0])
    save_file(tensors | {"left.over": np.zeros(3, np.float32)}, sharded / SHARDS[0])
    (sharded / "consolidated.safetensors").write_bytes(b"not read")
    with caplog.at_level("WARNING", "specengine"):
        assert torch.equal(logits(sharded), before)
        load_folder(sharded)
    warnings = [record.getMessage() for record in caplog.records if "index doesn't name" in record.getMessage()]
    assert warnings == [f"{sharded}: files that the index doesn't name are not read: consolidated.safetensors"]


def test_a_tensor_that_the_index_names_and_the_model_does_not_know(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.odd"] = SHARDS[0]
    fixtures.write_json(sharded / INDEX, index)
    save_file(load_file(sharded / SHARDS[0]) | {"model.odd": np.zeros(3, np.float32)}, sharded / SHARDS[0])
    assert failure(sharded) == f"{sharded} has the tensor model.odd, which a LlamaForCausalLM has no use for"


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{"])
def test_an_index_that_cannot_be_read(sharded: Path, content: str):
    (sharded / INDEX).write_text(content)
    assert failure(sharded).startswith(str(sharded / INDEX))


def test_a_missing_tensor(whole: Path):
    change(whole, {}, drop="model.layers.1.mlp.up_proj.weight")
    assert failure(whole) == f"{whole} lacks the tensor model.layers.1.mlp.up_proj.weight"


def test_many_missing_tensors(whole: Path):
    config = json.loads((whole / "config.json").read_text())
    fixtures.write_json(whole / "config.json", config | {"num_hidden_layers": 3})
    assert failure(whole) == f"{whole} lacks the tensor model.layers.2.input_layernorm.weight (and 8 more)"


def test_an_untied_model_without_head(whole: Path):
    change(whole, {}, drop="lm_head.weight")
    assert failure(whole) == f"{whole} lacks the tensor lm_head.weight"


def test_a_tensor_of_another_shape(whole: Path):
    change(whole, {"model.layers.0.self_attn.k_proj.weight": np.zeros((16, 64), np.float32)})
    words = "the tensor model.layers.0.self_attn.k_proj.weight has the shape [16, 64]; its configuration needs [32, 64]"
    assert failure(whole) == f"{whole}: {words}"


def test_unknown_tensors_and_known_leftovers(whole: Path):
    before = logits(whole)
    change(whole, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)})
    assert torch.equal(logits(whole), before)
    change(whole, {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)})
    assert failure(whole).endswith("has the tensor model.layers.0.self_attn.q_proj.bias, which a LlamaForCausalLM has no use for")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_values_without_a_quantization_config(whole: Path, dtype: torch.dtype):
    tensors = {name: torch.from_numpy(values) for name, values in load_file(whole / SINGLE).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    save_torch(tensors | {name: tensors[name].to(dtype)}, whole / SINGLE)
    assert failure(whole) == f"the tensor {name} of {whole / SINGLE} holds {dtype}; supported are floats of 16, 32 and 64 bits"


def test_folders_without_weights(whole: Path):
    (whole / SINGLE).unlink()
    assert failure(whole) == f"{whole} has neither {SINGLE} nor {INDEX}"
    (whole / "pytorch_model.bin").write_bytes(b"")
    assert failure(whole) == f"{whole} has neither {SINGLE} nor {INDEX}; it holds pytorch_model.bin"


@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff"])
def test_a_configuration_that_cannot_be_read(whole: Path, content: str | None):
    (whole / "config.json").unlink()
    if content is not None:
        (whole / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert failure(whole).startswith(str(whole / "config.json"))


@pytest.mark.parametrize("named", ["bfloat16", "float16", "float32", "torch.bfloat16", None])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_the_configuration_s_or_the_file_s(whole: Path, named: str | None, key: str):
    config = json.loads((whole / "config.json").read_text())
    config.pop("torch_dtype")
    fixtures.write_json(whole / "config.json", config | {key: named})
    expected = getattr(torch, (named or "float32").removeprefix("torch."))
    model = load_folder(whole, None)
    assert model.dtype == expected
    assert model.weights.embedding.dtype == model.weights.head.dtype == model.weights.layers[0].qkv.dtype == expected
    assert model.weights.final_norm.dtype == torch.float32


def test_a_named_dtype_goes_before_the_configuration_s(whole: Path):
    assert load_folder(whole, torch.float16).dtype == torch.float16


def test_weights_do_not_depend_on_the_file_after_loading(whole: Path):
    """Tensors may be views of a mapped file; a checkpoint that is replaced must not change or crash a running model."""
    model = load_folder(whole)
    before = Harness(model, max_len=32).logits(TOKENS)
    data = (whole / SINGLE).read_bytes()
    with open(whole / SINGLE, "r+b") as file:
        file.write(bytes(len(data)))
    assert torch.equal(Harness(model, max_len=32).logits(TOKENS), before)
