"""Counters of an engine since its start, and what `/metrics` is made of.

Owns the counts by source and position and the seconds by phase. Knows nothing about Prometheus.

    clock = statistics.clock()
    plan = clock.timed("schedule", scheduler.schedule)
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TypeVar

from specengine.core.plan import StepPlan, StepResult
from specengine.core.scheduler import Scheduler
from specengine.engine.messages import EngineStats
from specengine.engine.output_processor import OutputProcessor

T = TypeVar("T")


class PhaseClock:
    """Seconds of the phases of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, phase: str, run: Callable[[], T]) -> T:
        began = time.perf_counter()
        value = run()
        self.seconds[phase] = time.perf_counter() - began
        return value


class Statistics:
    def __init__(self) -> None:
        self.steps = 0
        self._phase_seconds: defaultdict[str, float] = defaultdict(float)
        self._drafts: Counter[str] = Counter()
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._by_position: list[int] = []

    def clock(self) -> PhaseClock:
        return PhaseClock()

    def observe(self, plan: StepPlan, result: StepResult, clock: PhaseClock) -> None:
        """Adds one step's counts. The forward phase is split into what the worker reports: draft and verify."""
        self.steps += 1
        draft = result.draft_ms / 1000
        self._phase_seconds["draft"] += draft
        self._phase_seconds["verify"] += clock.seconds["forward"] - draft
        for phase in ("schedule", "process", "commit"):
            self._phase_seconds[phase] += clock.seconds[phase]
        for source, counts in result.by_source.items():
            self._drafts[source] += counts.drafts
            self._drafted[source] += sum(counts.drafted)
            self._accepted[source] += sum(counts.accepted)
            missing = len(counts.accepted) - len(self._by_position)
            self._by_position.extend([0] * max(0, missing))
            for depth, accepted in enumerate(counts.accepted):
                self._by_position[depth] += accepted

    def snapshot(self, scheduler: Scheduler, outputs: OutputProcessor) -> EngineStats:
        pool = scheduler.pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=pool.usage,
            prefix_cache_queries=pool.queried_tokens,
            prefix_cache_hits=pool.hit_tokens,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=outputs.prompt_tokens,
            generation_tokens=outputs.generation_tokens,
            rolled_back_blocks=scheduler.rolled_back_blocks,
            steps=self.steps,
            drafts_by_source=dict(self._drafts),
            drafted_by_source=dict(self._drafted),
            accepted_by_source=dict(self._accepted),
            accepted_by_position=list(self._by_position),
            phase_seconds=dict(self._phase_seconds),
        )
