"""Which checkpoints the decoder can load: configuration of each family, and names of its weights.

Owns the reading of config.json and of GGUF metadata into a `DecoderConfig`. Knows nothing about tensors' contents.

    config = config_from_hf(json.loads(text), "folder/config.json")
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specengine.errors import LoadError
from specengine.layers.rotary import KINDS, RopeParameters

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


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
    dtype: str = "float32"  # as the checkpoint is stored


def config_from_hf(config: dict[str, Any], where: str) -> DecoderConfig:
    """Reads config.json. Raises LoadError naming what can't be served."""
    read = Fields(config, where)
    architecture = next(iter(config.get("architectures") or []), None)
    if architecture not in ARCHITECTURES:
        raise LoadError(f"{where} has the architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}")
    if config.get("quantization_config"):
        method = (config["quantization_config"] or {}).get("quant_method", "unnamed")
        raise LoadError(
            f"{where} has a quantization_config of the method {method!r}, which can't be read; use an unquantized checkpoint or GGUF"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{where} has hidden_act {config['hidden_act']!r}; supported is silu")
    heads, hidden, layers = read.positive("num_attention_heads"), read.positive("hidden_size"), read.positive("num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise LoadError(f"{where} has {heads} attention heads and {kv_heads} key-value heads; the first must be a multiple of the second")
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=read.positive("intermediate_size"),
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, head_dim, where),
        windows=_windows(config, architecture, layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or bias,
        output_bias=bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def config_from_gguf(
    metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], where: str, freq_factors: tuple[float, ...] | None = None
) -> DecoderConfig:
    """Reads GGUF metadata; `tensors` maps names to shapes [out, in], and tells of tied heads, biases and norms."""
    name = metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise LoadError(f"{where} has the architecture {name!r}; supported are {', '.join(GGUF_ARCHITECTURES)}")
    read = Fields({k.removeprefix(f"{name}."): v for k, v in metadata.items()}, where)
    heads, hidden, layers = read.positive("attention.head_count"), read.positive("embedding_length"), read.positive("block_count")
    head_dim = read.values.get("attention.key_length") or hidden // heads
    context = read.positive("context_length")
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{where} lacks the tensor token_embd.weight")
    window = read.values.get("attention.sliding_window") or None
    return DecoderConfig(
        architecture=GGUF_ARCHITECTURES[name],
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.values.get("attention.head_count_kv") or heads,
        head_dim=head_dim,
        intermediate_size=read.positive("feed_forward_length"),
        max_position_embeddings=context,
        rms_norm_eps=float(read.values.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=replace(_gguf_rope(read.values, head_dim, context, where), freq_factors=freq_factors),
        windows=(window,) * layers,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        dtype="bfloat16",
    )


@dataclass(frozen=True)
class Fields:
    values: dict[str, Any]
    where: str

    def positive(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise LoadError(f"{self.where} has {name} {value!r}; a positive integer is needed")
        return value


def _rope(config: dict[str, Any], head_dim: int, where: str) -> RopeParameters:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` (with `rope_type` or `type`)."""
    given = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise LoadError(f"{where} has the rope type {kind!r}; supported are {', '.join(KINDS)}")
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    rope = RopeParameters(float(theta), int(head_dim * partial), config.get("max_position_embeddings") or 2048, kind, given)
    _check_rope(rope, where)
    return rope


def _gguf_rope(values: dict[str, Any], head_dim: int, context: int, where: str) -> RopeParameters:
    kind = values.get("rope.scaling.type") or "default"
    kind = {"none": "default"}.get(kind, kind)
    if kind not in KINDS:
        raise LoadError(f"{where} has the rope scaling {kind!r}; supported are {', '.join(KINDS)}")
    scaling = {
        "factor": values.get("rope.scaling.factor"),
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        "attention_factor": values.get("rope.scaling.attn_factor"),
    }
    scaling = {k: v for k, v in scaling.items() if v is not None}
    dim = values.get("rope.dimension_count") or head_dim
    rope = RopeParameters(float(values.get("rope.freq_base", 10000.0)), dim, context, kind, scaling)
    _check_rope(rope, where)
    return rope


def _check_rope(rope: RopeParameters, where: str) -> None:
    try:
        KINDS[rope.kind](rope, rope.max_position_embeddings)
    except LoadError as error:
        raise LoadError(f"{where}: {error}") from None


def _windows(config: dict[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28) if architecture.startswith("Qwen") else 0
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)
