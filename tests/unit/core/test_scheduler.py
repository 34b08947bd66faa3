"""Scheduler: what is refused, queues and order, releases, abort and preemption."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.block_pool import BlockPool
from specengine.core.plan import StepPlan
from specengine.core.scheduler import Scheduler, SchedulerConfig
from specengine.core.sequence import Status
from specengine.core.speculation import FixedBudget
from specengine.errors import ConfigError, RequestError
from tests.unit.core.harness import Simulation, expected, next_token


def rows_of(simulation: Simulation, plan: StepPlan) -> dict[str, int]:
    return {simulation.scheduler.in_step[s.row].sequence_id: s.num_tokens for s in plan.scheduled}


class TestAdd:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "room"),
        [(10, 5, 5), (10, None, 22), (10, 100, 22), (31, None, 1), (31, 5, 1), (10, 0, 1)],
    )
    def test_output_is_what_was_asked_for_or_the_room_left(self, prompt: int, max_tokens: int | None, room: int) -> None:
        simulation = Simulation(max_model_len=32)
        assert simulation.add("a", [1] * prompt, max_tokens=max_tokens).max_output_tokens == room

    @pytest.mark.parametrize("prompt", [32, 33, 10_000])
    def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(self, prompt: int) -> None:
        simulation = Simulation(max_model_len=32)
        with pytest.raises(RequestError, match=rf"\b{prompt} tokens.*\b32 tokens") as error:
            simulation.add("a", [1] * prompt)
        assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"
        assert not simulation.scheduler.has_work

    def test_a_prompt_beyond_the_pool_is_refused_with_the_capacity(self) -> None:
        simulation = Simulation(num_blocks=4, block_size=4, max_model_len=64)
        assert simulation.add("fits", [1] * 15, max_tokens=None).max_output_tokens == 1
        with pytest.raises(RequestError, match=r"\b16 tokens.*holds 16 tokens") as error:
            simulation.add("a", [1] * 16)
        assert error.value.code is None
        simulation.run()
        simulation.assert_outputs()

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(RequestError, match="empty"):
            Simulation().add("a", [])

    def test_an_id_in_use_is_refused_and_free_again_afterwards(self) -> None:
        simulation = Simulation()
        simulation.add("a", [1], max_tokens=2)
        with pytest.raises(RequestError, match="'a'") as error:
            simulation.add("a", [1, 2])
        assert error.value.param == "request_id" and simulation.scheduler.num_waiting == 1
        simulation.run()
        simulation.add("a", [1, 2], max_tokens=1)

    def test_wrong_speculation_is_refused_before_anything_is_queued(self) -> None:
        simulation = Simulation()
        with pytest.raises(RequestError, match="tree_widht"):
            simulation.add("a", [1], speculation={"tree_widht": 1})
        assert not simulation.scheduler.has_work

    def test_check_says_what_add_would_and_queues_nothing(self) -> None:
        simulation = Simulation(max_model_len=32)
        request = simulation.add("a", [1] * 10, max_tokens=None)
        simulation.run()
        assert simulation.scheduler.check(request) == 22 and not simulation.scheduler.has_work


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("policy", "lifo"),
        ("draft_cost", -1.0),
        ("draft_cost", float("nan")),
    ],
)
def test_configuration_is_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        SchedulerConfig(**{"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, name: value})


class TestOrder:
    def test_first_come_first_served(self) -> None:
        simulation = Simulation(max_num_seqs=1, max_num_batched_tokens=8)
        for name, priority in (("a", 5), ("b", 0), ("c", -5)):
            simulation.add(name, [1, 2], max_tokens=2, priority=priority)
        simulation.run()
        assert list(simulation.outputs) == ["a#0", "b#0", "c#0"]

    def test_lower_priority_values_first_then_first_come(self) -> None:
        simulation = Simulation(max_num_seqs=1, max_num_batched_tokens=8, order="priority")
        for name, priority in (("a", 5), ("b", 0), ("c", -5), ("d", 0)):
            simulation.add(name, [1, 2], max_tokens=2, priority=priority)
        simulation.run()
        assert list(simulation.outputs) == ["c#0", "b#0", "d#0", "a#0"]

    def test_nobody_overtakes_a_request_that_does_not_fit_yet(self) -> None:
        simulation = Simulation(num_blocks=8, block_size=4, caching=False)
        simulation.add("a", [1] * 20, max_tokens=8)
        simulation.step()
        simulation.add("large", [2] * 24, max_tokens=2)
        simulation.add("small", [3], max_tokens=2)
        assert rows_of(simulation, simulation.step()) == {"a#0": 1}
        simulation.run()
        assert list(simulation.outputs)[0] == "a#0"
        simulation.assert_outputs()

    def test_rows_are_fixed_and_reused_after_release(self) -> None:
        simulation = Simulation(max_num_seqs=2)
        simulation.add("a", [1], max_tokens=1)
        simulation.add("b", [2], max_tokens=3)
        simulation.add("c", [3], max_tokens=3)
        first = simulation.step()
        assert [(n.sequence_id, n.row) for n in first.new] == [("a#0", 0), ("b#0", 1)] and first.released == []
        second = simulation.step()
        assert second.released == [0] and [(n.sequence_id, n.row) for n in second.new] == [("c#0", 0)]

    def test_no_more_sequences_run_than_a_step_has_tokens(self) -> None:
        simulation = Simulation(max_num_seqs=8, max_num_batched_tokens=3)
        for i in range(6):
            simulation.add(f"r{i}", [i], max_tokens=4, n=2)
        simulation.run()
        simulation.assert_outputs()
        assert max(len(p.scheduled) for p in simulation.plans) == 3


class TestReleases:
    def test_a_plan_that_only_releases_is_legal(self) -> None:
        simulation = Simulation()
        simulation.add("a", [1], max_tokens=1)
        simulation.step()
        assert not simulation.scheduler.has_work and simulation.scheduler.has_releases
        plan = simulation.step()
        assert plan.released == [0] and plan.scheduled == [] and not simulation.scheduler.has_releases

    def test_releases_ride_along_with_the_next_work(self) -> None:
        simulation = Simulation()
        simulation.add("a", [1], max_tokens=1)
        simulation.step()
        simulation.add("b", [2], max_tokens=1)
        plan = simulation.step()
        assert plan.released == [0] and [n.row for n in plan.new] == [0]


class TestAbort:
    def test_while_waiting(self) -> None:
        simulation = Simulation(max_num_seqs=1)
        simulation.add("a", [1], max_tokens=4)
        simulation.add("b", [2], max_tokens=4)
        simulation.step()
        ended = simulation.scheduler.abort("b")
        assert [(s.sequence_id, s.status, s.finish_reason) for s in ended] == [("b#0", Status.FINISHED, "abort")]
        assert simulation.scheduler.num_waiting == 0

    def test_in_the_middle_of_a_prompt(self) -> None:
        simulation = Simulation(max_num_batched_tokens=8)
        simulation.add("a", [1] * 20, max_tokens=4)
        simulation.step()
        assert simulation.pool.num_used == 2
        simulation.scheduler.abort("a")
        simulation.check_idle()

    def test_twice_and_of_unknown_requests(self) -> None:
        simulation = Simulation()
        simulation.add("a", [1], max_tokens=4)
        simulation.step()
        assert len(simulation.scheduler.abort("a")) == 1
        assert simulation.scheduler.abort("a") == [] == simulation.scheduler.abort("never")
        simulation.check_idle()

    def test_between_schedule_and_commit_drops_the_result_alone(self) -> None:
        simulation = Simulation()
        simulation.add("a", [1], max_tokens=4)
        simulation.add("b", [2], max_tokens=4)
        simulation.step()
        plan = simulation.schedule()
        (ended,) = simulation.scheduler.abort("a")
        assert simulation.finish_step(plan) == [] and ended.num_output_tokens == 1
        assert simulation.pool.num_used == 1
        simulation.run()
        assert simulation.outputs == {"b#0": simulation.solo("b#0")}

    def test_before_its_first_step_is_committed_and_its_row_is_taken_again(self) -> None:
        simulation = Simulation(max_num_seqs=1)
        simulation.add("a", [1] * 5, max_tokens=4)
        plan = simulation.schedule()
        simulation.scheduler.abort("a")
        simulation.add("b", [2] * 5, max_tokens=4)
        simulation.finish_step(plan)
        plan = simulation.step()
        assert plan.released == [0] and [n.sequence_id for n in plan.new] == ["b#0"]
        simulation.run()
        assert simulation.outputs == {"b#0": simulation.solo("b#0")}

    def test_ends_every_choice_wherever_it_is(self) -> None:
        simulation = Simulation(max_num_seqs=2)
        simulation.add("a", [1] * 5, max_tokens=8, n=4)
        held = simulation.scheduler.abort("a")
        assert [s.choice for s in held] == [0, 1, 2, 3]
        simulation.check_idle()
        simulation.add("a", [1] * 5, max_tokens=8, n=4)
        simulation.step()
        assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (2, 2)
        assert len(simulation.scheduler.abort("a")) == 4
        simulation.check_idle()

    def test_after_a_fork_that_the_worker_has_not_heard_of(self) -> None:
        simulation = Simulation()
        simulation.add("a", [1] * 6, max_tokens=8, n=3)
        simulation.step()
        simulation.scheduler.abort("a")
        assert simulation.pool.num_used == 0
        simulation.add("b", [2] * 6, max_tokens=3)
        plan = simulation.step()
        assert plan.block_copies == [] and plan.released == [0]
        simulation.run()
        assert simulation.outputs == {"b#0": simulation.solo("b#0")}


class TestPreemption:
    def test_the_last_in_order_gives_way_and_resumes_with_all_its_tokens(self) -> None:
        simulation = Simulation(num_blocks=5, block_size=2, caching=False)
        simulation.add("a", [1, 2], max_tokens=8)
        simulation.add("b", [3, 4], max_tokens=6)
        preempted = None
        while preempted is None:
            for sequence in simulation.scheduler.running:
                sequence.draft_lag = 2
            plan = simulation.step()
            preempted = next((s for s in simulation.scheduler.waiting if s.status is Status.PREEMPTED), None)
        assert preempted.sequence_id == "b#0" and preempted.num_preemptions == 1
        assert (len(preempted.table), preempted.num_computed_tokens, preempted.draft_lag) == (0, 0, 0)
        assert rows_of(simulation, plan) == {"a#0": 1} and plan.released == [1]
        done = len(preempted.tokens)
        simulation.run()
        back = next(
            n for p in simulation.plans for n in p.new if n.sequence_id == "b#0" and n.num_computed_tokens == 0 and len(n.token_ids) > 2
        )
        assert len(back.token_ids) == done and back.num_prompt_tokens == 2 and back.max_output_tokens == 6
        simulation.assert_outputs()
        assert simulation.scheduler.num_preemptions == 1

    def test_what_is_still_cached_is_not_computed_again(self) -> None:
        simulation = Simulation(num_blocks=7, block_size=2)
        simulation.add("a", [1, 2], max_tokens=7)
        simulation.add("b", [3, 4, 1, 2, 2, 3], max_tokens=8)
        simulation.run()
        simulation.assert_outputs()
        back = [n for p in simulation.plans for n in p.new if n.sequence_id == "b#0"][1:]
        assert back and all(n.num_computed_tokens > 0 for n in back)
        assert simulation.sequences["b#0"].num_cached_tokens == 0  # that counts the first admission

    def test_requeued_before_later_requests(self) -> None:
        simulation = Simulation(num_blocks=5, block_size=2, caching=False)
        for name in "abc":
            simulation.add(name, [1, 2], max_tokens=6)
        simulation.run()
        simulation.assert_outputs()
        assert list(simulation.outputs) == ["a#0", "b#0", "c#0"] and simulation.scheduler.num_preemptions > 0

    def test_the_least_important_gives_way_under_priorities(self) -> None:
        simulation = Simulation(num_blocks=5, block_size=2, caching=False, order="priority")
        simulation.add("low", [1, 2], max_tokens=6, priority=1)
        simulation.add("high", [3, 4], max_tokens=6, priority=0)
        simulation.run()
        assert simulation.sequences["low#0"].num_preemptions > 0 == simulation.sequences["high#0"].num_preemptions
        simulation.assert_outputs()

    def test_nobody_is_admitted_while_those_who_run_are_short_of_blocks(self) -> None:
        simulation = Simulation(num_blocks=6, block_size=2, caching=False)
        for name in "ab":
            simulation.add(name, [1, 2, 3], max_tokens=9)
        while not simulation.scheduler.num_preemptions:
            plan = simulation.step()
        assert plan.new == [] and simulation.pool.num_free > 0


def test_the_pools_blocks_are_all_there_is() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 16, 1000), BlockPool(10, 4, enable_prefix_caching=True), FixedBudget(0))
    assert scheduler.capacity == 40


def test_expected_outputs_differ_by_seed_and_choice() -> None:
    outputs = {tuple(expected([1, 2], 12, seed=seed, choice=choice)) for seed in range(3) for choice in range(3)}
    assert len(outputs) == 9 and next_token([1, 2]) == next_token([1, 2])
