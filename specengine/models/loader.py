"""Loads a decoder: checks every tensor's name and shape, then reads one at a time into packed weights.

Owns the mapping from checkpoint names to the decoder's weights. Knows nothing about files (`checkpoint.py`) or the
forward pass.

    model = load_model(resolve("smollm2-135m"), torch.bfloat16)
"""

from __future__ import annotations

import re

import torch

from specengine import ops
from specengine.errors import LoadError
from specengine.hub import ResolvedModel
from specengine.models.checkpoint import Checkpoint, open_checkpoint
from specengine.models.decoder import DecoderModel, DecoderWeights, LayerWeights
from specengine.models.families import DecoderConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LEFTOVERS = re.compile(r".*rotary_emb\.inv_freq")


def load_model(resolved: ResolvedModel, dtype: torch.dtype | None = None) -> DecoderModel:
    """The model with its weights in `dtype` (None: as the checkpoint stores them). Raises LoadError."""
    checkpoint = open_checkpoint(resolved)
    config = checkpoint.config
    check_tensors(checkpoint)
    if dtype is None:
        stored = config.dtype or checkpoint.stored_dtype
        if stored not in DTYPES:
            raise LoadError(f"{checkpoint.where} has the dtype {stored!r}; supported are {', '.join(DTYPES)}, or name one with --dtype")
        dtype = DTYPES[stored]
    reader = Reader(checkpoint, dtype)
    embedding = reader.matrix("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else reader.matrix("lm_head.weight")
    weights = DecoderWeights(
        embedding=embedding,
        layers=[reader.layer(i) for i in range(config.num_layers)],
        final_norm=reader.vector("model.norm.weight"),
        head=ops.pack_linear(head),
    )
    return DecoderModel(config, weights, dtype)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Compares the checkpoint's names and shapes with what the configuration calls for, before anything is read."""
    expected = expected_shapes(checkpoint.config)
    missing = [name for name in expected if name not in checkpoint.shapes]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise LoadError(f"{checkpoint.where} lacks the tensor {checkpoint.name_in_file(missing[0])}{more}")
    for name, shape in checkpoint.shapes.items():
        if name not in expected:
            tied_head = name == "lm_head.weight" and checkpoint.config.tie_word_embeddings
            if not tied_head and not LEFTOVERS.fullmatch(name):
                raise LoadError(f"{checkpoint.where} has the tensor {name}, which a {checkpoint.config.architecture} has no use for")
        elif shape != expected[name]:
            raise LoadError(
                f"{checkpoint.where}: the tensor {checkpoint.name_in_file(name)} has the shape {list(shape)}; "
                f"its configuration needs {list(expected[name])}"
            )


def expected_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under Hugging Face's names, with its shape."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size), "model.norm.weight": (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    projections = {
        "self_attn.q_proj": (queries, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (keys, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (keys, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, queries, c.output_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    norms = {"input_layernorm": c.hidden_size, "post_attention_layernorm": c.hidden_size}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    for layer in range(c.num_layers):
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
        for name, (out, into, bias) in projections.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (out, into)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (out,)
    return shapes


class Reader:
    """Reads tensors in the model's dtype; norms and biases in float32."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.dtype = dtype

    def matrix(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name).to(self.dtype).clone()  # not a view of a mapped file

    def vector(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name).to(torch.float32).clone()

    def fused(self, prefix: str, names: tuple[str, ...], *, bias: bool) -> ops.PackedLinear:
        """Matrices of one input, stacked by output: converted and put in their place in one pass."""
        shapes = [self.checkpoint.shapes[f"{prefix}{name}.weight"] for name in names]
        weight = torch.empty(sum(rows for rows, _ in shapes), shapes[0][1], dtype=self.dtype)
        at = 0
        for name, (rows, _) in zip(names, shapes, strict=True):
            weight[at : at + rows].copy_(self.checkpoint.read(f"{prefix}{name}.weight"))
            at += rows
        return ops.pack_linear(weight, torch.cat([self.vector(f"{prefix}{name}.bias") for name in names]) if bias else None)

    def layer(self, index: int) -> LayerWeights:
        c, prefix = self.config, f"model.layers.{index}."
        heads = ops.HeadLayout(
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            self.vector(f"{prefix}self_attn.q_norm.weight") if c.qk_norm else None,
            self.vector(f"{prefix}self_attn.k_norm.weight") if c.qk_norm else None,
            c.rms_norm_eps,
        )
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return LayerWeights(
            input_norm=self.vector(f"{prefix}input_layernorm.weight"),
            qkv=self.fused(prefix, attention, bias=c.qkv_bias),
            output=self.fused(prefix, ("self_attn.o_proj",), bias=c.output_bias),
            post_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.fused(prefix, ("mlp.gate_proj", "mlp.up_proj"), bias=c.mlp_bias),
            down=self.fused(prefix, ("mlp.down_proj",), bias=c.mlp_bias),
            heads=heads,
            window=c.windows[index],
        )
