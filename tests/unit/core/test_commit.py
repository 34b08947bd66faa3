"""What a commit may say, and what it does to blocks."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.plan import SequenceUpdate, StepPlan, StepResult
from specengine.core.speculation import FixedBudget
from specengine.errors import EngineError
from tests.unit.core.harness import Simulation


def open_step(**sampling: Any) -> tuple[Simulation, StepPlan]:
    simulation = Simulation(max_num_batched_tokens=8, policy=FixedBudget(2))
    simulation.add("a", [1, 2], **{"max_tokens": 3, **sampling})
    return simulation, simulation.schedule()


@pytest.mark.parametrize(
    ("updates", "fault"),
    [
        ([], "got updates for"),
        ([SequenceUpdate(1, [1])], "got updates for"),
        ([SequenceUpdate(0, [1]), SequenceUpdate(1, [1])], "got updates for"),
        ([SequenceUpdate(0, [])], "at least one"),
        ([SequenceUpdate(0, [1, 1, 1])], "3 were left"),
        ([SequenceUpdate(0, [1, 1, 1, 1], "stop")], "3 were left"),
    ],
)
def test_an_update_that_contradicts_the_plan_is_an_error(updates: list[SequenceUpdate], fault: str) -> None:
    simulation, plan = open_step()
    with pytest.raises(EngineError, match=fault):
        simulation.scheduler.commit(plan, updates)


def test_tokens_within_a_prompt_are_an_error() -> None:
    simulation = Simulation(max_num_batched_tokens=4)
    simulation.add("a", [1] * 6, max_tokens=3)
    with pytest.raises(EngineError, match="not computed yet"):
        simulation.scheduler.commit(simulation.schedule(), [SequenceUpdate(0, [1])])


def test_more_tokens_than_slots_are_an_error() -> None:
    simulation = Simulation(block_size=2)
    simulation.add("a", [1, 2], max_tokens=9)
    with pytest.raises(EngineError, match="2 slots"):
        simulation.scheduler.commit(simulation.schedule(), [SequenceUpdate(0, [1, 1])])


def test_steps_are_committed_once_each_before_the_next_is_planned() -> None:
    simulation, plan = open_step()
    with pytest.raises(EngineError, match="not committed"):
        simulation.scheduler.schedule()
    simulation.finish_step(plan)
    with pytest.raises(EngineError, match="under way is none"):
        simulation.scheduler.commit(plan, [SequenceUpdate(0, [1])])
    simulation.schedule()
    with pytest.raises(EngineError, match="step 1 can't be committed"):
        simulation.scheduler.commit(plan, [SequenceUpdate(0, [1])])


def test_kept_tokens_may_be_fewer_only_where_the_sequence_ends() -> None:
    simulation, plan = open_step()
    (ended,) = simulation.scheduler.commit(plan, [SequenceUpdate(0, [], "length")])  # max_tokens 0, say
    assert ended.tokens == [1, 2] and ended.finish_reason == "length"
    simulation.pool.reset_prefix_cache()
    assert simulation.pool.num_used == 0


def test_the_policy_learns_from_the_result() -> None:
    class Recorder(FixedBudget):
        def observe(self, result: StepResult) -> None:
            seen.append(result.step)

    seen: list[int] = []
    simulation = Simulation(policy=Recorder(2))
    simulation.add("a", [1, 2], max_tokens=4)
    simulation.run()
    assert seen == [p.step for p in simulation.plans]


def test_what_may_hold_nan_is_not_found_again() -> None:
    simulation = Simulation(block_size=2, max_num_batched_tokens=4)
    simulation.add("a", [1] * 7, max_tokens=4)
    simulation.step()
    assert simulation.pool.num_cached == 2
    (ended,) = simulation.scheduler.commit(simulation.schedule(), [SequenceUpdate(0, [], "error")])
    assert ended.finish_reason == "error" and simulation.pool.num_cached == 0


def test_only_full_blocks_of_computed_tokens_are_published() -> None:
    simulation = Simulation(block_size=2)
    simulation.add("a", [1] * 3, max_tokens=2)
    simulation.step()  # 4 tokens, 3 computed
    assert simulation.pool.num_cached == 1
    simulation.step()  # 5 tokens, 4 computed
    assert simulation.pool.num_cached == 2


def test_rolled_back_blocks_are_counted() -> None:
    plain = Simulation(block_size=2)
    rejected = Simulation(block_size=2, policy=FixedBudget(4), acceptance=0.0)
    for simulation in (plain, rejected):
        simulation.add("a", [1] * 3, max_tokens=8)
        simulation.run()
    assert plain.scheduler.rolled_back_blocks == 0 < rejected.scheduler.rolled_back_blocks
