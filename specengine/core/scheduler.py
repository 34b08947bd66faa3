"""`Scheduler`: who runs in a step, and what a step's result means for sequences and blocks.

Owns the queues and is the only writer of sequences and block tables. Counts only; tokens arrive decided. Knows nothing
about tensors, text or drafting methods.

    plan = scheduler.schedule()
    scheduler.commit(plan, updates)

After every `commit`, for every running sequence:

- its table holds exactly the blocks of its computed tokens: `len(table) == ceil(num_computed_tokens / block_size)`;
- after a step at its tip, `num_computed_tokens == len(tokens) - 1` (the last token has no KV yet);
- the block that its next row is written to is its own (reference count 1), or not taken yet;
- published blocks are full of committed tokens, and `sum(ref_counts)` is the number of blocks in tables.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from msgspec import structs

from specengine.core.block_pool import BlockPool
from specengine.core.block_table import BlockTable
from specengine.core.plan import ScheduledSequence, SequenceUpdate, StepPlan, StepResult
from specengine.core.sequence import Request, Sequence, Status
from specengine.core.speculation import RequestSpeculation, SpeculationPolicy
from specengine.core.step_planner import StepPlanner
from specengine.errors import ConfigError, EngineError, RequestError

POLICIES = ("fcfs", "priority")
BY_ORDER = attrgetter("order")


@dataclass(frozen=True)
class SchedulerConfig:
    """Raises ConfigError for a value that is not allowed. The pool has its own sizes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"  # or "priority": a lower value first, then first come
    draft_has_kv: bool = False
    draft_cost: float = 0.0  # a draft token's cost in target tokens
    draft_scratch_slots: Callable[[int], int] | None = None  # slots that the drafter needs beside a budget's nodes

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; allowed is at least 1")
        if self.policy not in POLICIES:
            raise ConfigError(f"--scheduling-policy is {self.policy!r}; allowed is {', '.join(POLICIES)}")
        if not 0 <= self.draft_cost < float("inf"):
            raise ConfigError(f"the draft's cost is {self.draft_cost}; allowed is a finite number of at least 0")

    def scratch_slots(self, nodes: int) -> int:
        """Slots to reserve beside those of `nodes` drafted nodes; none without nodes."""
        return self.draft_scratch_slots(nodes) if nodes > 0 and self.draft_scratch_slots is not None else 0


class Scheduler:
    """`waiting` and `running` are kept in order; a sequence runs when it has a row in the worker's table.

    No more sequences run than a step has tokens, so every sequence at its tip is served in every step.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, policy: SpeculationPolicy):
        self.config = config
        self.pool = pool
        self.policy = policy
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_rows = list(range(min(config.max_num_seqs, config.max_num_batched_tokens)))[::-1]
        self.num_preemptions = 0
        self.rolled_back_blocks = 0
        self.in_step: dict[int, Sequence] = {}  # row -> sequence, as the last step was planned
        self._requests: dict[str, list[Sequence]] = {}  # request id -> choices that have not ended
        self._held: dict[str, list[Sequence]] = {}  # request id -> choices that wait for the first one's prompt
        self._unannounced: set[int] = set()  # rows of which the worker has not heard
        self._released: list[int] = []
        self._copies: list[tuple[Sequence, tuple[int, int]]] = []
        self._arrivals = 0
        self._step = 0
        self._is_open = False  # a step is planned and not committed

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may occupy."""
        return min(self.config.max_model_len, self.pool.num_blocks * self.pool.block_size)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something. Rows to release are told with the next plan, see `has_releases`."""
        return bool(self.waiting or self.running)

    @property
    def has_releases(self) -> bool:
        """Whether the worker still holds rows of sequences that ended; a plan that only releases is legal."""
        return bool(self._released)

    def check(self, request: Request) -> int:
        """Output tokens that the request may have. Raises RequestError where it can never fit."""
        prompt, longest = len(request.prompt_token_ids), self.config.max_model_len
        if prompt < 1:
            raise RequestError("the prompt is empty; allowed is at least one token", "prompt")
        if prompt >= longest:
            message = f"the prompt has {prompt} tokens; allowed is less than the context length of {longest} tokens"
            raise RequestError(message, "prompt", "context_length_exceeded")
        if prompt >= self.capacity:
            message = f"the prompt has {prompt} tokens; the KV cache holds {self.capacity} tokens, and the prompt and one token must fit"
            raise RequestError(message, "prompt")
        RequestSpeculation.parse(request.sampling.speculation)
        room = self.capacity - prompt
        asked = request.sampling.max_tokens
        return room if asked is None else max(1, min(asked, room))

    def add(self, request: Request) -> Request:
        """Queues a request; returns it with `max_output_tokens` and `speculation` resolved.

        Raises RequestError where it can never fit, or where its id is in use.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id is {request.request_id!r}; allowed is an id that no running request has", "request_id")
        speculation = RequestSpeculation.parse(request.sampling.speculation)
        request = structs.replace(request, max_output_tokens=self.check(request), speculation=speculation)
        self._arrivals += 1
        priority = request.priority if self.config.policy == "priority" else 0
        choices = [Sequence(request, i, (priority, self._arrivals, i), BlockTable(self.pool)) for i in range(request.sampling.n)]
        self._requests[request.request_id] = choices
        self._enqueue(choices[0])
        if len(choices) > 1:
            self._held[request.request_id] = choices[1:]
        return request

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends a request's sequences now and frees what they hold, whatever they do; returns those that had not ended.

        Unknown ids give none. Safe between `schedule` and `commit`: the step's result for them is passed over.
        """
        found = list(self._requests.get(request_id, ()))
        for sequence in found:
            self._finish(sequence, "abort")
        return found

    def schedule(self) -> StepPlan:
        """Plans the next step. Raises EngineError while the last one is not committed."""
        if self._is_open:
            raise EngineError(f"step {self._step} is planned and not committed")
        self._is_open = True
        return StepPlanner(self).plan()

    def commit(self, plan: StepPlan, updates: list[SequenceUpdate], result: StepResult | None = None) -> list[Sequence]:
        """Applies what was kept: tokens, rollback, published blocks, forks, ends. Returns the sequences that ended.

        One update for every scheduled row; those of sequences aborted meanwhile are passed over. A tip gives at least one
        token unless it ends. With `result`, the policy learns from it. Raises EngineError for an update that contradicts the plan.
        """
        if not self._is_open or plan.step != self._step:
            raise EngineError(f"step {plan.step} can't be committed; the step under way is {self._step if self._is_open else 'none'}")
        by_row = {update.row: update for update in updates}
        if by_row.keys() != self.in_step.keys():
            raise EngineError(f"step {plan.step} scheduled the rows {sorted(self.in_step)} and got updates for {sorted(by_row)}")
        self._is_open = False
        ended = []
        for scheduled in plan.scheduled:
            sequence = self.in_step[scheduled.row]
            if sequence.row == scheduled.row:  # else aborted while the step ran
                self._advance(sequence, scheduled, by_row[scheduled.row])
                if sequence.status is Status.FINISHED:
                    ended.append(sequence)
        if result is not None:
            self.policy.observe(result)
        return ended

    # What one step's planner uses.

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the prefix cache that this waiting sequence can share; at least its last token is computed anew."""
        if not self.pool.enable_prefix_caching or not sequence.reads_prefix_cache:
            return []
        return self.pool.match_prefix(sequence.block_hashes((len(sequence.tokens) - 1) // self.pool.block_size))

    def admit(self, sequence: Sequence, cached: list[int]) -> None:
        """Gives the first waiting sequence a row and its cached blocks."""
        num_cached = len(cached) * self.pool.block_size
        if self.pool.enable_prefix_caching and sequence.reads_prefix_cache:
            self.pool.count_query(len(sequence.tokens), num_cached)
        self.waiting.remove(sequence)
        sequence.table.adopt(cached)
        sequence.num_computed_tokens = num_cached
        sequence.num_published_blocks = len(cached)
        if sequence.status is Status.WAITING:
            sequence.num_cached_tokens = num_cached
        self._run(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks and row; it waits again, at its place in order, to be computed anew."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._leave(sequence)
        sequence.num_computed_tokens = 0
        sequence.draft_lag = 0
        sequence.status = Status.PREEMPTED
        self._enqueue(sequence)

    def announce(self, sequence: Sequence) -> bool:
        """Whether the worker hears of this sequence's row for the first time."""
        if sequence.row not in self._unannounced:
            return False
        self._unannounced.discard(sequence.row)
        return True

    def next_step(self) -> int:
        self._step += 1
        return self._step

    def take_released(self) -> list[int]:
        released, self._released = self._released, []
        return released

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies for forks that are still there; who left since has no use for its block."""
        copies, self._copies = self._copies, []
        return [copy for child, copy in copies if child.row in self.in_step]

    # Inside.

    def _advance(self, sequence: Sequence, scheduled: ScheduledSequence, update: SequenceUpdate) -> None:
        self._check_update(sequence, scheduled, update)
        kept = update.token_ids
        sequence.append(kept)
        sequence.num_computed_tokens = scheduled.start + scheduled.num_tokens + max(0, len(kept) - 1)
        sequence.draft_lag = update.draft_lag
        if update.finish_reason == "error":
            self.pool.unpublish(sequence.table.blocks)  # its KV may hold what made the logits non-finite
        else:
            self._publish(sequence)
        if scheduled.is_tip and update.finish_reason != "error":
            self._fork(sequence)
        if (table := sequence.table).num_slots - sequence.num_computed_tokens >= table.block_size:
            self.rolled_back_blocks += len(table.truncate(sequence.num_computed_tokens))
        if update.finish_reason is not None:
            self._finish(sequence, update.finish_reason)

    def _check_update(self, sequence: Sequence, scheduled: ScheduledSequence, update: SequenceUpdate) -> None:
        count, left = len(update.token_ids), sequence.remaining_output_tokens
        ends = update.finish_reason is not None
        if count > left or (count == left and not ends):
            fault = f"{left} were left, and the last of them ends it"
        elif count > 0 and not scheduled.is_tip:
            fault = "its prompt is not computed yet"
        elif count == 0 and scheduled.is_tip and not ends:
            fault = "a step at the tip gives at least one"
        elif scheduled.start + scheduled.num_tokens + count - 1 > sequence.table.num_slots:
            fault = f"it has {sequence.table.num_slots} slots"
        else:
            return
        raise EngineError(f"step {self._step} gave {sequence.sequence_id} {count} tokens; {fault}")

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=BY_ORDER)

    def _run(self, sequence: Sequence) -> None:
        sequence.row = self.free_rows.pop()
        sequence.status = Status.RUNNING
        self._unannounced.add(sequence.row)
        bisect.insort(self.running, sequence, key=BY_ORDER)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a running sequence off its row and frees its blocks."""
        self.running.remove(sequence)
        if sequence.row in self._unannounced:
            self._unannounced.discard(sequence.row)
        else:
            self._released.append(sequence.row)
        self.free_rows.append(sequence.row)
        sequence.row = -1
        sequence.table.truncate(0)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        request_id = sequence.request.request_id
        choices = self._requests[request_id]
        choices.remove(sequence)
        if not choices:
            del self._requests[request_id]
        for child in self._held.pop(request_id, ()):  # the first choice ended before its prompt did
            self._enqueue(child)

    def _fork(self, parent: Sequence) -> None:
        """Once a prompt is computed, its other choices begin: from shared blocks where a row and a block are free.

        The last prompt token is computed again, in a block of the child's own. A child that finds no place waits like any other.
        """
        for child in self._held.pop(parent.request.request_id, ()):
            shared = parent.num_prompt_tokens - 1
            overtakes = bool(self.waiting) and self.waiting[0].order < child.order
            forked = parent.table.fork(shared) if self.free_rows and self.pool.num_free and not overtakes else None
            if forked is None:
                self._enqueue(child)
                continue
            child.table, copies = forked
            child.num_computed_tokens = shared
            child.num_published_blocks = shared // self.pool.block_size
            child.draft_lag = parent.draft_lag
            self._copies += [(child, copy) for copy in copies]
            self._run(child)

    def _publish(self, sequence: Sequence) -> None:
        """Makes the full blocks of computed tokens findable."""
        full, done = sequence.num_computed_tokens // self.pool.block_size, sequence.num_published_blocks
        if full <= done or not self.pool.enable_prefix_caching:
            return
        hashes = sequence.block_hashes(full)
        for index in range(done, full):
            self.pool.publish(sequence.table.blocks[index], hashes[index])
        sequence.num_published_blocks = full
