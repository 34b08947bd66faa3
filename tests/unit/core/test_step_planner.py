"""StepPlanner: how a step's tokens and blocks are spent, and how draft budgets shrink to fit."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.plan import DraftBudget, StepPlan
from specengine.core.speculation import FixedBudget, Load
from specengine.core.step_planner import TokenBudget, largest_tree
from tests.unit.core.harness import Simulation, cost


def at_tip(simulation: Simulation, names: str, *, length: int = 5, **sampling: Any) -> None:
    """Adds sequences and brings all of them to their tip."""
    for index, name in enumerate(names):
        simulation.add(name, [index % 5] * length, **{"max_tokens": 40, **sampling})
    while any(not s.is_at_tip for s in simulation.scheduler.running) or simulation.scheduler.waiting:
        simulation.step()


def nodes(plan: StepPlan) -> list[int]:
    return [b.max_nodes for b in plan.budgets]


class TestTokenBudget:
    def test_counts_rows_and_weighted_catch_up(self) -> None:
        budget = TokenBudget(10, 0.5)
        budget.tokens += 4
        budget.catch_up += 5
        assert (budget.room(), budget.room(2), budget.room(20)) == (3, 1, 0)
        assert (budget.catch_up_room(), budget.catch_up_room(3)) == (7, 1)

    def test_free_catch_up_has_no_bound(self) -> None:
        assert TokenBudget(1, 0.0).catch_up_room() > 10**9

    def test_rounding_never_loses_a_token(self) -> None:
        budget = TokenBudget(10, 0.1)
        budget.catch_up = 30
        assert budget.room() == 7 and budget.catch_up_room() == 70


@pytest.mark.parametrize(("width", "depth", "count"), [(1, 5, 5), (2, 1, 2), (2, 3, 14), (3, 2, 12), (64, 200, None)])
def test_the_largest_tree_of_a_shape(width: int, depth: int, count: int | None) -> None:
    assert count is None and largest_tree(width, depth) > 10**100 or largest_tree(width, depth) == count


class TestTokens:
    def test_a_prompt_is_cut_to_the_budget(self) -> None:
        simulation = Simulation(max_num_batched_tokens=8)
        simulation.add("a", [1] * 19, max_tokens=2)
        simulation.run()
        shares = [(s.start, s.num_tokens, s.is_tip) for p in simulation.plans for s in p.scheduled]
        assert shares == [(0, 8, False), (8, 8, False), (16, 3, True), (19, 1, True)]
        simulation.assert_outputs()

    def test_tips_first_then_running_prompts_then_waiting_ones(self) -> None:
        simulation = Simulation(max_num_batched_tokens=12, caching=False)
        at_tip(simulation, "ab")
        simulation.add("c", [1] * 14, max_tokens=4)
        simulation.add("d", [2] * 9, max_tokens=4)
        first, second = simulation.step(), simulation.step()
        assert [s.num_tokens for s in first.scheduled] == [1, 1, 10]
        assert [s.num_tokens for s in second.scheduled] == [1, 1, 4, 6]
        simulation.run()
        simulation.assert_outputs()

    def test_drafts_leave_a_quarter_to_prompts_that_wait(self) -> None:
        simulation = Simulation(max_num_batched_tokens=16, policy=FixedBudget(8))
        at_tip(simulation, "ab")
        assert nodes(simulation.step()) == [7, 7]
        simulation.add("c", [1] * 30, max_tokens=4)
        plan = simulation.step()
        assert nodes(plan) == [5, 5] and [s.num_tokens for s in plan.scheduled] == [1, 1, 4]
        simulation.run()
        simulation.assert_outputs()

    def test_a_short_prompt_takes_no_more_from_drafts_than_it_needs(self) -> None:
        simulation = Simulation(max_num_batched_tokens=16, policy=FixedBudget(8))
        at_tip(simulation, "ab")
        simulation.add("c", [1], max_tokens=4)
        assert nodes(simulation.step()) == [7, 6]

    def test_prompts_without_a_row_take_nothing_from_drafts(self) -> None:
        simulation = Simulation(max_num_batched_tokens=16, max_num_seqs=2, policy=FixedBudget(8))
        at_tip(simulation, "ab")
        simulation.add("c", [1] * 9, max_tokens=4)
        assert nodes(simulation.step()) == [7, 7]

    def test_scarce_tokens_are_shared_out_evenly(self) -> None:
        simulation = Simulation(max_num_batched_tokens=10, policy=FixedBudget(8))
        at_tip(simulation, "abcd")
        assert nodes(simulation.step()) == [2, 2, 1, 1]

    def test_what_one_does_not_want_goes_to_others(self) -> None:
        simulation = Simulation(max_num_batched_tokens=12, policy=FixedBudget(8))
        at_tip(simulation, "ab", speculation={"num_speculative_tokens": 1})
        at_tip(simulation, "c")
        assert nodes(simulation.step()) == [1, 1, 7]

    def test_a_prompts_last_chunk_may_carry_drafts(self) -> None:
        simulation = Simulation(max_num_batched_tokens=12, policy=FixedBudget(8))
        simulation.add("a", [1] * 15, max_tokens=20)
        assert simulation.step().budgets == []
        plan = simulation.step()
        assert [(s.num_tokens, s.is_tip) for s in plan.scheduled] == [(3, True)] and nodes(plan) == [8]

    def test_a_prompt_that_fills_the_step_carries_none(self) -> None:
        simulation = Simulation(max_num_batched_tokens=8, policy=FixedBudget(8))
        simulation.add("a", [1] * 8, max_tokens=20)
        plan = simulation.step()
        assert plan.scheduled[0].is_tip and plan.budgets == []

    @pytest.mark.parametrize("tokens", [1, 2, 3, 5])
    def test_the_smallest_budgets_serve_everyone(self, tokens: int) -> None:
        simulation = Simulation(max_num_batched_tokens=tokens, policy=FixedBudget(4, 2), draft_has_kv=True, draft_cost=0.5)
        for i in range(4):
            simulation.add(f"r{i}", [i] * (i + 1), max_tokens=6)
        simulation.run()
        simulation.assert_outputs()


class TestDraftBudgets:
    @pytest.mark.parametrize(("left", "found"), [(1, None), (2, (1, 1)), (3, (2, 2)), (4, (3, 3)), (9, (6, 6)), (40, (6, 6))])
    def test_a_chain_ends_one_before_the_output_does(self, left: int, found: tuple[int, int] | None) -> None:
        simulation = Simulation(policy=FixedBudget(6, 1))
        simulation.add("a", [1] * 5, max_tokens=left)
        plan = simulation.step()
        assert [(b.max_nodes, b.max_depth) for b in plan.budgets] == ([found] if found else [])

    @pytest.mark.parametrize(("left", "found"), [(2, (3, 1)), (3, (8, 2)), (40, (8, 8))])
    def test_a_tree_is_as_large_as_its_depth_and_width_allow(self, left: int, found: tuple[int, int]) -> None:
        simulation = Simulation(policy=FixedBudget(8, 3))
        simulation.add("a", [1] * 5, max_tokens=left)
        plan = simulation.step()
        assert [(b.max_nodes, b.max_depth) for b in plan.budgets] == [found]

    def test_no_slot_beyond_the_longest_table(self) -> None:
        simulation = Simulation(block_size=4, max_model_len=22, policy=FixedBudget(16, 4))
        simulation.add("a", [1] * 18, max_tokens=None)
        plan = simulation.step()
        assert [(b.max_nodes, b.max_depth) for b in plan.budgets] == [(6, 3)]  # 24 slots, the context's blocks
        simulation.run()
        simulation.assert_outputs()

    def test_shrinks_to_the_free_blocks_and_never_preempts(self) -> None:
        simulation = Simulation(num_blocks=6, block_size=4, caching=False, policy=FixedBudget(8), max_model_len=24)
        at_tip(simulation, "ab", length=7)
        plan = simulation.step()
        assert [s.num_tokens for s in plan.scheduled] == [1, 1]
        assert nodes(plan)[0] == 8 and sum(nodes(plan)) < 16
        assert simulation.scheduler.num_preemptions == 0
        simulation.run()
        simulation.assert_outputs()

    def test_leaves_the_last_block_to_a_waiting_request(self) -> None:
        simulation = Simulation(num_blocks=4, block_size=4, caching=False, policy=FixedBudget(8), acceptance=0.0, max_model_len=16)
        at_tip(simulation, "a", length=3, max_tokens=12)
        simulation.add("b", [1] * 6, max_tokens=1)
        plan = simulation.step()
        assert [n.sequence_id for n in plan.new] == ["b#0"]
        assert simulation.scheduler.num_preemptions == 0

    def test_scratch_slots_are_reserved_beside_the_nodes(self) -> None:
        simulation = Simulation(num_blocks=8, block_size=4, caching=False, policy=FixedBudget(6, 3), scratch=5, max_model_len=32)
        at_tip(simulation, "a", length=7)
        plan = simulation.schedule()
        sequence = simulation.scheduler.running[0]
        assert nodes(plan) == [6] and sequence.table.num_slots >= len(sequence.tokens) + 11
        simulation.finish_step(plan)
        simulation.run()
        simulation.assert_outputs()

    def test_without_room_for_scratch_nothing_is_drafted(self) -> None:
        simulation = Simulation(num_blocks=2, block_size=8, caching=False, policy=FixedBudget(6, 3), scratch=7, max_model_len=16)
        simulation.add("a", [1] * 9, max_tokens=7)
        assert simulation.step().budgets == []

    def test_sources_width_and_row_reach_the_plan(self) -> None:
        simulation = Simulation(policy=FixedBudget(8, 4))
        simulation.add("other", [2], max_tokens=9, speculation=False)
        simulation.add("a", [1], max_tokens=9, speculation={"method": "ngram", "num_speculative_tokens": 3, "tree_width": 2})
        assert simulation.step().budgets == [DraftBudget(1, 3, 3, 2, ("ngram",))]

    def test_off_for_all_above_the_concurrency(self) -> None:
        simulation = Simulation(policy=FixedBudget(4, max_concurrency=2))
        at_tip(simulation, "ab")
        assert nodes(simulation.step()) == [4, 4]
        at_tip(simulation, "c")
        assert simulation.step().budgets == []

    def test_the_policy_sees_the_load(self) -> None:
        class Recorder(FixedBudget):
            def budgets(self, sequences: Any, load: Load) -> list[DraftBudget]:
                seen.append(load)
                return super().budgets(sequences, load)

        seen: list[Load] = []
        simulation = Simulation(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=32, policy=Recorder(2))
        at_tip(simulation, "ab")
        simulation.add("c", [1], max_tokens=4)
        seen.clear()
        simulation.step()
        assert [(load.num_running, load.num_waiting, load.num_tokens) for load in seen] == [(2, 1, 2)]
        assert 0 < seen[0].kv_usage < 1


class TestCatchUp:
    def simulation(self, **changes: Any) -> Simulation:
        policy = FixedBudget(4, max_draft_lag=8, max_concurrency=changes.pop("max_concurrency", None))
        settings = {"max_num_batched_tokens": 20, "draft_has_kv": True, "draft_cost": 0.25, "block_size": 4, **changes}
        return Simulation(policy=policy, **settings)

    def test_follows_a_prompt_within_the_steps_budget(self) -> None:
        simulation = self.simulation()
        simulation.add("a", [1] * 30, max_tokens=9)
        plans = [simulation.step(), simulation.step()]
        assert [(s.num_tokens, s.draft_catch_up) for p in plans for s in p.scheduled] == [(16, 16), (14, 14)]
        assert cost(simulation.scheduler, plans[0]) == 20
        assert nodes(plans[1]) == [2]  # 20 - 14 - 14/4, rounded down
        simulation.run()
        simulation.assert_outputs()

    def test_a_prompt_goes_on_when_no_catch_up_fits(self) -> None:
        simulation = self.simulation(max_num_batched_tokens=1, draft_cost=0.5)
        simulation.add("a", [1] * 4, max_tokens=3)
        assert [(s.num_tokens, s.draft_catch_up) for s in simulation.step().scheduled] == [(1, 0)]
        simulation.run()
        simulation.assert_outputs()

    @pytest.mark.parametrize("off", [{"speculation": False}, {"speculation": {"method": "off"}}, {"max_tokens": 1}])
    def test_a_draft_that_is_off_computes_nothing(self, off: dict[str, Any]) -> None:
        simulation = self.simulation()
        simulation.add("a", [1] * 30, **{"max_tokens": 4, **off})
        simulation.run()
        shares = [s for p in simulation.plans for s in p.scheduled]
        assert shares[0].num_tokens == 20 and all(s.draft_catch_up == 0 for s in shares)
        assert not simulation.executor.draft

    def test_a_drafter_without_kv_is_granted_nothing(self) -> None:
        simulation = self.simulation(draft_has_kv=False)
        simulation.add("a", [1] * 30, max_tokens=4)
        simulation.run()
        assert all(s.draft_catch_up == 0 for p in simulation.plans for s in p.scheduled)

    def test_a_short_lag_is_made_up_in_the_step_that_drafts(self) -> None:
        simulation = self.simulation()
        at_tip(simulation, "a")
        simulation.scheduler.running[0].draft_lag = 3
        plan = simulation.schedule()
        assert plan.scheduled[0].draft_catch_up == 3 and nodes(plan) == [4]

    def test_a_long_lag_is_made_up_before_drafting(self) -> None:
        simulation = self.simulation()
        at_tip(simulation, "a")
        simulation.scheduler.running[0].draft_lag = 30
        plan = simulation.schedule()
        assert plan.scheduled[0].draft_catch_up == 30 and plan.budgets == []

    def test_what_the_budget_does_not_cover_keeps_the_draft_waiting(self) -> None:
        simulation = self.simulation(draft_cost=4.0)
        at_tip(simulation, "a")
        simulation.scheduler.running[0].draft_lag = 6
        plan = simulation.schedule()
        assert plan.scheduled[0].draft_catch_up == 4 and plan.budgets == []  # (20 - 1) / 4

    def test_a_draft_switched_off_by_load_catches_up_when_it_returns(self) -> None:
        simulation = self.simulation(max_concurrency=1, max_num_batched_tokens=64)
        simulation.add("a", [1] * 12, max_tokens=30)
        simulation.add("b", [2] * 12, max_tokens=3)
        first = simulation.step()  # both are admitted: the load was not known yet
        assert [s.draft_catch_up for s in first.scheduled] == [12, 12]
        crowded = simulation.step()
        assert crowded.budgets == [] and [s.draft_catch_up for s in crowded.scheduled] == [0, 0]
        while simulation.scheduler.num_running == 2:
            simulation.step()
        lag = simulation.scheduler.running[0].draft_lag
        plan = simulation.step()
        assert lag > 0 and plan.scheduled[0].draft_catch_up == lag and nodes(plan) == [4]
        simulation.run()
        simulation.assert_outputs()

    def test_a_cached_prefix_that_the_draft_lacks_is_made_up(self) -> None:
        simulation = self.simulation()
        simulation.add("a", [1] * 16, max_tokens=2, speculation=False)
        simulation.run()
        simulation.add("b", [1] * 17, max_tokens=20)
        first = simulation.step()
        assert first.new[0].num_computed_tokens == 16 and simulation.sequences["b#0"].draft_lag > 0
        lag = simulation.sequences["b#0"].draft_lag
        plan = simulation.step()
        assert plan.scheduled[0].draft_catch_up == lag and plan.budgets == []
        assert nodes(simulation.step()) == [4]
        simulation.run()
        simulation.assert_outputs()


class TestBlocks:
    def test_an_older_prompt_shrinks_before_it_preempts(self) -> None:
        simulation = Simulation(num_blocks=6, block_size=2, caching=False, max_num_batched_tokens=4)
        simulation.add("a", [1] * 3, max_tokens=4)
        simulation.step()
        simulation.add("b", [2] * 6, max_tokens=2)
        simulation.run()
        simulation.assert_outputs()
        assert simulation.scheduler.num_preemptions == 0

    def test_the_last_in_order_waits_in_place_where_it_alone_is_short(self) -> None:
        simulation = Simulation(num_blocks=4, block_size=2, caching=False)
        simulation.add("a", [1, 1, 1], max_tokens=2)
        simulation.add("b", [2, 2, 2], max_tokens=4)
        plans = [simulation.step() for _ in range(2)]
        assert [len(p.scheduled) for p in plans] == [2, 2]
        simulation.run()
        simulation.assert_outputs()
        assert simulation.scheduler.num_preemptions == 0

    def test_a_prompt_is_admitted_when_all_of_it_fits(self) -> None:
        simulation = Simulation(num_blocks=8, block_size=2, caching=False, max_num_batched_tokens=14)
        simulation.add("a", [1] * 11, max_tokens=2)
        simulation.add("b", [2] * 6, max_tokens=2)
        plan = simulation.step()  # 3 tokens and 2 blocks are left beside a's, and b needs 3
        assert [n.sequence_id for n in plan.new] == ["a#0"] and simulation.scheduler.num_waiting == 1
        simulation.run()
        simulation.assert_outputs()

    def test_new_blocks_follow_the_blocks_of_computed_tokens(self) -> None:
        simulation = Simulation(block_size=4, policy=FixedBudget(4), acceptance=0.0)
        simulation.add("a", [1] * 6, max_tokens=9)
        plan = simulation.step()
        assert plan.new[0].block_ids == [] and len(plan.scheduled[0].new_block_ids) == 3
        assert plan.fresh_blocks == plan.scheduled[0].new_block_ids
        again = simulation.step()  # 6 computed in 2 blocks; the third was rolled back
        assert len(again.scheduled[0].new_block_ids) == 1 and again.fresh_blocks == again.scheduled[0].new_block_ids
