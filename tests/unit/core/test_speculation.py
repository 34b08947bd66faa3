"""What a request may say about its drafts, and the fixed budget."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.block_pool import BlockPool
from specengine.core.block_table import BlockTable
from specengine.core.plan import DraftBudget, StepLimits
from specengine.core.sequence import Request, Sequence
from specengine.core.speculation import FixedBudget, Load, RequestSpeculation
from specengine.errors import ConfigError, RequestError
from specengine.sampling_params import SamplingParams


def sequence_with(speculation: Any = None, lag: int = 0) -> Sequence:
    own = RequestSpeculation.parse(speculation)
    request = Request("r", (1,), SamplingParams(), seed=1, max_output_tokens=100, speculation=own)
    sequence = Sequence(request, 0, (0, 1, 0), BlockTable(BlockPool(4, 4, enable_prefix_caching=False)))
    sequence.row, sequence.draft_lag = 3, lag
    return sequence


def budget_of(policy: FixedBudget, speculation: Any = None, lag: int = 0, running: int = 1) -> DraftBudget:
    return policy.budgets([sequence_with(speculation, lag)], Load(running))[0]


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (None, RequestSpeculation()),
        (True, RequestSpeculation()),
        (False, RequestSpeculation(enabled=False)),
        ({}, RequestSpeculation()),
        ({"enabled": False}, RequestSpeculation(enabled=False)),
        ({"method": "off"}, RequestSpeculation(enabled=False)),
        ({"method": "auto"}, RequestSpeculation()),
        ({"method": "ngram", "num_speculative_tokens": 4}, RequestSpeculation(num_speculative_tokens=4, sources=("ngram",))),
        ({"sources": ["ngram", "draft"], "tree_width": 2}, RequestSpeculation(tree_width=2, sources=("ngram", "draft"))),
        ({"tree_depth": 3, "tree_width": None}, RequestSpeculation(tree_depth=3)),
    ],
)
def test_a_requests_settings_are_resolved(value: Any, parsed: RequestSpeculation) -> None:
    assert RequestSpeculation.parse(value) == parsed


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"num_speculativ_tokens": 4}, "did you mean 'num_speculative_tokens'"),
        ({"zzz": 4}, "known are enabled"),
        ({"num_speculative_tokens": -1}, "'num_speculative_tokens' is -1"),
        ({"num_speculative_tokens": True}, "'num_speculative_tokens' is True"),
        ({"num_speculative_tokens": 2.0}, "'num_speculative_tokens' is 2.0"),
        ({"tree_width": 0}, "'tree_width' is 0"),
        ({"tree_depth": 0}, "'tree_depth' is 0"),
        ({"enabled": 0}, "'enabled' is 0"),
        ({"method": 3}, "'method' is 3"),
        ({"sources": "ngram"}, "'sources' is 'ngram'"),
        ({"sources": [1]}, "'sources' is"),
    ],
)
def test_wrong_settings_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named) as error:
        RequestSpeculation.parse(value)
    assert error.value.param == "speculation"


@pytest.mark.parametrize(
    ("speculation", "nodes", "depth", "width"),
    [
        (None, 8, 8, 4),
        (True, 8, 8, 4),
        (False, 0, 0, 4),
        ({"enabled": False}, 0, 0, 4),
        ({"method": "off", "num_speculative_tokens": 4}, 0, 0, 4),
        ({"num_speculative_tokens": 3}, 3, 3, 4),
        ({"num_speculative_tokens": 0}, 0, 0, 4),
        ({"num_speculative_tokens": 99, "tree_width": 99}, 8, 8, 4),  # the engine's are upper bounds
        ({"tree_width": 1, "tree_depth": 2}, 8, 2, 1),
    ],
)
def test_a_request_may_ask_for_less_than_the_engine(speculation: Any, nodes: int, depth: int, width: int) -> None:
    budget = budget_of(FixedBudget(8, 4), speculation)
    assert (budget.row, budget.max_nodes, budget.max_depth, budget.max_width) == (3, nodes, depth, width)


def test_sources_of_a_request_travel_with_its_budget() -> None:
    assert budget_of(FixedBudget(8), {"method": "ngram"}).sources == ("ngram",)
    assert budget_of(FixedBudget(8)).sources == ()


def test_depth_of_the_engine_bounds_every_tree() -> None:
    policy = FixedBudget(8, 2, tree_depth=3)
    assert [budget_of(policy, s).max_depth for s in (None, {"tree_depth": 2}, {"tree_depth": 7}, {"num_speculative_tokens": 1})] == [
        3,
        2,
        3,
        1,
    ]


def test_an_engine_without_drafts_is_off_whatever_a_request_says() -> None:
    policy = FixedBudget(0)
    assert budget_of(policy, {"num_speculative_tokens": 4}).max_nodes == 0
    assert not policy.is_on(sequence_with({"num_speculative_tokens": 4}), Load(1))


@pytest.mark.parametrize(("running", "nodes"), [(1, 4), (3, 4), (4, 0)])
def test_above_the_concurrency_nothing_is_drafted(running: int, nodes: int) -> None:
    policy = FixedBudget(4, max_concurrency=3)
    assert budget_of(policy, running=running).max_nodes == nodes
    assert budget_of(policy, {"num_speculative_tokens": 4}, running=running).max_nodes == nodes
    assert policy.is_on(sequence_with(), Load(running)) is (nodes > 0)


@pytest.mark.parametrize(("lag", "nodes"), [(0, 4), (5, 4), (6, 0)])
def test_a_draft_that_lags_gets_no_budget_but_stays_on(lag: int, nodes: int) -> None:
    policy = FixedBudget(4, max_draft_lag=5)
    assert budget_of(policy, lag=lag).max_nodes == nodes
    assert policy.is_on(sequence_with(lag=lag), Load(1))


def test_limits_are_the_sum_of_budgets() -> None:
    assert FixedBudget(4).limits(12) == StepLimits(12)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_speculative_tokens", -1), ("tree_width", 0), ("tree_depth", 0), ("max_concurrency", -1), ("max_draft_lag", -1)],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        FixedBudget(**{"num_speculative_tokens": 4, name: value})
