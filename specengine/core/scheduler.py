"""`Scheduler`: who runs in a step, and what a step's result means for sequences and blocks.

Owns the queues and is the only writer of sequences and block tables. Counts only; tokens arrive decided. Knows nothing
about tensors, text or drafting methods.

    plan = scheduler.schedule()
    scheduler.commit(plan, updates)
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import msgspec

from specengine.core.block_pool import NO_PARENT, BlockPool, block_hash
from specengine.core.block_table import BlockTable
from specengine.core.plan import SequenceUpdate, StepPlan
from specengine.core.sequence import Request, Sequence, Status
from specengine.core.speculation import SpeculationPolicy
from specengine.core.step_planner import StepPlanner
from specengine.errors import RequestError


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"  # or "priority": a lower value first, then first come
    draft_has_kv: bool = False
    draft_cost: float = 0.0  # a draft token's cost in target tokens

    def order(self, sequence: Sequence) -> tuple[int, int, int]:
        priority = sequence.request.sampling.priority if self.policy == "priority" else 0
        return priority, sequence.arrival, sequence.choice


class Scheduler:
    """`waiting` and `running` are kept in order; a sequence runs when it has a row in the worker's table."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, policy: SpeculationPolicy):
        self.config = config
        self.pool = pool
        self.policy = policy
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self.unannounced: set[int] = set()  # rows of which the worker has not heard
        self.num_preemptions = 0
        self.rolled_back_blocks = 0
        self.in_step: dict[int, Sequence] = {}  # row -> sequence, as the step under way was planned
        self._hashes: dict[str, list[bytes]] = {}  # sequence id -> hashes of its full blocks so far
        self._unforked: dict[str, int] = {}  # request id -> n, while its prompt is computed for the first choice
        self._released: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._arrivals = 0
        self._step = 0

    @property
    def capacity(self) -> int:
        """Tokens that one request may occupy."""
        return min(self.config.max_model_len, self.pool.num_blocks * self.pool.block_size)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> int:
        """Output tokens that the request may have. Raises RequestError where it can never fit."""
        prompt, longest = len(request.prompt_token_ids), self.config.max_model_len
        if prompt >= longest:
            raise RequestError(
                f"the prompt has {prompt} tokens; allowed is less than the context length of {longest} tokens",
                "prompt", "context_length_exceeded",
            )  # fmt: skip
        if prompt >= self.capacity:
            raise RequestError(
                f"the prompt has {prompt} tokens; the KV cache holds {self.capacity} tokens, and the prompt and one token must fit", "prompt"
            )
        room = self.capacity - prompt
        asked = request.sampling.max_tokens
        return room if asked is None else max(1, min(asked, room))

    def add(self, request: Request) -> Request:
        """Queues a request; returns it with `max_output_tokens` resolved."""
        request = msgspec.structs.replace(request, max_output_tokens=self.check(request))
        self._arrivals += 1
        self._enqueue(Sequence(request, 0, self._arrivals, BlockTable(self.pool)))
        if request.sampling.n > 1:
            self._unforked[request.request_id] = request.sampling.n
        return request

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends a request's sequences now and frees what they hold; returns them. Unknown ids give none."""
        found = [s for s in self.waiting + self.running if s.request.request_id == request_id]
        self._unforked.pop(request_id, None)
        for sequence in found:
            self._finish(sequence)
        return found

    def schedule(self) -> StepPlan:
        return StepPlanner(self).plan()

    def commit(self, plan: StepPlan, updates: list[SequenceUpdate]) -> list[Sequence]:
        """Applies what was kept: tokens, rollback, published blocks, forks, ends. Returns the sequences that ended."""
        ended = []
        for scheduled, update in zip(plan.scheduled, updates, strict=True):
            sequence = self.in_step[scheduled.row]
            if sequence.row < 0:  # aborted while the step ran; its row may have a new owner by now
                continue
            kept = update.token_ids
            sequence.append(kept)
            sequence.num_computed_tokens = scheduled.start + scheduled.num_tokens + max(0, len(kept) - 1)
            sequence.draft_lag = update.draft_lag
            self._publish(sequence)
            if scheduled.is_tip and sequence.choice == 0:
                self._fork(sequence)
            self.rolled_back_blocks += sequence.table.truncate(sequence.num_computed_tokens)
            if update.finish_reason is not None:
                self._finish(sequence)
                ended.append(sequence)
        return ended

    # What one step's planner uses.

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the prefix cache that this waiting sequence can share; at least its last token is computed anew."""
        if not sequence.request.reads_prefix_cache:
            return []
        usable = (len(sequence.tokens) - 1) // self.pool.block_size
        return self.pool.match_prefix(self._block_hashes(sequence, usable)[:usable])

    def admit(self, sequence: Sequence, cached: list[int]) -> None:
        """Gives a waiting sequence a row and its cached blocks."""
        if self.pool.enable_prefix_caching and sequence.request.reads_prefix_cache:
            self.pool.queried_tokens += len(sequence.tokens)
            self.pool.hit_tokens += len(cached) * self.pool.block_size
        self.waiting.remove(sequence)
        sequence.table.adopt(cached)
        sequence.num_computed_tokens = len(cached) * self.pool.block_size
        sequence.num_published_blocks = len(cached)
        self._run(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks and row; it waits again, at its place in order, to be computed anew."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._leave(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        sequence.draft_lag = 0
        self._enqueue(sequence)

    def next_step(self) -> int:
        self._step += 1
        return self._step

    def take_released(self) -> list[int]:
        released, self._released = self._released, []
        return released

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    # Inside.

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=self.config.order)

    def _run(self, sequence: Sequence) -> None:
        sequence.row = self.free_rows.pop()
        sequence.status = Status.RUNNING
        self.unannounced.add(sequence.row)
        bisect.insort(self.running, sequence, key=self.config.order)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a running sequence off its row and frees its blocks."""
        self.running.remove(sequence)
        if sequence.row in self.unannounced:
            self.unannounced.discard(sequence.row)
        else:
            self._released.append(sequence.row)
        self.free_rows.append(sequence.row)
        sequence.row = -1
        sequence.table.truncate(0)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._hashes.pop(sequence.sequence_id, None)

    def _fork(self, parent: Sequence) -> None:
        """Once a prompt is computed, its other choices begin: from shared blocks where a row and a block are free."""
        n = self._unforked.pop(parent.request.request_id, 1)
        shared = parent.num_prompt_tokens - 1  # the last prompt token is computed again, in a block of the child's own
        for choice in range(1, n):
            child = Sequence(parent.request, choice, parent.arrival, BlockTable(self.pool))
            forked = parent.table.fork(shared) if self.free_rows else None
            if forked is None:
                self._enqueue(child)
                continue
            child.table, copies = forked
            self._copies.extend(copies)
            child.num_computed_tokens = shared
            child.draft_lag = parent.draft_lag
            self._run(child)

    def _publish(self, sequence: Sequence) -> None:
        """Makes the full blocks of computed tokens findable."""
        if not self.pool.enable_prefix_caching:
            return
        full, done = sequence.num_computed_tokens // self.pool.block_size, sequence.num_published_blocks
        for block, key in zip(sequence.table.blocks[done:full], self._block_hashes(sequence, full)[done:full], strict=True):
            self.pool.publish(block, key)
        sequence.num_published_blocks = full

    def _block_hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of at least the first `count` blocks of the sequence's tokens, kept as it grows."""
        if not self.pool.enable_prefix_caching:
            return []
        hashes = self._hashes.setdefault(sequence.sequence_id, [])
        salt = sequence.request.sampling.cache_salt
        extra = (salt,) if salt else ()
        size = self.pool.block_size
        while len(hashes) < count:
            begin = len(hashes) * size
            hashes.append(block_hash(hashes[-1] if hashes else NO_PARENT, sequence.tokens[begin : begin + size], extra))
        return hashes
