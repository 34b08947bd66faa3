"""`Request` (what was asked, frozen) and `Sequence` (one choice of it, as far as it has come).

Owns tokens, progress and status. The scheduler is the only writer of a Sequence. Knows nothing about blocks' contents,
text or tensors. n > 1 is n sequences forked from one request.

    request = Request("r1", (1, 2, 3), SamplingParams(), seed=7)
    sequence = Sequence(request, choice=0, order=(0, 1, 0), table=BlockTable(pool))
"""

from __future__ import annotations

from enum import Enum

import msgspec

from specengine.core.block_pool import NO_PARENT, block_hash
from specengine.core.block_table import BlockTable
from specengine.core.speculation import RequestSpeculation
from specengine.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"  # for a row, or for the first choice's prompt
    RUNNING = "running"  # has a row in the worker's table
    PREEMPTED = "preempted"  # waits again, to be computed anew
    FINISHED = "finished"


class Request(msgspec.Struct, frozen=True):
    """What a client asked for, checked. `Scheduler.add` fills in what it resolves."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()  # EOS and the request's stop ids
    arrival_time: float = 0.0  # seconds, monotonic; for metrics. Order is the order of `Scheduler.add`
    max_output_tokens: int = 0  # resolved: max_tokens, or the room left where that is less
    speculation: RequestSpeculation | None = None  # resolved: `sampling.speculation`, checked
    adapter_id: str | None = None  # reserved: blocks of one adapter are no other's

    @property
    def priority(self) -> int:
        """Lower goes first under the policy "priority"."""
        return self.sampling.priority

    @property
    def cache_keys(self) -> tuple[str | None, ...]:
        """What keys a cached prefix beside its tokens."""
        return self.sampling.cache_salt, self.adapter_id


class Sequence:
    """Tokens of the prompt and of one output. KV exists for the first `num_computed_tokens` of them."""

    __slots__ = (
        "request", "choice", "order", "tokens", "num_prompt_tokens", "max_num_tokens", "num_computed_tokens", "status", "finish_reason",
        "row", "table", "num_published_blocks", "draft_lag", "num_preemptions", "num_cached_tokens", "_hashes",
    )  # fmt: skip

    def __init__(self, request: Request, choice: int, order: tuple[int, int, int], table: BlockTable):
        self.request = request
        self.choice = choice
        self.order = order  # unique: who is served first, and who is preempted last
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.max_num_tokens = self.num_prompt_tokens + request.max_output_tokens
        self.num_computed_tokens = 0
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.row = -1
        self.table = table
        self.num_published_blocks = 0  # leading blocks that were offered to the prefix cache
        self.draft_lag = 0  # tokens of which the drafter lacks KV, as the last step reported
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # found in the prefix cache when it was first admitted
        self._hashes: list[bytes] = []

    @property
    def sequence_id(self) -> str:
        return f"{self.request.request_id}#{self.choice}"

    @property
    def sampling(self) -> SamplingParams:
        """The request's parameters; the prompt's log-probabilities are the first choice's task alone."""
        sampling = self.request.sampling
        return sampling if self.choice == 0 or sampling.prompt_logprobs is None else sampling.replace(prompt_logprobs=None)

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt log-probabilities need every prompt row computed."""
        return self.choice > 0 or self.request.sampling.prompt_logprobs is None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def remaining_output_tokens(self) -> int:
        return self.max_num_tokens - len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is missing."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_at_tip(self) -> bool:
        """Only the last token is pending, so that the next step samples."""
        return len(self.tokens) - self.num_computed_tokens == 1

    def append(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)

    def block_hashes(self, count: int) -> list[bytes]:
        """Hashes of the first `count` full blocks of tokens; computed once, as the sequence grows."""
        hashes, size = self._hashes, self.table.block_size
        while len(hashes) < count:
            begin = len(hashes) * size
            parent = hashes[-1] if hashes else NO_PARENT
            hashes.append(block_hash(parent, self.tokens[begin : begin + size], self.request.cache_keys))
        return hashes[:count]
