"""The only messages between engine and worker: a plan goes down, a result comes up.

Owns the shapes of `StepPlan` (a delta against the worker's table: who is new, who left, what runs) and
`StepResult` (tokens and counts). Holds no tensors; every type is a msgspec struct, so a plan crosses a process
or a network as it is. Rows are fixed places in the worker's sequence table, named by the scheduler.
"""

from __future__ import annotations

import msgspec

from specengine.sampling_params import SamplingParams


class DraftBudget(msgspec.Struct, frozen=True):
    """How much a sequence may draft in one step. `max_nodes` counts drafted nodes, not the root."""

    row: int
    max_nodes: int
    max_depth: int
    max_width: int
    sources: tuple[str, ...] = ()


class StepLimits(msgspec.Struct, frozen=True):
    """Bounds over all trees of a step, decided from past steps only."""

    total_nodes: int
    theta_prev: float = 0.0
    marginal_ms: tuple[float, ...] = ()


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that enters the worker's table (first time, or again after preemption)."""

    row: int
    sequence_id: str
    token_ids: list[int]  # prompt, then tokens already produced
    num_prompt_tokens: int
    num_computed_tokens: int  # covered by cached or copied blocks
    block_ids: list[int]
    sampling: SamplingParams
    seed: int  # 64 bits, never missing here
    choice: int  # index among the n choices; part of the noise key
    stop_token_ids: tuple[int, ...]  # EOS and stop ids: masked until min_tokens
    max_output_tokens: int  # resolved: room and max_tokens considered


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's share of a step: tokens[start : start + num_tokens] are computed as chain rows.

    `is_tip` is true where the last of them is the sequence's last token, so that the step samples for it.
    """

    row: int
    start: int
    num_tokens: int
    is_tip: bool
    new_block_ids: list[int] = []
    draft_catch_up: int = 0  # tokens that a drafter with KV may compute for this sequence, apart from its tree


class StepPlan(msgspec.Struct, frozen=True):
    """What one step does. Order of application: released, block_copies, new, scheduled."""

    step: int
    new: list[NewSequence]
    released: list[int]  # rows
    scheduled: list[ScheduledSequence]
    budgets: list[DraftBudget]  # one a scheduled tip sequence that may draft (max_nodes > 0)
    limits: StepLimits
    block_copies: list[tuple[int, int]]  # (source block, destination block), read before any write of the step
    fresh_blocks: list[int]  # blocks handed out as new: nothing in them is valid for any model


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Raw log-probabilities of one position: the chosen token first, then the top ones by rank."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1 is the most likely


class SequenceResult(msgspec.Struct, frozen=True):
    """What a step gave one sequence. `token_ids` = accepted draft tokens, then the one token of the target."""

    row: int
    token_ids: list[int] = []
    sources: list[str] = []  # one a token; "target" marks the last
    num_drafted: int = 0
    logprobs: list[TokenLogprobs] | None = None  # one a token
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions start+1 .. start+num_tokens
    draft_lag: int = 0  # tokens of which the drafter still lacks KV
    error: str | None = None  # non-finite logits: ends this sequence alone


class SourceCounts(msgspec.Struct):
    """Drafted and accepted nodes of one source by depth (index 0 is depth 1); `drafts` counts trees with a node of it."""

    drafts: int = 0
    drafted: list[int] = []
    accepted: list[int] = []


class StepResult(msgspec.Struct, frozen=True):
    step: int
    sequences: list[SequenceResult]  # one a scheduled sequence, in the plan's order
    by_source: dict[str, SourceCounts] = {}
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    moved_slots: int = 0  # accepted nodes that compaction moved


class SequenceUpdate(msgspec.Struct, frozen=True):
    """What the output processor decided about one sequence after a step."""

    row: int
    token_ids: list[int]  # kept: a prefix of the result's tokens
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    draft_lag: int = 0
