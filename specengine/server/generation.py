"""`Generation`: all requests that one HTTP request became, read as one stream; gone when the client is gone.

Owns sending, merging, the time limit and the counts that `usage` needs. Knows nothing about JSON shapes.

    with Generation(service, prompts, params, request_id) as generation:
        async for prompt_index, delta in generation.deltas(): ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from specengine.engine.client import RequestStream
from specengine.engine.messages import RequestDelta
from specengine.outputs import RequestMetrics
from specengine.sampling_params import SamplingParams
from specengine.server.errors import ApiError
from specengine.server.metrics import ChoiceClock
from specengine.server.prompts import Prompt
from specengine.server.service import Service


class Generation:
    """One engine request a prompt, all of them running at once. Leaving the context aborts what still runs."""

    def __init__(self, service: Service, prompts: list[Prompt], params: SamplingParams, request_id: str):
        self.service = service
        self.prompts = prompts
        self.params = params
        self.request_id = request_id
        self.created = int(time.time())
        self.num_completion_tokens = 0
        self.cached_tokens = [0] * len(prompts)
        self.metrics: list[RequestMetrics | None] = [None] * len(prompts)
        self._began = time.monotonic()
        self._streams: list[RequestStream] = []
        self._clocks = [[ChoiceClock(service.metrics, self._began) for _ in range(params.n)] for _ in prompts]

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self) -> None:
        """Sends every prompt to the engine. Raises ApiError where too many wait, EngineError where the engine is gone."""
        self.service.check_load()
        self.service.log_request(self.request_id, self.prompts, self.params)
        for prompt in self.prompts:
            self._streams.append(self.service.llm.stream(prompt.token_ids, self.params, self.request_id))

    def close(self) -> None:
        for stream, clocks in zip(self._streams, self._clocks, strict=False):
            if not stream.finished:
                for clock in clocks:
                    clock.end("abort")
            stream.close()

    async def deltas(self) -> AsyncIterator[tuple[int, RequestDelta]]:
        """Each delta with its prompt's index, as they come.

        Raises RequestError where the engine refused a prompt, EngineError where it failed, ApiError 500 where a choice
        ended with an error, 504 where the time limit passed.
        """
        wake = asyncio.Event()
        for stream in self._streams:
            stream.share(wake)
        unread = dict(enumerate(self._streams))
        while unread:
            wake.clear()
            for index, stream in list(unread.items()):
                while (delta := stream.poll()) is not None:
                    self._observe(index, delta)
                    yield index, delta
                if stream.exhausted:
                    del unread[index]
            if unread:
                await self._wait(wake)

    async def _wait(self, wake: asyncio.Event) -> None:
        limit = self.service.options.request_timeout
        if limit is None:
            await wake.wait()
            return
        try:
            await asyncio.wait_for(wake.wait(), max(0.0, self._began + limit - time.monotonic()))
        except TimeoutError:
            raise ApiError(504, f"the request took longer than this server's limit of {limit:g} seconds", code="request_timeout") from None

    def _observe(self, index: int, delta: RequestDelta) -> None:
        self._clocks[index][delta.index].feed(delta)
        self.num_completion_tokens += len(delta.token_ids)
        self.cached_tokens[index] = max(self.cached_tokens[index], delta.num_cached_tokens)
        if delta.metrics is not None:
            self.metrics[index] = delta.metrics
            self.service.metrics.finished(delta.metrics)
        if delta.finish_reason == "error":
            raise ApiError(500, delta.error or "the engine failed on this request", code=delta.error_code)

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts: each prompt once, the output of every choice."""
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": prompt + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens)},
            "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        }

    def metrics_body(self) -> Any:
        """What `return_metrics` asks for: an object, or a list of one a prompt where the request has several."""
        found = [None if metrics is None else _metrics(metrics, self.params.n) for metrics in self.metrics]
        return found[0] if len(found) == 1 else found


def _metrics(metrics: RequestMetrics, num_choices: int) -> dict[str, Any]:
    return {
        "arrival_time": metrics.arrival_time,
        "first_scheduled_time": metrics.first_scheduled_time,
        "first_token_time": metrics.first_token_time,
        "finished_time": metrics.finished_time,
        "preemptions": metrics.preemptions,
        "seed": metrics.seed,
        "energy_joules": metrics.energy_joules,
        "speculative_decoding": {
            "steps": metrics.steps,
            "drafted": metrics.drafted,
            "accepted": metrics.accepted,
            "acceptance_rate": metrics.acceptance_rate,
            "accepted_by_source": metrics.accepted_by_source,
            "accepted_by_position": metrics.accepted_by_position,
            "draft_seconds": metrics.draft_seconds,
            "verify_seconds": metrics.verify_seconds,
        },
    }
