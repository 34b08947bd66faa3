"""`StepPlanner`: one pass of scheduling, from queues to a `StepPlan`.

Owns the step's token budget and the order in which it is spent: tip sequences first (one row each), then room for
their drafts, prefill chunks of running sequences, waiting sequences, and at last the blocks for drafts, so that drafting
never causes a preemption. Lives for one step; the scheduler keeps everything that outlives it.

    plan = StepPlanner(scheduler).plan()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from specengine.core.plan import DraftBudget, NewSequence, ScheduledSequence, StepLimits, StepPlan
from specengine.core.sequence import Sequence

if TYPE_CHECKING:
    from specengine.core.scheduler import Scheduler

PREFILL_SHARE = 4  # a quarter of the tokens is kept from drafts while prompts wait, so that they always advance


@dataclass
class Planned:
    """What a sequence gets in this step."""

    sequence: Sequence
    num_tokens: int
    new_block_ids: list[int] = field(default_factory=list)
    budget: DraftBudget | None = None
    asked: bool = False  # the policy has spoken about its draft
    catch_up: int = 0

    @property
    def is_tip(self) -> bool:
        return self.num_tokens == self.sequence.num_pending


class StepPlanner:
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.config = scheduler.config
        self.pool = scheduler.pool
        self.tokens_left = scheduler.config.max_num_batched_tokens
        self.planned: dict[int, Planned] = {}  # by row

    def plan(self) -> StepPlan:
        running = list(self.scheduler.running)
        self._plan_tips([s for s in running if s.is_at_tip])
        self._want_drafts()
        self._plan_chunks([s for s in running if not s.is_at_tip])
        self._admit()
        self._want_drafts()
        self._reserve_drafts()
        return self._message()

    def _plan_tips(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.row >= 0 and self.tokens_left > 0:
                self._take(sequence, 1)

    def _plan_chunks(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.row >= 0 and self.tokens_left > 0:  # a row of -1: preempted a moment ago
                self._take(sequence, min(sequence.num_pending, self.tokens_left))

    def _take(self, sequence: Sequence, num_tokens: int) -> None:
        """Reserves slots for chain rows; preempts whoever comes last where blocks are short."""
        end = sequence.num_computed_tokens + num_tokens
        while (new := sequence.table.reserve(end)) is None:
            victim = self.scheduler.running[-1]
            self.unplan(victim)
            self.scheduler.preempt(victim)
            if victim is sequence:
                return
        self._add(sequence, num_tokens, new)

    def _add(self, sequence: Sequence, num_tokens: int, new_block_ids: list[int]) -> None:
        self.planned[sequence.row] = Planned(sequence, num_tokens, new_block_ids)
        self.tokens_left -= num_tokens

    def unplan(self, sequence: Sequence) -> None:
        planned = self.planned.pop(sequence.row, None)
        if planned is not None:
            self.tokens_left += planned.num_tokens + self._draft_tokens(planned)

    def _admit(self) -> None:
        """Waiting sequences in order, as long as rows, tokens and blocks last; none overtakes one that does not fit."""
        scheduler = self.scheduler
        while scheduler.waiting and scheduler.free_rows and self.tokens_left > 0:
            sequence = scheduler.waiting[0]
            cached = scheduler.cached_prefix(sequence)
            free = self.pool.num_free - sum(self.pool.ref_counts[b] == 0 for b in cached)
            if sequence.table.blocks_for(len(sequence.tokens)) - len(cached) > free:
                return
            scheduler.admit(sequence, cached)
            chunk = min(sequence.num_pending, self.tokens_left)
            new = sequence.table.reserve(sequence.num_computed_tokens + chunk)
            assert new is not None, "admission counted the blocks"
            self._add(sequence, chunk, new)

    def _want_drafts(self) -> None:
        """Asks the policy for budgets and sets tokens aside for them; blocks follow last."""
        asked = [p for p in self.planned.values() if not p.asked and p.sequence.remaining_output_tokens > 1]
        if not asked:
            return
        budgets = self.scheduler.policy.budgets([p.sequence for p in asked], self.scheduler.num_running)
        for planned, budget in zip(asked, budgets, strict=True):
            planned.asked = True
            if budget.max_nodes == 0 or not self._grant_catch_up(planned):
                continue
            nodes = min(budget.max_nodes, self._tokens_for_drafts())
            if planned.is_tip and nodes > 0:
                planned.budget = self._bounded(budget, nodes, planned.sequence)
                self.tokens_left -= planned.budget.max_nodes

    def _grant_catch_up(self, planned: Planned) -> bool:
        """Lets a drafter with KV follow: the chunk itself, and what it lacks. False while it stays behind."""
        if not self.config.draft_has_kv:
            return True
        lag = planned.sequence.draft_lag + (planned.num_tokens - 1)
        weight = self.config.draft_cost
        affordable = lag if weight == 0 else min(lag, int(max(0, self._tokens_for_drafts()) / weight))
        planned.catch_up = affordable
        self.tokens_left -= min(self.tokens_left, ceil(affordable * weight))
        return affordable >= lag

    def _tokens_for_drafts(self) -> int:
        prompts_wait = bool(self.scheduler.waiting) or any(not s.is_at_tip for s in self.scheduler.running)
        kept = self.config.max_num_batched_tokens // PREFILL_SHARE if prompts_wait else 0
        return max(0, self.tokens_left - kept)

    def _bounded(self, budget: DraftBudget, nodes: int, sequence: Sequence) -> DraftBudget:
        depth = min(budget.max_depth, nodes, sequence.remaining_output_tokens - 1)
        nodes = min(nodes, depth) if budget.max_width == 1 else nodes
        return DraftBudget(sequence.row, nodes, depth, budget.max_width, budget.sources)

    def _reserve_drafts(self) -> None:
        for planned in self.planned.values():
            if planned.budget is None:
                continue
            table, end = planned.sequence.table, len(planned.sequence.tokens)
            fitting = table.num_slots + self.pool.num_free * self.pool.block_size - end
            nodes = min(planned.budget.max_nodes, fitting)
            if nodes <= 0:
                planned.budget = None
                continue
            planned.budget = self._bounded(planned.budget, nodes, planned.sequence)
            new = table.reserve(end + planned.budget.max_nodes)
            assert new is not None, "drafts are cut to the free blocks"
            planned.new_block_ids.extend(new)

    def _draft_tokens(self, planned: Planned) -> int:
        nodes = planned.budget.max_nodes if planned.budget is not None else 0
        return nodes + ceil(planned.catch_up * self.config.draft_cost)

    def _message(self) -> StepPlan:
        new, scheduled = [], []
        for planned in self.planned.values():
            sequence = planned.sequence
            entering = sequence.row in self.scheduler.unannounced
            if entering:
                self.scheduler.unannounced.discard(sequence.row)
                new.append(new_sequence(sequence))
            scheduled.append(
                ScheduledSequence(
                    row=sequence.row,
                    start=sequence.num_computed_tokens,
                    num_tokens=planned.num_tokens,
                    is_tip=planned.is_tip,
                    new_block_ids=[] if entering else planned.new_block_ids,
                    draft_catch_up=planned.catch_up,
                )
            )
        self.scheduler.in_step = {row: planned.sequence for row, planned in self.planned.items()}
        budgets = [p.budget for p in self.planned.values() if p.budget is not None]
        return StepPlan(
            step=self.scheduler.next_step(),
            new=new,
            released=self.scheduler.take_released(),
            scheduled=scheduled,
            budgets=budgets,
            limits=StepLimits(total_nodes=sum(b.max_nodes for b in budgets)),
            block_copies=self.scheduler.take_copies(),
            fresh_blocks=self.pool.take_fresh(),
        )


def new_sequence(sequence: Sequence) -> NewSequence:
    request = sequence.request
    return NewSequence(
        row=sequence.row,
        sequence_id=sequence.sequence_id,
        token_ids=list(sequence.tokens),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=list(sequence.table.blocks),
        sampling=request.sampling,
        seed=request.seed,
        choice=sequence.choice,
        stop_token_ids=request.stop_token_ids,
        max_output_tokens=request.max_output_tokens,
    )
