"""Builds a worker: loads the models, sizes the KV arena, and makes drafter and verifier.

Owns what depends on the models' sizes. Knows nothing about requests.

    worker = build_worker(settings)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.attention.paged import PagedAttention
from specengine.config import SpeculativeConfig
from specengine.errors import ConfigError
from specengine.hub import ResolvedModel
from specengine.models.decoder import DecoderModel
from specengine.models.loader import load_model
from specengine.runner.kv_cache import KVArena, KVShape
from specengine.runner.model_runner import ModelRunner
from specengine.runner.sequence_table import SequenceTable
from specengine.spec.drafter import DRAFTERS, DrafterContext
from specengine.spec.verifier import Verifier
from specengine.worker.worker import Worker, WorkerSizes

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class WorkerSettings:
    target: ResolvedModel
    draft: ResolvedModel | None
    speculative: SpeculativeConfig
    dtype: str  # "auto" is the checkpoint's
    kv_cache_dtype: str
    block_size: int
    max_num_seqs: int
    max_model_len: int | None
    num_kv_blocks: int | None
    kv_bytes: int
    threads: int
    num_token_ids: int


def build_worker(settings: WorkerSettings) -> Worker:
    torch.set_num_threads(settings.threads)
    device = torch.device("cpu")
    dtype = TORCH_DTYPES.get(settings.dtype)
    target = load_model(settings.target, dtype)
    draft = load_model(settings.draft, dtype) if settings.draft is not None else None
    models = [target] if draft is None else [target, draft]
    max_model_len = context_length(settings, target)
    for model in models:
        model.prepare(max_model_len)
    shapes = [kv_shape(model, settings) for model in models]
    num_blocks = kv_blocks(settings, shapes, max_model_len)
    caches = KVArena(num_blocks, shapes, device).caches
    runners = [ModelRunner(model, cache, PagedAttention()) for model, cache in zip(models, caches, strict=True)]
    table = SequenceTable(settings.max_num_seqs, max_model_len, settings.block_size)
    verifier = Verifier(settings.num_token_ids, acceptance=settings.speculative.resolved_acceptance())
    context = DrafterContext(
        speculative=settings.speculative,
        max_rows=settings.max_num_seqs,
        num_blocks=num_blocks,
        num_token_ids=settings.num_token_ids,
        runner=runners[1] if draft is not None else None,
    )
    drafter = DRAFTERS.get(settings.speculative.resolved_method())(context)
    sizes = WorkerSizes(
        num_kv_blocks=num_blocks,
        max_model_len=max_model_len,
        draft_cost=target_share(target, draft),
        vocab_size=target.config.vocab_size,
        dtype=str(target.dtype).removeprefix("torch."),
    )
    return Worker(runners[0], drafter, verifier, table, sizes)


def context_length(settings: WorkerSettings, target: DecoderModel) -> int:
    """Tokens of prompt and output together: as asked for, or what the model was made for."""
    longest = target.config.max_position_embeddings
    if settings.max_model_len is None:
        return longest
    if settings.max_model_len > longest:
        raise ConfigError(f"--max-model-len is {settings.max_model_len}; allowed is at most the model's own {longest}")
    return settings.max_model_len


def kv_shape(model: DecoderModel, settings: WorkerSettings) -> KVShape:
    c = model.config
    dtype = TORCH_DTYPES.get(settings.kv_cache_dtype, model.dtype)
    return KVShape(c.num_layers, c.num_kv_heads, c.head_dim, settings.block_size, dtype)


def kv_blocks(settings: WorkerSettings, shapes: list[KVShape], max_model_len: int) -> int:
    """Blocks that fit the KV memory; never more than all sequences together can use twice over."""
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks
    block_bytes = sum(shape.bytes_per_block for shape in shapes)
    fitting = settings.kv_bytes // block_bytes
    if fitting < 2:
        raise ConfigError(f"--kv-cache-memory is {settings.kv_bytes} bytes; allowed is at least two blocks of {block_bytes} bytes")
    useful = 2 * settings.max_num_seqs * -(-max_model_len // settings.block_size)
    return min(fitting, useful)


def target_share(target: DecoderModel, draft: DecoderModel | None) -> float:
    """A draft token's cost in target tokens: the ratio of parameters."""
    return 0.0 if draft is None else draft.num_parameters / target.num_parameters
