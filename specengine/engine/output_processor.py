"""`OutputProcessor`: turns a step's tokens into text, and decides which of them are kept and where a request ends.

The one place where EOS, stop ids, stop strings and max_tokens are looked at. Owns each choice's text and each request's
metrics. Knows nothing about blocks or tensors.

    updates = outputs.process(plan, result)
    deltas = outputs.drain()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specengine.core.plan import NewSequence, SequenceResult, SequenceUpdate, StepPlan, StepResult, TokenLogprobs
from specengine.core.sequence import Request
from specengine.engine.messages import RequestDelta
from specengine.engine.stopping import TextStop
from specengine.outputs import Logprob, Provenance, RequestMetrics
from specengine.tokenizer import Detokenizer, Tokenizer

TARGET = "target"


@dataclass
class Choice:
    """One of a request's n outputs, as far as it has come."""

    request: ActiveRequest
    index: int
    detokenizer: Detokenizer
    stop: TextStop
    num_tokens: int = 0
    steps: int = 0
    entered: bool = False
    finished: bool = False


@dataclass
class ActiveRequest:
    request: Request
    metrics: RequestMetrics
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic):
        self.tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, ActiveRequest] = {}
        self._rows: dict[int, Choice] = {}
        self._deltas: list[RequestDelta] = []
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def add(self, request: Request) -> None:
        metrics = RequestMetrics(arrival_time=request.arrival_time, seed=request.seed)
        active = ActiveRequest(request, metrics)
        params = request.sampling
        for index in range(params.n):
            detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
            stop = TextStop(params.stop_strings, include=params.include_stop_str_in_output)
            active.choices.append(Choice(active, index, detokenizer, stop))
        if params.prompt_logprobs is not None:
            active.prompt_logprobs = [None]
        self._requests[request.request_id] = active
        self.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> list[RequestDelta]:
        """Ends a request's open choices; returns their last deltas."""
        active = self._requests.pop(request_id, None)
        if active is None:
            return []
        deltas = []
        for choice in active.choices:
            if not choice.finished:
                choice.finished = True
                deltas.append(self._delta(choice, [], "abort"))
        return deltas

    def process(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Decides for every scheduled sequence which of the step's tokens are kept, and whether it ends."""
        now = self._clock()
        for new in plan.new:
            request_id, _, index = new.sequence_id.rpartition("#")
            active = self._requests.get(request_id)
            if active is not None:
                self._enter(active.choices[int(index)], new, now)
        shared = len(result.sequences) or 1
        updates = []
        for scheduled, sequence in zip(plan.scheduled, result.sequences, strict=True):
            choice = self._rows[sequence.row]
            if choice.finished:  # aborted while the step ran
                updates.append(SequenceUpdate(sequence.row, []))
                continue
            metrics = choice.request.metrics
            metrics.draft_seconds += result.draft_ms / 1000 / shared
            metrics.verify_seconds += result.verify_ms / 1000 / shared
            self._keep_prompt_logprobs(choice, sequence, scheduled.start)
            updates.append(self._advance(choice, sequence, now))
        return updates

    def _enter(self, choice: Choice, new: NewSequence, now: float) -> None:
        """A choice takes a row: for the first time, or again after a preemption."""
        active = choice.request
        self._rows[new.row] = choice
        if choice.entered:
            active.metrics.preemptions += 1
        choice.entered = True
        if active.metrics.first_scheduled_time is None:
            active.metrics.first_scheduled_time = now
            active.cached_tokens = active.metrics.cached_tokens = new.num_computed_tokens

    def drain(self) -> list[RequestDelta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _keep_prompt_logprobs(self, choice: Choice, result: SequenceResult, start: int) -> None:
        """Entries belong to the positions after `start`: a prompt computed again after a preemption replaces them."""
        kept = choice.request.prompt_logprobs
        if result.prompt_logprobs is not None and kept is not None and choice.index == 0:
            del kept[start + 1 :]
            kept.extend(self._logprobs(entry) for entry in result.prompt_logprobs)

    def _advance(self, choice: Choice, result: SequenceResult, now: float) -> SequenceUpdate:
        active = choice.request
        if result.error is not None:
            choice.finished = True
            self._emit(
                choice, RequestDelta(active.request.request_id, choice.index, error=result.error, error_code="non_finite_logits"), "error"
            )
            return SequenceUpdate(result.row, [], "error")
        if not result.token_ids:
            return SequenceUpdate(result.row, [], None, result.draft_lag)
        kept, reason, stop_reason = self._kept(choice, result.token_ids)
        self._count(choice, result, kept, now)
        delta = self._token_delta(choice, result, kept)
        delta.stop_reason = stop_reason
        if reason is not None:
            choice.finished = True
        self._emit(choice, delta, reason)
        return SequenceUpdate(result.row, result.token_ids[:kept], reason, result.draft_lag)

    def _kept(self, choice: Choice, token_ids: list[int]) -> tuple[int, str | None, int | str | None]:
        """How many of the tokens are kept, why the output ends, and the stop id or string that ended it."""
        request = choice.request.request
        params = request.sampling
        if params.max_tokens == 0:
            return 0, "length", None
        for count, token in enumerate(token_ids, 1):
            choice.num_tokens += 1
            may_stop = choice.num_tokens > params.min_tokens
            if may_stop and token in request.stop_token_ids:
                if params.include_stop_str_in_output:
                    choice.stop.feed(choice.detokenizer.feed(token), search=False)
                named = token in (params.stop_token_ids or ())
                return count, "stop", token if named else None
            string = choice.stop.feed(choice.detokenizer.feed(token), search=choice.num_tokens >= params.min_tokens)
            if string is not None:
                choice.detokenizer.reset()
                return count, "stop", string
            if choice.num_tokens >= request.max_output_tokens:
                return count, "length", None
        return len(token_ids), None, None

    def _count(self, choice: Choice, result: SequenceResult, kept: int, now: float) -> None:
        metrics = choice.request.metrics
        choice.steps += 1
        metrics.steps += 1
        metrics.drafted += result.num_drafted
        if metrics.first_token_time is None and kept:
            metrics.first_token_time = now
        self.generation_tokens += kept
        for depth, source in enumerate(result.sources[:kept], 1):
            if source == TARGET:
                continue
            metrics.accepted += 1
            metrics.accepted_by_source[source] = metrics.accepted_by_source.get(source, 0) + 1
            if len(metrics.accepted_by_position) < depth:
                metrics.accepted_by_position.append(0)
            metrics.accepted_by_position[depth - 1] += 1

    def _token_delta(self, choice: Choice, result: SequenceResult, kept: int) -> RequestDelta:
        params = choice.request.request.sampling
        delta = RequestDelta(choice.request.request.request_id, choice.index, token_ids=result.token_ids[:kept])
        if params.logprobs is not None and result.logprobs is not None:
            delta.logprobs = [self._logprobs(entry) for entry in result.logprobs[:kept]]
        if params.return_provenance:
            delta.provenance = [
                Provenance(source, 0 if source == TARGET else depth, choice.steps) for depth, source in enumerate(result.sources[:kept], 1)
            ]
        return delta

    def _emit(self, choice: Choice, delta: RequestDelta, reason: str | None) -> None:
        finished = reason is not None
        if finished and reason != "error":
            choice.stop.feed(choice.detokenizer.flush(), search=False)
        delta.text = choice.stop.take(final=finished)
        delta.finish_reason = reason
        active = choice.request
        delta.num_cached_tokens = active.cached_tokens
        if choice.index == 0 and active.prompt_logprobs is not None and (delta.token_ids or finished):
            delta.prompt_logprobs, active.prompt_logprobs = active.prompt_logprobs, None
        if finished and active.finished:
            self._complete(active, delta)
        if delta.text or delta.token_ids or finished:
            self._deltas.append(delta)

    def _delta(self, choice: Choice, token_ids: list[int], reason: str) -> RequestDelta:
        active = choice.request
        delta = RequestDelta(active.request.request_id, choice.index, token_ids=token_ids, finish_reason=reason)
        delta.text = choice.stop.take(final=True)
        if active.finished:
            self._complete(active, delta)
        return delta

    def _complete(self, active: ActiveRequest, delta: RequestDelta) -> None:
        active.metrics.finished_time = self._clock()
        delta.finished = True
        delta.metrics = active.metrics
        self._requests.pop(active.request.request_id, None)

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        triples = zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        return {token: Logprob(logprob, rank, self.tokenizer.token_text(token)) for token, logprob, rank in triples}
