"""Whole workloads drawn from seeds: what a state machine reaches seldom is reached here every time, and counted."""

from __future__ import annotations

import random
from collections import Counter

from specengine.core.speculation import FixedBudget
from specengine.errors import RequestError
from tests.unit.core.harness import Simulation

SEEDS = range(100)


def simulation_of(r: random.Random) -> Simulation:
    block_size, num_blocks = r.choice([1, 2, 4, 8]), r.randint(6, 40)
    policy = FixedBudget(
        r.choice([0, 1, 4, 8]), r.choice([1, 3]), max_concurrency=r.choice([None, None, 2]), max_draft_lag=r.choice([0, 3, 32])
    )
    return Simulation(
        num_blocks=num_blocks,
        block_size=block_size,
        caching=r.random() < 0.7,
        policy=policy,
        acceptance=r.random(),
        executor_seed=r.randrange(1000),
        scratch=r.choice([0, 0, 2]),
        order=r.choice(["fcfs", "priority"]),
        max_num_seqs=r.randint(1, 8),
        max_num_batched_tokens=r.randint(1, 64),
        max_model_len=r.randint(20, num_blocks * block_size + 30),
        draft_has_kv=r.random() < 0.6,
        draft_cost=r.choice([0, 0.3]),
    )


def run(seed: int) -> Counter[str]:
    r = random.Random(seed)
    simulation = simulation_of(r)
    for i in range(10):
        prompt = [r.randint(0, 1) for _ in range(r.randint(1, max(1, simulation.scheduler.capacity // 2)))]
        try:
            simulation.add(
                f"r{i}",
                prompt,
                max_tokens=r.randint(1, 20),
                n=r.choice([1, 1, 3]),
                priority=r.randint(0, 2),
                prompt_logprobs=r.choice([None, None, 1]),
                stops=r.choice([(), (0,)]),
            )
        except RequestError:
            assert len(prompt) >= simulation.scheduler.capacity
        for _ in range(r.randint(0, 3)):
            if simulation.scheduler.has_work:
                simulation.step()
    simulation.run()
    simulation.assert_outputs()
    return Counter(
        preemptions=simulation.scheduler.num_preemptions,
        hits=simulation.pool.hit_tokens,
        rolled_back=simulation.scheduler.rolled_back_blocks,
        copies=sum(len(p.block_copies) for p in simulation.plans),
        unknown_lags=simulation.executor.idle_budgets,
        catch_up=sum(s.draft_catch_up for p in simulation.plans for s in p.scheduled),
    )


def test_every_workload_ends_as_if_each_request_ran_alone() -> None:
    counts = sum((run(seed) for seed in SEEDS), Counter())
    assert set(counts) == {"preemptions", "hits", "rolled_back", "copies", "unknown_lags", "catch_up"}, counts
