"""`Executor`: where the worker runs. One message down, one up.

result = executor.submit(plan).result()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specengine.core.plan import StepPlan, StepResult
from specengine.registry import Registry


class Handle(Protocol):
    """A step under way."""

    def result(self) -> StepResult: ...


@dataclass(frozen=True)
class Completed:
    """A step that is over: what a synchronous executor returns."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> Handle: ...

    def shutdown(self) -> None:
        """Frees the models; the executor can't be used afterwards."""
        ...


EXECUTORS = Registry("specengine.executor", export="EXECUTOR", kind="executor")
