"""Builds an engine's parts out of its options: tokenizer, models, KV arena, worker, executor, scheduler.

Owns the order of loading and the sizes that follow from the models (context length, KV blocks). Everything that a user
can get wrong about a model ends here as ConfigError or LoadError.

    built = build_executor(options)
    scheduler = build_scheduler(options, built)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specengine.config import GIB, EngineOptions, default_threads
from specengine.core.block_pool import BlockPool
from specengine.core.scheduler import Scheduler, SchedulerConfig
from specengine.core.speculation import FixedBudget
from specengine.engine.messages import EngineInfo
from specengine.errors import ConfigError
from specengine.executor.base import EXECUTORS, Executor
from specengine.hub import ResolvedModel, resolve
from specengine.tokenizer import Tokenizer, first_difference
from specengine.worker.build import WorkerSettings, build_worker
from specengine.worker.worker import Worker, WorkerSizes

DEFAULT_KV_BYTES = 4 * GIB


@dataclass(frozen=True)
class Built:
    """The parts of an engine, and the numbers that loading settled."""

    options: EngineOptions
    tokenizer: Tokenizer
    executor: Executor
    sizes: WorkerSizes
    draft_has_kv: bool
    method: str

    @property
    def generation_defaults(self) -> dict[str, Any]:
        return {} if self.options.generation_config == "none" else self.tokenizer.generation_defaults

    def info(self, load_seconds: float) -> EngineInfo:
        speculative = self.options.speculative
        return EngineInfo(
            target=self.options.target,
            draft=speculative.draft if self.method == "draft" else None,
            max_model_len=self.sizes.max_model_len,
            capacity_tokens=min(self.sizes.max_model_len, self.sizes.num_kv_blocks * self.options.block_size),
            vocab_size=self.sizes.vocab_size,
            dtype=self.sizes.dtype,
            device="cpu",
            speculation=self.method,
            num_kv_blocks=self.sizes.num_kv_blocks,
            block_size=self.options.block_size,
            load_seconds=load_seconds,
        )


def build_executor(options: EngineOptions) -> Built:
    """Loads tokenizer and models and makes the executor."""
    speculative = options.speculative
    method = speculative.resolved_method()
    target = resolve(options.target)
    tokenizer = Tokenizer.load(target, chat_template=options.chat_template)
    draft = resolve(speculative.draft) if method == "draft" and speculative.draft else None
    if draft is not None:
        check_vocabulary(tokenizer, draft)
    settings = WorkerSettings(
        target=target,
        draft=draft,
        speculative=speculative,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        num_kv_blocks=options.num_kv_blocks,
        kv_bytes=options.kv_cache_memory or DEFAULT_KV_BYTES,
        threads=options.threads or default_threads(),
        num_token_ids=tokenizer.num_token_ids,
    )
    worker: Worker = build_worker(settings)
    return Built(
        options=options,
        tokenizer=tokenizer,
        executor=EXECUTORS.get(options.executor)(worker),
        sizes=worker.sizes,
        draft_has_kv=worker.drafter.capabilities.has_kv,
        method=method,
    )


def build_scheduler(options: EngineOptions, built: Built) -> Scheduler:
    speculative = options.speculative
    nodes = 0 if built.method == "off" else speculative.num_speculative_tokens
    policy = FixedBudget(
        num_speculative_tokens=nodes,
        tree_width=speculative.tree_width,
        tree_depth=speculative.tree_depth,
        max_concurrency=speculative.max_concurrency,
    )
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=built.sizes.max_model_len,
        policy=options.scheduling_policy,
        draft_has_kv=built.draft_has_kv,
        draft_cost=built.sizes.draft_cost,
    )
    pool = BlockPool(built.sizes.num_kv_blocks, options.block_size, enable_prefix_caching=options.enable_prefix_caching)
    return Scheduler(config, pool, policy)


def check_vocabulary(tokenizer: Tokenizer, draft: ResolvedModel) -> None:
    """Refuses a draft whose token ids differ from the target's, naming the first difference (decision 35)."""
    difference = first_difference(tokenizer, Tokenizer.load(draft))
    if difference is not None:
        token, ours, theirs = difference
        raise ConfigError(
            f"--draft {draft.name} has another vocabulary than the target: token {token} is {theirs!r} there and {ours!r} in the target; "
            "allowed is a draft with the target's tokenizer"
        )
