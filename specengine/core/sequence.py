"""`Request` (what was asked, frozen) and `Sequence` (one choice of it, as far as it has come).

Owns tokens, progress and status. The scheduler is the only writer of a Sequence. Knows nothing about blocks' contents,
text or tensors. n > 1 is n sequences forked from one request.

    request = Request("r1", (1, 2, 3), SamplingParams(), seed=7)
    sequence = Sequence(request, choice=0)
"""

from __future__ import annotations

from enum import Enum

import msgspec

from specengine.core.block_table import BlockTable
from specengine.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request(msgspec.Struct, frozen=True):
    """`max_output_tokens` is resolved by the scheduler: max_tokens, or the room left where that is less."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    max_output_tokens: int = 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt log-probabilities need every prompt row computed."""
        return self.sampling.prompt_logprobs is None


class Sequence:
    """Tokens of the prompt and of one output. KV exists for the first `num_computed_tokens` of them."""

    def __init__(self, request: Request, choice: int, arrival: int, table: BlockTable):
        self.request = request
        self.choice = choice
        self.arrival = arrival  # number of the request's arrival: first come, first served
        self.tokens = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.status = Status.WAITING
        self.row = -1
        self.table = table
        self.num_published_blocks = 0  # leading blocks that were offered to the prefix cache
        self.draft_lag = 0
        self.num_preemptions = 0

    @property
    def sequence_id(self) -> str:
        return f"{self.request.request_id}#{self.choice}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is missing."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_at_tip(self) -> bool:
        """Only the last token is pending, so that the next step samples."""
        return self.num_pending == 1

    @property
    def remaining_output_tokens(self) -> int:
        return self.request.max_output_tokens - self.num_output_tokens

    def append(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
