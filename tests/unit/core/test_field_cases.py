"""Reported misbehaviour of comparable engines, as far as `core` decides it. The numbers are the cases'."""

from __future__ import annotations

import pytest

from specengine.core.speculation import FixedBudget
from specengine.errors import RequestError
from tests.unit.core.harness import Simulation, cost


def test_3_the_only_candidate_is_rejected() -> None:
    simulation = Simulation(block_size=4, policy=FixedBudget(1), acceptance=0.0)
    simulation.add("a", [1, 2, 3], max_tokens=33)
    emitted = 0
    while simulation.scheduler.has_work:
        simulation.step()
        sequence = simulation.sequences["a#0"]
        emitted += 1
        assert sequence.num_output_tokens == emitted and sequence.num_computed_tokens == 3 + emitted - 1
    simulation.check_idle()
    simulation.assert_outputs()


def test_5_speculating_prefilling_ending_and_plain_sequences_share_a_step() -> None:
    simulation = Simulation(max_num_batched_tokens=24, policy=FixedBudget(5))
    simulation.add("drafts", [1] * 4, max_tokens=30)
    simulation.add("ending", [2] * 4, max_tokens=3, stops=())
    simulation.add("plain", [3] * 4, max_tokens=30, speculation=False)
    simulation.executor.acceptance = 0.0
    simulation.step()
    simulation.executor.acceptance = 0.8
    simulation.add("prefilling", [4] * 40, max_tokens=5)
    plan = simulation.step()
    assert [s.num_tokens for s in plan.scheduled] == [1, 1, 1, 15] and [s.is_tip for s in plan.scheduled] == [True, True, True, False]
    assert [(b.row, b.max_nodes) for b in plan.budgets] == [(0, 5), (1, 1)]
    simulation.run()
    simulation.assert_outputs()


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_21_no_more_tokens_than_asked_for(max_tokens: int) -> None:
    simulation = Simulation(policy=FixedBudget(4), acceptance=1.0)
    simulation.add("a", [1], max_tokens=max_tokens)
    simulation.run()
    assert len(simulation.outputs["a#0"]) == max_tokens and simulation.sequences["a#0"].finish_reason == "length"


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "drafting"])
def test_41_a_client_goes_away(state: str) -> None:
    simulation = Simulation(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=12, policy=FixedBudget(4))
    simulation.add("other", [1] * 4, max_tokens=40)
    simulation.step()
    if state == "waiting":
        simulation.add("second", [2] * 4, max_tokens=40)
        simulation.step()
    simulation.add("gone", [3] * 20, max_tokens=50, n=2)
    for _ in range({"waiting": 1, "prefilling": 1, "running": 6, "drafting": 6}[state]):
        simulation.step()
    plan = simulation.schedule() if state == "drafting" else None
    held = {block for s in simulation.scheduler.running if s.request.request_id == "gone" for block in s.table.blocks}
    assert bool(held) == (state != "waiting")
    simulation.scheduler.abort("gone")
    if plan is not None:
        simulation.finish_step(plan)
    assert not any(s.request.request_id == "gone" for s in simulation.scheduler.running + simulation.scheduler.waiting)
    assert simulation.pool.num_used == sum(len(s.table) for s in simulation.scheduler.running)
    simulation.run()
    assert "gone#0" not in simulation.outputs and simulation.outputs["other#0"] == simulation.solo("other#0")


def test_43_a_request_larger_than_the_pool_is_refused_and_blocks_nobody() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, max_model_len=256)
    with pytest.raises(RequestError, match=r"\b100 tokens.*\b64 tokens"):
        simulation.add("large", [1] * 100)
    simulation.add("small", [1] * 5, max_tokens=8)
    assert len(simulation.run()["small#0"]) == 8


def test_43_output_is_bounded_by_the_pool_and_runs_to_its_end() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, max_model_len=256, policy=FixedBudget(4, 2))
    simulation.add("a", [1] * 60, max_tokens=None)
    assert len(simulation.run()["a#0"]) == 4


def test_45_cached_prefixes_need_not_be_consecutive() -> None:
    simulation = Simulation(num_blocks=48, block_size=4, max_num_batched_tokens=24, policy=FixedBudget(5, 2), acceptance=0.6)
    prompts = {name: [(index + 3 * i) % 5 for i in range(17)] for index, name in enumerate("abc")}
    for name, prompt in prompts.items():
        simulation.add(name, prompt, max_tokens=12)
    simulation.run()
    again = prompts["a"] + simulation.outputs["a#0"] + [1, 2, 3]
    simulation.add("again", again, max_tokens=12)
    plan = simulation.step()
    blocks = plan.new[0].block_ids
    assert plan.new[0].num_computed_tokens == 28  # 17 + 12 tokens, the last without KV: 7 full blocks
    assert any(b != a + 1 for a, b in zip(blocks, blocks[1:], strict=False)), "the blocks are scattered"
    simulation.run()
    simulation.assert_outputs()
    assert simulation.sequences["again#0"].num_cached_tokens == 28 == simulation.pool.hit_tokens


def test_45_a_whole_prompt_in_the_cache_computes_its_last_tokens_in_a_block_of_its_own() -> None:
    simulation = Simulation(block_size=4)
    simulation.add("a", [1] * 8, max_tokens=4)
    simulation.step()
    simulation.add("b", [1] * 8, max_tokens=4)
    plan = simulation.schedule()
    first, second = simulation.scheduler.running
    assert plan.new[0].num_computed_tokens == 4
    assert second.table.blocks[0] == first.table.blocks[0] and second.table.blocks[1] != first.table.blocks[1]
    simulation.finish_step(plan)
    simulation.run()
    assert simulation.outputs["a#0"] == simulation.outputs["b#0"]


def test_45_prompt_logprobs_read_nothing_from_the_cache_and_still_feed_it() -> None:
    simulation = Simulation(block_size=4)
    for name in "ab":
        simulation.add(name, [1] * 9, max_tokens=2, prompt_logprobs=0)
        simulation.run()
    assert [n.num_computed_tokens for p in simulation.plans for n in p.new] == [0, 0] and simulation.pool.queried_tokens == 0
    simulation.add("c", [1] * 9, max_tokens=2)
    simulation.run()
    assert simulation.sequences["c#0"].num_cached_tokens == 8


def test_45_salts_keep_callers_apart() -> None:
    simulation = Simulation(block_size=4)
    for name, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        simulation.add(name, [1] * 9, max_tokens=2, cache_salt=salt)
        simulation.run()
    assert [simulation.sequences[f"{name}#0"].num_cached_tokens for name in "abcd"] == [0, 0, 0, 8]


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("has_kv", [False, True])
def test_47_preemption_with_drafts_in_flight(nodes: int, has_kv: bool) -> None:
    simulation = Simulation(num_blocks=25, block_size=4, policy=FixedBudget(nodes, 2), acceptance=0.6, draft_has_kv=has_kv, draft_cost=0.1)
    for i in range(4):
        simulation.add(f"r{i}", [i] * 8, max_tokens=32)
    simulation.run()
    simulation.assert_outputs()
    assert simulation.scheduler.num_preemptions > 0


def test_49_no_step_exceeds_the_token_budget() -> None:
    simulation = Simulation(num_blocks=128, max_model_len=256, max_num_batched_tokens=32, policy=FixedBudget(4), acceptance=0.5)
    for i in range(3):
        simulation.add(f"r{i}", [i] * 6, max_tokens=60)
    simulation.step()
    simulation.add("long", [4] * 200, max_tokens=4)
    plan = simulation.step()
    assert [s.num_tokens for s in plan.scheduled] == [1, 1, 1, 17] and cost(simulation.scheduler, plan) == 32
    simulation.run()
    simulation.assert_outputs()
    assert all(s.num_tokens <= 17 for p in simulation.plans[1:8] for s in p.scheduled)


@pytest.mark.parametrize(("prompt", "tokens"), [(60, 4), (63, 1)])
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_51_no_draft_beyond_the_context(prompt: int, tokens: int, max_tokens: int | None) -> None:
    simulation = Simulation(max_model_len=64, max_num_batched_tokens=128, policy=FixedBudget(5), acceptance=1.0)
    simulation.add("a", [1] * prompt, max_tokens=max_tokens)
    simulation.run()
    assert len(simulation.outputs["a#0"]) == tokens and simulation.sequences["a#0"].finish_reason == "length"
    for plan in simulation.plans:
        for budget in plan.budgets:
            (scheduled,) = plan.scheduled
            assert scheduled.start + scheduled.num_tokens - 1 + budget.max_depth < 64


@pytest.mark.parametrize("caching", [False, True])
def test_83_nothing_is_kept_of_requests_that_ended(caching: bool) -> None:
    simulation = Simulation(policy=FixedBudget(4, max_concurrency=4), caching=caching, num_blocks=40)
    for i in range(60):
        simulation.add(f"r{i}", [i % 5, i % 3] * (1 + i % 4), max_tokens=1 + i % 7, n=1 + i % 3)
        simulation.step()
    simulation.run()  # ends with check_idle
    simulation.assert_outputs()
