"""Which checkpoints the decoder can load: configuration of each family, and names of its weights.

Owns the reading of config.json and of GGUF metadata into a `DecoderConfig`. Knows nothing about tensors' contents.

    config = config_from_hf(json.loads(text), "folder/config.json")
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from specengine.errors import LoadError
from specengine.layers.rotary import KINDS, ROPE_NUMBERS, RopeParameters, yarn_attention

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers assumes where a config.json leaves a key out; a key that is null is another thing.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
LAYER_TYPES = ("full_attention", "sliding_attention")
AS_STORED = ""  # the dtype of a checkpoint whose configuration names none


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that the decoder needs to know of a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeParameters
    windows: tuple[int | None, ...]  # one a layer: keys a row sees at most, itself included
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = AS_STORED


def config_from_hf(config: dict[str, Any], where: str) -> DecoderConfig:
    """Reads config.json. Raises LoadError naming what can't be served."""
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in ARCHITECTURES:
        raise LoadError(f"{where} has the architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}")
    _refuse(config, where)
    read = Fields(LEFT_OUT[architecture] | config, where)
    heads, hidden, layers = read.positive("num_attention_heads"), read.positive("hidden_size"), read.positive("num_hidden_layers")
    head_dim = read.positive("head_dim", hidden // heads)
    context = read.positive("max_position_embeddings")
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(config.get("attention_bias", False))
    found = DecoderConfig(
        architecture=architecture,
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=read.positive("intermediate_size"),
        max_position_embeddings=context,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=_rope(config, head_dim, context, where),
        windows=_windows(read, architecture, layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or bias,
        output_bias=bias and not qwen2,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=str(config.get("dtype") or config.get("torch_dtype") or AS_STORED).removeprefix("torch."),
    )
    return _checked(found, where)


def _refuse(config: dict[str, Any], where: str) -> None:
    for key in ("quantization_config", "compression_config"):
        settings = config.get(key)
        if settings:
            method = settings.get("quant_method", "unnamed") if isinstance(settings, dict) else settings
            raise LoadError(f"{where} has a {key} of the method {method!r}, which can't be read; use an unquantized checkpoint or GGUF")
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{where} has hidden_act {config['hidden_act']!r}; supported is silu")


def _checked(config: DecoderConfig, where: str) -> DecoderConfig:
    if config.num_heads % config.num_kv_heads:
        raise LoadError(
            f"{where} has {config.num_heads} attention heads and {config.num_kv_heads} key-value heads; "
            "the first must be a multiple of the second"
        )
    if config.head_dim % 2:
        raise LoadError(f"{where} has head_dim {config.head_dim}; rotary positions need an even number")
    return config


def config_from_gguf(
    metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], where: str, freq_factors: tuple[float, ...] | None = None
) -> DecoderConfig:
    """Reads GGUF metadata; `tensors` maps names to shapes [out, in], and tells of tied heads, biases and norms."""
    name = metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise LoadError(f"{where} has the architecture {name!r}; supported are {', '.join(GGUF_ARCHITECTURES)}")
    read = Fields({k.removeprefix(f"{name}."): v for k, v in metadata.items()}, where)
    heads, hidden, layers = read.positive("attention.head_count"), read.positive("embedding_length"), read.positive("block_count")
    head_dim = read.positive("attention.key_length", hidden // heads)
    context = read.positive("context_length")
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{where} lacks the tensor token_embd.weight")
    window = read.values.get("attention.sliding_window") or None
    found = DecoderConfig(
        architecture=GGUF_ARCHITECTURES[name],
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.positive("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=read.positive("feed_forward_length"),
        max_position_embeddings=context,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=replace(_gguf_rope(read.values, head_dim, context, where), freq_factors=freq_factors),
        windows=(window,) * layers,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    return _checked(found, where)


@dataclass(frozen=True)
class Fields:
    """Values of a configuration, each checked where it is read; `otherwise` stands for null and for what isn't there."""

    values: dict[str, Any]
    where: str

    def positive(self, name: str, otherwise: int | None = None) -> int:
        value = self.values.get(name)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise LoadError(f"{self.where} has {name} {value!r}; a positive integer is needed")
        return value

    def number(self, name: str, otherwise: float | None = None) -> float:
        value = self.values.get(name)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise LoadError(f"{self.where} has {name} {value!r}; a number is needed")
        return float(value)


def _rope(config: dict[str, Any], head_dim: int, context: int, where: str) -> RopeParameters:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` (with `rope_type` or `type`)."""
    given: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        values = config.get(key) or {}
        if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
            raise LoadError(f"{where} has {key} {values!r}; supported is one object of numbers for all layers")
        given |= values
    kind = given.get("rope_type") or given.get("type") or "default"
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1:
        raise LoadError(f"{where} has partial_rotary_factor {partial!r}; supported is 1")
    if config.get("original_max_position_embeddings"):
        given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    theta = Fields(config | given, where).number("rope_theta", 10000.0)
    return _checked_rope(RopeParameters(theta, head_dim, context, kind, given), where)


def _gguf_rope(values: dict[str, Any], head_dim: int, context: int, where: str) -> RopeParameters:
    read = Fields(values, where)
    kind = values.get("rope.scaling.type") or "default"
    kind = {"none": "default"}.get(kind, kind)
    scaling = {
        "factor": values.get("rope.scaling.factor"),
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
    }
    scaling = {k: v for k, v in scaling.items() if v is not None}
    if values.get("rope.scale_linear"):  # the key of files before 2023-11
        kind, scaling = "linear", {"factor": values["rope.scale_linear"]}
    # llama.cpp multiplies its own scale of the angles by this one.
    factor = read.number("rope.scaling.attn_factor", 1.0)
    if factor != 1:
        if kind != "yarn":
            raise LoadError(f"{where} has rope.scaling.attn_factor {factor}; it is supported for yarn scaling alone")
        scaling["attention_factor"] = factor * yarn_attention(read.number("rope.scaling.factor", 1.0), 1.0)
    dim = read.positive("rope.dimension_count", head_dim)
    if dim != head_dim:
        raise LoadError(f"{where} has rope.dimension_count {dim} and heads of {head_dim}; supported is the same number")
    return _checked_rope(RopeParameters(read.number("rope.freq_base", 10000.0), dim, context, kind, scaling), where)


def _checked_rope(rope: RopeParameters, where: str) -> RopeParameters:
    if rope.kind not in KINDS:
        raise LoadError(f"{where} has the rope type {rope.kind!r}; supported are {', '.join(KINDS)}")
    for key in ROPE_NUMBERS:
        if rope.scaling.get(key) is not None:
            Fields(rope.scaling, where).number(key)
    try:
        frequencies, factor = KINDS[rope.kind](rope, rope.max_position_embeddings)
    except LoadError as error:
        raise LoadError(f"{where}: {error}") from None
    except (ArithmeticError, ValueError):  # a division by zero, or the logarithm of a number that isn't positive
        raise LoadError(f"{where} has rope values that give no angles: {rope.scaling}") from None
    if not bool(torch.isfinite(frequencies).all()) or not math.isfinite(factor):
        raise LoadError(f"{where} has rope values that give no angles: {rope.scaling}")
    return rope


def _windows(read: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    """One a layer. Llama has none, Qwen only where `use_sliding_window` says so."""
    values = read.values
    if architecture == "LlamaForCausalLM" or values.get("sliding_window") is None:
        return (None,) * layers
    qwen = architecture.startswith("Qwen")
    if qwen and not values.get("use_sliding_window", False):
        return (None,) * layers
    window, types = read.positive("sliding_window"), values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28) if qwen else 0
        types = [LAYER_TYPES[i >= first] for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise LoadError(
            f"{read.where} has layer_types {types!r}; supported is one of {' and '.join(LAYER_TYPES)} for each of {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
