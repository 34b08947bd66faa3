"""`Engine`: one step in four lines, and the requests that enter and leave between steps.

Owns the scheduler, the executor and the output processor, and checks requests where they enter. Knows nothing about
tensors, sockets or HTTP.

    engine = Engine(EngineOptions.create(target="smollm2-135m"))
    engine.add(AddRequest("r1", engine.tokenizer.encode("Hello"), SamplingParams()))
    while engine.has_work:
        deltas = engine.step()
"""

from __future__ import annotations

import time
from typing import Any

from specengine.config import EngineOptions
from specengine.core.scheduler import Scheduler
from specengine.engine.admission import Admission
from specengine.engine.build import build_executor, build_scheduler
from specengine.engine.messages import AddRequest, EngineInfo, EngineStats, RequestDelta
from specengine.engine.output_processor import OutputProcessor
from specengine.engine.statistics import Statistics
from specengine.tokenizer import Tokenizer


class Engine:
    """Loads the models when made. Raises ConfigError or LoadError for what the user got wrong."""

    def __init__(self, options: EngineOptions):
        began = time.monotonic()
        built = build_executor(options)
        self.options = options
        self.tokenizer: Tokenizer = built.tokenizer
        self.generation_defaults: dict[str, Any] = built.generation_defaults
        self.executor = built.executor
        self.scheduler: Scheduler = build_scheduler(options, built)
        self.outputs = OutputProcessor(self.tokenizer)
        self.admission = Admission(self.tokenizer, options)
        self.statistics = Statistics()
        self.info: EngineInfo = built.info(time.monotonic() - began)

    def add(self, message: AddRequest) -> None:
        """Queues a request. Raises RequestError, and then nothing of it runs."""
        request = self.admission.request(message)
        self.outputs.add(self.scheduler.add(request))
        self.admission.arrived()

    def check(self, message: AddRequest) -> None:
        """Raises RequestError where `add` would; queues nothing."""
        self.scheduler.check(self.admission.request(message))

    def abort(self, request_ids: list[str]) -> list[RequestDelta]:
        """Ends requests now, whatever their state; unknown ids are passed over. Returns their last deltas."""
        deltas: list[RequestDelta] = []
        for request_id in request_ids:
            self.scheduler.abort(request_id)
            deltas.extend(self.outputs.abort(request_id))
        return deltas

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.scheduler.has_releases  # rows that left must be told to the worker

    def step(self) -> list[RequestDelta]:
        """Runs one step and returns what it added to each choice."""
        clock = self.statistics.clock()
        plan = clock.timed("schedule", self.scheduler.schedule)
        result = clock.timed("forward", lambda: self.executor.submit(plan).result())
        updates = clock.timed("process", lambda: self.outputs.process(plan, result))
        clock.timed("commit", lambda: self.scheduler.commit(plan, updates, result))
        self.statistics.observe(plan, result, clock)
        return self.outputs.drain()

    def stats(self) -> EngineStats:
        return self.statistics.snapshot(self.scheduler, self.outputs)

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.pool.reset_prefix_cache()

    def close(self) -> None:
        self.executor.shutdown()
