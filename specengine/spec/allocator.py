"""Cuts a step's trees to the plan's limits, between propose and build. Decides from counts alone, never from a token.

trees = cut(trees, plan.limits)
"""

from __future__ import annotations

import numpy as np

from specengine.core.plan import StepLimits
from specengine.tree import Selection, TreeBatch


def cut(trees: TreeBatch, limits: StepLimits) -> TreeBatch:
    """Keeps at most `total_nodes` nodes: each tree's first ones (parents come first), the same share of every tree."""
    if trees.num_nodes <= limits.total_nodes:
        return trees
    sizes = np.diff(trees.node_start)
    kept = sizes * limits.total_nodes // trees.num_nodes
    place = np.arange(trees.num_nodes) - np.repeat(trees.node_start[:-1], sizes)
    keep = place < np.repeat(kept, sizes)
    return TreeBatch(
        rows=trees.rows,
        node_start=np.concatenate([[0], np.cumsum(kept)]).astype(np.int32),
        tokens=trees.tokens[keep],
        parents=trees.parents[keep],
        depths=trees.depths[keep],
        sources=[source for source, k in zip(trees.sources, keep.tolist(), strict=True) if k],
        selections=[s if k else Selection.ROOT for s, k in zip(trees.selections, kept.tolist(), strict=True)],
        draft_logprobs={i: laws[: kept[i]] for i, laws in trees.draft_logprobs.items() if kept[i]},
    )
