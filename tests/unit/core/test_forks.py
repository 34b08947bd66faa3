"""n > 1: when children begin, what they share, and what happens where they find no place."""

from __future__ import annotations

import pytest

from specengine.core.plan import SequenceUpdate
from specengine.core.speculation import FixedBudget
from tests.unit.core.harness import Simulation


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 8, 9])
def test_children_share_full_blocks_and_copy_the_tail(length: int, caching: bool) -> None:
    simulation = Simulation(block_size=4, caching=caching, policy=FixedBudget(4, 2))
    simulation.add("a", [1] * length, max_tokens=10, n=3)
    simulation.step()
    plan = simulation.schedule()
    children = [n for n in plan.new if n.choice > 0]
    assert [n.num_computed_tokens for n in children] == [length - 1] * 2
    shared = (length - 1) // 4
    first = simulation.scheduler.running[0]
    assert all(n.block_ids[:shared] == first.table.blocks[:shared] for n in children)
    assert len(plan.block_copies) == (2 if (length - 1) % 4 else 0)
    assert all(source == first.table.blocks[shared] for source, _ in plan.block_copies)
    simulation.finish_step(plan)
    simulation.run()
    simulation.assert_outputs()
    assert len({tuple(o) for o in simulation.outputs.values()}) == 3


def test_a_child_is_told_with_its_computed_blocks_and_its_choice() -> None:
    simulation = Simulation(block_size=4)
    simulation.add("a", [1] * 6, max_tokens=4, n=2, prompt_logprobs=1, seed=9)
    simulation.step()
    (child,) = simulation.step().new
    assert (child.sequence_id, child.choice, child.seed, len(child.block_ids)) == ("a#1", 1, 9, 2)
    assert child.sampling.prompt_logprobs is None and child.sampling.n == 2


@pytest.mark.parametrize("caching", [True, False])
def test_children_without_a_row_wait_like_any_other(caching: bool) -> None:
    simulation = Simulation(max_num_seqs=2, caching=caching)
    simulation.add("a", [1] * 9, max_tokens=3, n=5)
    simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (2, 3)
    simulation.run()
    simulation.assert_outputs()
    assert (simulation.pool.hit_tokens > 0) is caching


@pytest.mark.parametrize("caching", [True, False])
def test_children_without_a_block_wait_like_any_other(caching: bool) -> None:
    simulation = Simulation(num_blocks=3, block_size=4, caching=caching)
    simulation.add("a", [1] * 9, max_tokens=3, n=3)
    simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (1, 2)
    simulation.run()
    simulation.assert_outputs()


def test_children_begin_although_the_first_choice_ends_at_once() -> None:
    simulation = Simulation(caching=False)
    simulation.add("a", [1] * 6, max_tokens=1, n=3)
    (first,) = simulation.finish_step(simulation.schedule())
    assert first.choice == 0 and simulation.scheduler.num_running == 2
    plan = simulation.step()
    assert [s.num_tokens for s in plan.scheduled] == [1, 1]  # their prompt is not computed again
    simulation.run()
    simulation.assert_outputs()


def test_a_waiting_request_that_comes_first_is_not_overtaken() -> None:
    simulation = Simulation(num_blocks=6, block_size=2, caching=False, max_num_batched_tokens=16, order="priority")
    simulation.add("many", [1] * 7, max_tokens=2, n=3, priority=1)
    plan = simulation.schedule()
    simulation.add("urgent", [2] * 6, max_tokens=2, priority=0)
    simulation.finish_step(plan)
    assert [s.sequence_id for s in simulation.scheduler.running] == ["many#0"]
    simulation.run()
    simulation.assert_outputs()


def test_preempted_in_its_prompt_forks_when_the_prompt_is_done() -> None:
    simulation = Simulation(num_blocks=6, block_size=2, caching=False, max_num_batched_tokens=4)
    simulation.add("a", [1] * 3, max_tokens=8)
    simulation.step()
    simulation.add("b", [2] * 7, max_tokens=3, n=2)
    simulation.run()
    simulation.assert_outputs()
    assert simulation.sequences["b#0"].num_preemptions > 0


def test_an_error_in_the_prompt_leaves_the_others_to_speak_for_themselves() -> None:
    simulation = Simulation()
    simulation.add("a", [1] * 6, max_tokens=4, n=2)
    plan = simulation.schedule()
    simulation.scheduler.commit(plan, [SequenceUpdate(0, [], "error")])
    assert [s.sequence_id for s in simulation.scheduler.waiting] == ["a#1"]
