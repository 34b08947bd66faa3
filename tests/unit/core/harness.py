"""A worker without a model for tests of `core`: seeded acceptance, KV contents checked, outputs known in advance.

`FakeExecutor` applies plans as the real worker does. Each KV slot of target and draft remembers which prefix it was computed
from, so a wrong block, copy, rollback or cache hit fails at the first step that reads it. The next token is a hash of the
prefix, the seed and the choice, so every request's output is the same whatever the scheduler does.

    simulation = Simulation(num_blocks=16, block_size=4)
    simulation.add("a", [1, 2, 3], max_tokens=8)
    assert simulation.run()["a#0"] == expected([1, 2, 3], 8)
"""

from __future__ import annotations

import random
from typing import Any

from specengine.core.block_pool import BlockPool
from specengine.core.plan import DraftBudget, NewSequence, ScheduledSequence, SequenceResult, SequenceUpdate, StepPlan, StepResult
from specengine.core.scheduler import Scheduler, SchedulerConfig
from specengine.core.sequence import Request, Sequence
from specengine.core.speculation import FixedBudget, SpeculationPolicy
from specengine.sampling_params import SamplingParams

VOCABULARY = 5
STOP = 0
MASK = 2**64 - 1


def extend(prefix: int, token: int) -> int:
    """The hash of a prefix and one more token."""
    return (prefix * 6364136223846793005 + token + 1442695040888963407) & MASK


def prefixes(tokens: list[int]) -> list[int]:
    """The hash of every prefix; index p includes token p."""
    found, prefix = [], 0
    for token in tokens:
        prefix = extend(prefix, token)
        found.append(prefix)
    return found


def next_token(tokens: list[int], seed: int = 1, choice: int = 0) -> int:
    mixed = extend(extend(extend(prefixes(tokens)[-1], seed), choice), 1)
    return (mixed >> 40) % VOCABULARY


def expected(prompt: list[int], max_tokens: int, *, seed: int = 1, choice: int = 0, stops: tuple[int, ...] = ()) -> list[int]:
    """What a request gives when it runs alone."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed, choice))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class Row:
    def __init__(self, new: NewSequence):
        self.new = new
        self.tokens = list(new.token_ids)
        self.blocks = list(new.block_ids)
        self.entered = True  # this is its first step


class FakeExecutor:
    """`acceptance` is the chance that a drafted node is accepted after its parent was."""

    def __init__(self, pool: BlockPool, *, acceptance: float = 0.7, seed: int = 0, draft_has_kv: bool = False, scratch: int = 0):
        self.size = pool.block_size
        self.acceptance = acceptance
        self.random = random.Random(seed)
        self.draft_has_kv = draft_has_kv
        self.scratch = scratch
        self.rows: dict[int, Row] = {}
        self.target: dict[int, int] = {}  # slot -> hash of the prefix that its KV was computed from
        self.draft: dict[int, int] = {}
        self.idle_budgets = 0  # budgets for a draft that lacked KV: only where the lag was not known yet

    def execute(self, plan: StepPlan) -> StepResult:
        budgets = {b.row: b for b in plan.budgets}
        self._apply(plan)
        for s in plan.scheduled:
            self._write(self.rows[s.row], s, budgets.get(s.row))
        return StepResult(plan.step, [self._advance(self.rows[s.row], s, budgets.get(s.row)) for s in plan.scheduled])

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            del self.rows[row]
        for block in plan.fresh_blocks:
            for slot in range(block * self.size, (block + 1) * self.size):
                self.draft.pop(slot, None)
        for kv in (self.target, self.draft):
            read = [(destination, o, kv.get(source * self.size + o)) for source, destination in plan.block_copies for o in range(self.size)]
            kv.update({destination * self.size + o: value for destination, o, value in read if value is not None})
        for new in plan.new:
            assert new.row not in self.rows
            self.rows[new.row] = Row(new)
        for s in plan.scheduled:
            kept = -(-s.start // self.size)
            assert kept <= len(self.rows[s.row].blocks)
            self.rows[s.row].blocks[kept:] = s.new_block_ids

    def slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.size] * self.size + position % self.size

    def _write(self, row: Row, s: ScheduledSequence, budget: DraftBudget | None) -> None:
        known = prefixes(row.tokens)
        end = s.start + s.num_tokens
        assert s.is_tip == (end == len(row.tokens))
        for position in range(s.start, end):
            self.target[self.slot(row, position)] = known[position]
        if budget is not None:
            for node in range(budget.max_nodes + self.scratch):
                self.target[self.slot(row, end + node)] = self.draft[self.slot(row, end + node)] = -1

    def _advance(self, row: Row, s: ScheduledSequence, budget: DraftBudget | None) -> SequenceResult:
        known = prefixes(row.tokens)
        end = s.start + s.num_tokens
        assert [self.target.get(self.slot(row, p)) for p in range(end)] == known[:end], f"{row.new.sequence_id} reads foreign KV"
        drafts = self._catch_up(row, s, known, budget)
        row.entered = False
        if not s.is_tip:
            return SequenceResult(s.row, draft_lag=self._lag(row, end))
        emitted: list[int] = []
        while drafts and len(emitted) < drafts and self.random.random() < self.acceptance:
            self._emit(row, emitted)
            self.target[self.slot(row, end + len(emitted) - 1)] = prefixes(row.tokens)[-1]
            if self.draft_has_kv and len(emitted) < drafts:  # a leaf is never expanded
                self.draft[self.slot(row, end + len(emitted) - 1)] = prefixes(row.tokens)[-1]
        self._emit(row, emitted)
        sources = ["fake"] * (len(emitted) - 1) + ["target"]
        return SequenceResult(s.row, emitted, sources, num_drafted=drafts, draft_lag=self._lag(row, len(row.tokens) - 1))

    def _emit(self, row: Row, emitted: list[int]) -> None:
        token = next_token(row.tokens, row.new.seed, row.new.choice)
        row.tokens.append(token)
        emitted.append(token)

    def _catch_up(self, row: Row, s: ScheduledSequence, known: list[int], budget: DraftBudget | None) -> int:
        """Computes what was granted; returns how deep the draft may go."""
        if not self.draft_has_kv:
            return budget.max_depth if budget is not None else 0
        end = s.start + s.num_tokens
        computed = self._draft_computed(row, known, end)
        for position in range(computed, min(end, computed + s.draft_catch_up)):
            self.draft[self.slot(row, position)] = known[position]
        if budget is None:
            return 0
        if computed + s.draft_catch_up < end - 1:
            assert row.entered, "a draft that is known to lag has a budget"
            self.idle_budgets += 1
            return 0
        self.draft[self.slot(row, end - 1)] = known[end - 1]
        return budget.max_depth

    def _draft_computed(self, row: Row, known: list[int], end: int) -> int:
        position = 0
        while position < end and self.draft.get(self.slot(row, position)) == known[position]:
            position += 1
        return position

    def _lag(self, row: Row, end: int) -> int:
        return end - self._draft_computed(row, prefixes(row.tokens), end) if self.draft_has_kv else 0


class Simulation:
    """The engine's four lines around a FakeExecutor; `check` runs after every half of a step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        caching: bool = True,
        policy: SpeculationPolicy | None = None,
        acceptance: float = 0.7,
        executor_seed: int = 0,
        scratch: int = 0,
        order: str = "fcfs",
        **config: Any,
    ):
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "policy": order, **config}
        if scratch:
            settings["draft_scratch_slots"] = lambda nodes: scratch
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(SchedulerConfig(**settings), self.pool, policy or FixedBudget(0))
        has_kv = self.scheduler.config.draft_has_kv
        self.executor = FakeExecutor(self.pool, acceptance=acceptance, seed=executor_seed, draft_has_kv=has_kv, scratch=scratch)
        self.requests: dict[str, Request] = {}
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, list[int]] = {}
        self.plans: list[StepPlan] = []

    def add(self, request_id: str, prompt: list[int], *, seed: int = 1, stops: tuple[int, ...] = (), **sampling: Any) -> Request:
        params = SamplingParams(**sampling)
        request = self.scheduler.add(Request(request_id, tuple(prompt), params, seed, stop_token_ids=stops))
        self.requests[request_id] = request
        return request

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        check_plan(self.scheduler, plan)
        check_blocks(self.scheduler)
        return plan

    def finish_step(self, plan: StepPlan) -> list[Sequence]:
        result = self.executor.execute(plan)
        self.sequences.update({s.sequence_id: s for s in self.scheduler.in_step.values()})
        ended = self.scheduler.commit(plan, [self.decide(r) for r in result.sequences], result)
        check_blocks(self.scheduler)
        check_progress(self.scheduler, plan)
        for sequence in ended:
            self.outputs[sequence.sequence_id] = sequence.tokens[sequence.num_prompt_tokens :]
        return ended

    def decide(self, result: SequenceResult) -> SequenceUpdate:
        """The output processor: a stop token or the length ends a sequence and cuts what follows."""
        sequence = self.scheduler.in_step[result.row]
        kept, reason = list(result.token_ids), None
        for count, token in enumerate(result.token_ids, 1):
            if token in sequence.request.stop_token_ids:
                kept, reason = kept[:count], "stop"
                break
            if sequence.num_output_tokens + count == sequence.request.max_output_tokens:
                kept, reason = kept[:count], "length"
                break
        return SequenceUpdate(result.row, kept, reason, result.draft_lag)

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.finish_step(plan)
        return plan

    def run(self, max_steps: int = 2000) -> dict[str, list[int]]:
        """Runs until nothing is left; returns outputs by sequence id."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                self.check_idle()
                return self.outputs
            plan = self.step()
            assert plan.scheduled, "a step with work computes something"
        raise AssertionError(f"not finished after {max_steps} steps")

    def check_idle(self) -> None:
        """Nothing is left of any request, here or in the worker."""
        scheduler = self.scheduler
        assert self.pool.num_used == 0
        assert scheduler.num_running == scheduler.num_waiting == 0
        if scheduler.has_releases:
            self.finish_step(self.schedule())
        assert not scheduler.has_releases and not self.executor.rows
        assert not scheduler._requests and not scheduler._held and not scheduler._unannounced and not scheduler.in_step
        assert len(scheduler.free_rows) == min(scheduler.config.max_num_seqs, scheduler.config.max_num_batched_tokens)

    def solo(self, sequence_id: str) -> list[int]:
        request_id, _, choice = sequence_id.rpartition("#")
        request = self.requests[request_id]
        prompt, room = list(request.prompt_token_ids), request.max_output_tokens
        return expected(prompt, room, seed=request.seed, choice=int(choice), stops=request.stop_token_ids)

    def assert_outputs(self) -> None:
        """Every sequence gave what it gives alone."""
        assert set(self.outputs) == {f"{r.request_id}#{i}" for r in self.requests.values() for i in range(r.sampling.n)}
        for sequence_id, output in self.outputs.items():
            assert output == self.solo(sequence_id), sequence_id


def cost(scheduler: Scheduler, plan: StepPlan) -> float:
    """Tokens of a step as the budget counts them."""
    rows = sum(s.num_tokens for s in plan.scheduled) + sum(b.max_nodes for b in plan.budgets)
    return rows + scheduler.config.draft_cost * sum(s.draft_catch_up for s in plan.scheduled)


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """A plan keeps to the budgets, and every row writes only blocks of its sequence alone."""
    config, pool = scheduler.config, scheduler.pool
    assert cost(scheduler, plan) <= config.max_num_batched_tokens + 1e-6
    assert len({s.row for s in plan.scheduled}) == len(plan.scheduled)
    assert {n.row for n in plan.new} <= {s.row for s in plan.scheduled}
    budgets = {b.row: b for b in plan.budgets}
    assert plan.limits.total_nodes == sum(b.max_nodes for b in plan.budgets)
    for s in plan.scheduled:
        sequence, budget = scheduler.in_step[s.row], budgets.pop(s.row, None)
        nodes, end = 0, s.start + s.num_tokens
        assert s.start == sequence.num_computed_tokens and s.num_tokens > 0
        assert s.draft_catch_up <= sequence.draft_lag + s.num_tokens
        if budget is not None:
            assert s.is_tip and 0 < budget.max_depth <= budget.max_nodes
            assert budget.max_depth <= sequence.remaining_output_tokens - 1
            assert end - 1 + budget.max_depth < config.max_model_len
            nodes = budget.max_nodes + config.scratch_slots(budget.max_nodes)
        assert end + nodes <= sequence.table.num_slots
        assert len(sequence.table) <= -(-config.max_model_len // pool.block_size)
        for block in sequence.table.blocks[s.start // pool.block_size :]:
            assert pool.ref_counts[block] == 1 and not pool.is_published(block)
    assert not budgets, "only tips of the step draft"


def check_blocks(scheduler: Scheduler) -> None:
    """Reference counts are the tables' sums; free and used are all; published blocks are full of committed tokens."""
    pool = scheduler.pool
    counts = [0] * pool.num_blocks
    for sequence in [s for choices in scheduler._requests.values() for s in choices]:
        computed = sequence.num_computed_tokens
        for index, block in enumerate(sequence.table.blocks):
            counts[block] += 1
            if pool.is_published(block):
                assert (index + 1) * pool.block_size <= computed <= len(sequence.tokens)
                assert pool._hash_of[block] == sequence.block_hashes(index + 1)[index]
        assert (sequence.row >= 0) == (sequence in scheduler.running)
    assert counts == pool.ref_counts
    assert set(pool._free) == {block for block, count in enumerate(counts) if count == 0}
    assert pool.num_free + pool.num_used == pool.num_blocks
    assert {block: key for key, block in pool._by_hash.items()} == pool._hash_of
    assert scheduler.running == sorted(scheduler.running, key=lambda s: s.order)
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda s: s.order)


def check_progress(scheduler: Scheduler, plan: StepPlan) -> None:
    """After a commit: tips lack KV of their last token alone, and nobody keeps a block beyond the computed tokens."""
    for s in plan.scheduled:
        sequence = scheduler.in_step[s.row]
        if s.is_tip and sequence.row == s.row:
            assert sequence.num_computed_tokens == len(sequence.tokens) - 1
    for sequence in scheduler.running:
        assert len(sequence.table) == sequence.table.blocks_for(sequence.num_computed_tokens)
