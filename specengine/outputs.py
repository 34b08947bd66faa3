"""What a generation returns, under vLLM's names. Data only.

output = llm.generate("Hello")[0]
output.outputs[0].text, output.outputs[0].finish_reason, output.metrics.acceptance_rate
"""

from __future__ import annotations

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    """A token's raw log-probability under the target (before bias, penalties, grammar and temperature)."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


class Provenance(msgspec.Struct, frozen=True):
    """Where one output token came from: `target` (no draft proposed it) or the name of a draft source."""

    source: str
    depth: int  # 1 is the first drafted token of its step; 0 for `target`
    step: int  # counts the target passes of this request from 1


class CompletionOutput(msgspec.Struct):
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    provenance: list[Provenance] | None = None


class RequestMetrics(msgspec.Struct):
    """Counts and times of one request, summed over its choices. Times are monotonic seconds."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    steps: int = 0  # target passes that gave it tokens
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = {}
    accepted_by_position: list[int] = []  # index 0 is depth 1
    preemptions: int = 0
    cached_tokens: int = 0
    seed: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    energy_joules: float | None = None

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class RequestOutput(msgspec.Struct):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
    error: str | None = None  # set where a choice ended with finish_reason "error"
