"""`StepPlanner`: one pass of scheduling, from queues to a `StepPlan`.

Owns the step's budget of tokens and the order in which tokens and blocks are spent. Lives for one step; the scheduler keeps
everything that outlives it.

    plan = StepPlanner(scheduler).plan()

Tokens go to tip sequences (one row each), their drafts, prompt chunks of running sequences, waiting sequences, and drafts
behind a prompt's last chunk. Blocks go to chain rows in order, to waiting sequences, and to drafts last, so that drafting
neither preempts a sequence nor keeps one out.
"""

from __future__ import annotations

import sys
from math import floor
from typing import TYPE_CHECKING

from msgspec import structs

from specengine.core.plan import DraftBudget, NewSequence, ScheduledSequence, StepPlan
from specengine.core.sequence import Sequence
from specengine.core.speculation import Load

if TYPE_CHECKING:
    from specengine.core.scheduler import Scheduler

PREFILL_SHARE = 4  # a quarter of the tokens is kept from drafts while prompts wait, so that they always advance
ROUNDING = 1e-9


class TokenBudget:
    """A step's tokens. `tokens` counts rows of the target; `catch_up` those of a draft, which weigh `weight` each."""

    __slots__ = ("total", "weight", "tokens", "catch_up")

    def __init__(self, total: int, weight: float):
        self.total = total
        self.weight = weight
        self.tokens = 0
        self.catch_up = 0

    def room(self, kept: int = 0) -> int:
        """Tokens left when `kept` are not to be touched."""
        return max(0, floor(self._left(kept)))

    def catch_up_room(self, kept: int = 0) -> int:
        """Catch-up tokens that may still be granted."""
        return max(0, floor(self._left(kept) / self.weight)) if self.weight > 0 else sys.maxsize

    def _left(self, kept: int) -> float:
        return self.total - kept - self.tokens - self.weight * self.catch_up + ROUNDING


class Share:
    """What a sequence gets in this step."""

    __slots__ = ("sequence", "num_tokens", "was_at_tip", "catch_up", "budget")

    def __init__(self, sequence: Sequence):
        self.sequence = sequence
        self.num_tokens = 0
        self.was_at_tip = sequence.is_at_tip
        self.catch_up = 0
        self.budget: DraftBudget | None = None

    @property
    def is_tip(self) -> bool:
        return self.num_tokens == self.sequence.num_pending


class StepPlanner:
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.config = scheduler.config
        self.pool = scheduler.pool
        self.policy = scheduler.policy
        self.budget = TokenBudget(self.config.max_num_batched_tokens, self.config.draft_cost)
        self.shares = [Share(s) for s in scheduler.running]  # in order
        self.load = Load(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_tokens=min(sum(s.num_pending for s in scheduler.running), self.config.max_num_batched_tokens),
            kv_usage=self.pool.usage,
        )

    def plan(self) -> StepPlan:
        tips = [share for share in self.shares if share.was_at_tip]
        chunks = [share for share in self.shares if not share.was_at_tip]
        for share in tips:
            share.num_tokens = 1
        self.budget.tokens = len(tips)  # fits: no more sequences run than a step has tokens
        self._want_drafts(tips, kept=self._kept_for_prompts(chunks))
        for share in chunks:
            self._cut_chunk(share)
        self._secure_blocks()
        self._admit()
        self._want_drafts([share for share in self.shares if share.is_tip and share.budget is None and not share.was_at_tip])
        self._place_drafts()
        return self._message()

    def _kept_for_prompts(self, chunks: list[Share]) -> int:
        """Tokens that drafts leave for prompts: as many as wait, at most a share of the step."""
        most = max(1, self.config.max_num_batched_tokens // PREFILL_SHARE)
        waiting = sum(share.sequence.num_pending for share in chunks)
        if waiting < most and self.scheduler.waiting and self.scheduler.free_rows:
            waiting += self.scheduler.waiting[0].num_pending
        return min(waiting, most)

    # Tokens.

    def _follows(self, sequence: Sequence) -> bool:
        """Whether a drafter's KV is to follow this sequence."""
        return self.config.draft_has_kv and sequence.remaining_output_tokens > 1 and self.policy.is_on(sequence, self.load)

    def _cut_chunk(self, share: Share) -> None:
        """As many pending tokens as there is room for, and the drafter's catch-up with them and with what it lacks."""
        room, sequence = self.budget.room(), share.sequence
        if room == 0:
            return
        follows = self._follows(sequence)
        fitting = max(1, floor(room / (1 + self.budget.weight))) if follows else room
        share.num_tokens = min(sequence.num_pending, fitting)
        self.budget.tokens += share.num_tokens
        if follows:
            share.catch_up = min(sequence.draft_lag + share.num_tokens, self.budget.catch_up_room())
            self.budget.catch_up += share.catch_up

    def _want_drafts(self, shares: list[Share], kept: int = 0) -> None:
        """Asks the policy for budgets and sets tokens aside for them, the same for all where they are short."""
        shares = [share for share in shares if share.sequence.remaining_output_tokens > 1]
        if not shares:
            return
        self._catch_up_tips(shares, kept)
        budgets = self.policy.budgets([share.sequence for share in shares], self.load)
        wanting = []
        for share, budget in zip(shares, budgets, strict=True):
            if budget.max_nodes > 0 and self._draft_is_current(share):
                share.budget = self._bounded(budget, budget.max_nodes, share.sequence)
                if share.budget is not None:
                    wanting.append(share)
        self._share_out(wanting, self.budget.room(kept))

    def _share_out(self, wanting: list[Share], room: int) -> None:
        for served, share in enumerate(wanting):
            assert share.budget is not None
            if room < share.budget.max_nodes * (len(wanting) - served):
                share.budget = self._bounded(share.budget, -(-room // (len(wanting) - served)), share.sequence)
            if share.budget is not None:
                room -= share.budget.max_nodes
                self.budget.tokens += share.budget.max_nodes

    def _catch_up_tips(self, shares: list[Share], kept: int) -> None:
        if not self.config.draft_has_kv:
            return
        for share in shares:
            lag = share.sequence.draft_lag
            if lag > 0 and share.was_at_tip and self._follows(share.sequence):
                share.catch_up = min(lag, self.budget.catch_up_room(kept))
                self.budget.catch_up += share.catch_up

    def _draft_is_current(self, share: Share) -> bool:
        """A drafter that lacks KV of a token before the last would draft from a context that it hasn't read."""
        return not self.config.draft_has_kv or share.catch_up >= share.sequence.draft_lag + share.num_tokens - 1

    def _bounded(self, budget: DraftBudget, nodes: int, sequence: Sequence) -> DraftBudget | None:
        """The budget cut to `nodes`, to the output that is left, and to the nodes that a tree of its shape can have.

        A path of d nodes gives d + 1 tokens at most, and max_output_tokens ends within the context, so no position lies beyond it.
        """
        nodes = min(nodes, budget.max_nodes)
        depth = min(budget.max_depth, sequence.remaining_output_tokens - 1, nodes)
        if depth <= 0:
            return None
        nodes = min(nodes, largest_tree(budget.max_width, depth))
        if nodes == budget.max_nodes and depth == budget.max_depth:
            return budget
        return structs.replace(budget, max_nodes=nodes, max_depth=depth)

    # Blocks.

    def _secure_blocks(self) -> None:
        """Blocks for every chain row, in order; where not one token fits, the last in order gives its blocks up.

        The last sequence itself is only left out of the step. Either way it can't come back before blocks are freed: it needs all
        that it held.
        """
        shares, index = self.shares, 0
        while index < len(shares):
            share = shares[index]
            table, computed = share.sequence.table, share.sequence.num_computed_tokens
            if table.num_slots < computed + share.num_tokens:
                slots = table.num_slots + self.pool.num_free * self.pool.block_size
                fitting = min(share.num_tokens, slots - computed)
                if fitting == 0 and index < len(shares) - 1:
                    self.scheduler.preempt(shares.pop().sequence)
                    continue
                share.num_tokens = fitting
                share.catch_up = min(share.catch_up, share.sequence.draft_lag + fitting)
                table.reserve(computed + fitting)
            index += 1

    def _admit(self) -> None:
        """Waiting sequences in order, as long as rows, tokens and blocks for all of their tokens last; none overtakes another."""
        scheduler = self.scheduler
        while scheduler.waiting and scheduler.free_rows and self.budget.room() > 0:
            sequence = scheduler.waiting[0]
            cached = scheduler.cached_prefix(sequence)
            shared = sum(self.pool.ref_counts[block] > 0 for block in cached)
            if sequence.table.blocks_for(len(sequence.tokens)) - shared > self.pool.num_free:
                return
            scheduler.admit(sequence, cached)
            share = Share(sequence)
            share.was_at_tip = False
            self._cut_chunk(share)
            sequence.table.reserve(sequence.num_computed_tokens + share.num_tokens)
            self.shares.append(share)

    def _place_drafts(self) -> None:
        """Slots for nodes and the drafter's scratch, from free blocks alone; budgets shrink to what is there."""
        size = self.pool.block_size
        longest = -(-self.config.max_model_len // size) * size  # slots of the longest table that a worker has
        for share in self.shares:
            budget, table = share.budget, share.sequence.table
            if budget is None:
                continue
            end, nodes = len(share.sequence.tokens), budget.max_nodes
            if end + nodes + self.config.scratch_slots(nodes) <= table.num_slots:
                continue
            slots = min(table.num_slots + self.pool.num_free * size, longest) - end
            while nodes > 0 and nodes + self.config.scratch_slots(nodes) > slots:
                nodes -= 1
            share.budget = self._bounded(budget, nodes, share.sequence)
            if share.budget is not None:
                nodes = share.budget.max_nodes
                table.reserve(end + nodes + self.config.scratch_slots(nodes))

    # The message.

    def _message(self) -> StepPlan:
        scheduler = self.scheduler
        shares = [share for share in self.shares if share.num_tokens > 0]
        new = [new_sequence(share.sequence) for share in shares if scheduler.announce(share.sequence)]
        scheduler.in_step = {share.sequence.row: share.sequence for share in shares}
        budgets = [share.budget for share in shares if share.budget is not None]
        return StepPlan(
            step=scheduler.next_step(),
            new=new,
            released=scheduler.take_released(),
            scheduled=[self._scheduled(share) for share in shares],
            budgets=budgets,
            limits=self.policy.limits(sum(b.max_nodes for b in budgets)),
            block_copies=scheduler.take_copies(),
            fresh_blocks=self.pool.take_fresh(),
        )

    def _scheduled(self, share: Share) -> ScheduledSequence:
        """The worker keeps the blocks of the first `start` tokens; the new ones follow them, also after a rollback."""
        sequence = share.sequence
        start = sequence.num_computed_tokens
        return ScheduledSequence(
            row=sequence.row,
            start=start,
            num_tokens=share.num_tokens,
            is_tip=share.is_tip,
            new_block_ids=sequence.table.blocks[-(-start // self.pool.block_size) :],
            draft_catch_up=share.catch_up,
        )


def largest_tree(width: int, depth: int) -> int:
    """Nodes of the full tree of `depth` levels in which every node, the root included, has `width` children."""
    return depth if width == 1 else (width ** (depth + 1) - width) // (width - 1)


def new_sequence(sequence: Sequence) -> NewSequence:
    """The sequence as it enters the worker's table, with the blocks of its computed tokens."""
    request, computed = sequence.request, sequence.num_computed_tokens
    return NewSequence(
        row=sequence.row,
        sequence_id=sequence.sequence_id,
        token_ids=list(sequence.tokens),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=computed,
        block_ids=sequence.table.blocks[: sequence.table.blocks_for(computed)],
        sampling=sequence.sampling,
        seed=request.seed,
        choice=sequence.choice,
        stop_token_ids=request.stop_token_ids,
        max_output_tokens=request.max_output_tokens,
    )
