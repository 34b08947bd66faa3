"""The executor of one device: the worker runs in the engine's own process and thread.

executor = EXECUTORS.get("uni")(worker)
"""

from __future__ import annotations

from specengine.core.plan import StepPlan
from specengine.executor.base import Completed
from specengine.worker.worker import Worker


class UniExecutor:
    def __init__(self, worker: Worker):
        self.worker = worker

    def submit(self, plan: StepPlan) -> Completed:
        return Completed(self.worker.execute(plan))

    def shutdown(self) -> None:
        self.worker.close()


EXECUTOR = UniExecutor
