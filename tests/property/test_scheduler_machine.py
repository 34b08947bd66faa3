"""Scheduler under random arrivals, aborts, acceptance, stops, forks and small pools.

The harness checks every invariant of `core` after every half of a step, and a fake worker checks what each slot holds. At
the end everything finishes, gives what it gives alone, and leaves nothing behind.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from specengine.core.scheduler import SchedulerConfig
from specengine.core.speculation import FixedBudget
from specengine.errors import RequestError
from tests.unit.core.harness import STOP, Simulation

# One of two beginnings and a short end, so that prefixes are shared often.
PROMPTS = st.builds(
    lambda letter, length, end: [letter] * length + end, st.integers(1, 2), st.integers(1, 16), st.lists(st.integers(1, 2), max_size=4)
)
SPECULATION = st.sampled_from([None, None, False, {"num_speculative_tokens": 1}, {"tree_width": 1}, {"tree_depth": 2}])
SAMPLING = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 1, 2, 4]),
        "max_tokens": st.one_of(st.none(), st.integers(1, 16)),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from([None, None, "salt"]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "speculation": SPECULATION,
    }
)
SETTINGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 14),
        "block_size": st.sampled_from([1, 2, 4]),
        "caching": st.booleans(),
        "acceptance": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "scratch": st.sampled_from([0, 0, 3]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 24),
        "max_model_len": st.integers(8, 40),
        "draft_has_kv": st.booleans(),
        "draft_cost": st.sampled_from([0.0, 0.3, 2.0]),
    }
)
POLICIES = st.builds(
    FixedBudget,
    st.sampled_from([0, 1, 3, 8]),
    st.integers(1, 3),
    tree_depth=st.sampled_from([None, 2]),
    max_concurrency=st.sampled_from([None, None, 2]),
    max_draft_lag=st.sampled_from([0, 4, 32]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(settings=SETTINGS, policy=POLICIES, order=st.sampled_from(["fcfs", "priority"]), seed=st.integers(0, 99))
    def start(self, settings: dict[str, Any], policy: FixedBudget, order: str, seed: int) -> None:
        self.simulation = Simulation(policy=policy, order=order, executor_seed=seed, **settings)
        self.arrivals = 0
        self.aborted: set[str] = set()

    @rule(prompt=PROMPTS, sampling=SAMPLING, stops=st.booleans())
    def add(self, prompt: list[int], sampling: dict[str, Any], stops: bool) -> None:
        self.arrivals += 1
        capacity = self.simulation.scheduler.capacity
        try:
            self.simulation.add(f"r{self.arrivals}", prompt, seed=self.arrivals % 2, stops=(STOP,) if stops else (), **sampling)
            assert len(prompt) < capacity
        except RequestError:
            assert len(prompt) >= capacity

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.simulation.scheduler.has_work:
                assert self.simulation.step().scheduled, "a step with work computes something"

    @rule(place=st.integers(0, 7), in_a_step=st.booleans())
    def abort(self, place: int, in_a_step: bool) -> None:
        scheduler = self.simulation.scheduler
        live = sorted(scheduler._requests)
        plan = self.simulation.schedule() if in_a_step else None
        if place < len(live):
            assert scheduler.abort(live[place]) and scheduler.abort(live[place]) == []
            self.aborted.add(live[place])
        if plan is not None:
            self.simulation.finish_step(plan)

    @rule()
    def rest(self) -> None:
        if not self.simulation.scheduler.has_work:
            self.simulation.check_idle()
            assert self.simulation.pool.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.run()
        for request_id in self.aborted:
            del simulation.requests[request_id]
        simulation.outputs = {name: tokens for name, tokens in simulation.outputs.items() if name.rpartition("#")[0] in simulation.requests}
        simulation.assert_outputs()
        event(f"preempted: {simulation.scheduler.num_preemptions > 0}")
        event(f"copied blocks: {any(p.block_copies for p in simulation.plans)}")
        event(f"hits: {simulation.pool.hit_tokens > 0}")
        event(f"rolled back: {simulation.scheduler.rolled_back_blocks > 0}")


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestSchedulerAtLength(SchedulerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=2500, stateful_step_count=50, deadline=None)


def test_the_machine_covers_the_configuration() -> None:
    """A setting that is added later is drawn here too, or left out on purpose."""
    drawn = {"max_num_seqs", "max_num_batched_tokens", "max_model_len", "draft_has_kv", "draft_cost"}
    assert set(SchedulerConfig.__dataclass_fields__) - drawn == {"policy", "draft_scratch_slots"}  # by `order` and `scratch`
