"""Draft trees: `DraftTree` for people and tests, `TreeBatch` (flat arrays over all sequences) for the hot path.

Owns the shape of speculation: a chain is a tree one wide, plain decoding a root without nodes. The root is the
sequence's last committed token and is not a node. Nodes are in topological order, parent before child; a parent of -1
is the root. Knows nothing about models, KV or acceptance.

    tree = DraftTree.chain([5, 9, 2])
    batch = TreeBatch.from_trees([(0, tree), (3, DraftTree.empty())])
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

WORD_BITS = 64
NO_SOURCE = ""


class Selection(IntEnum):
    """How a tree's tokens were chosen: which acceptance rules are legal for it depends on this alone."""

    ROOT = 0  # no nodes
    DETERMINISTIC = 1  # chosen without randomness, or with the target's own noise: `match`
    SAMPLED = 2  # drawn from a law that the tree carries in `draft_logprobs`: `rejection`, `block`


@dataclass(frozen=True)
class DraftTree:
    """One sequence's tree, as lists."""

    tokens: list[int]
    parents: list[int]
    source: str = NO_SOURCE
    selection: Selection = Selection.ROOT
    draft_logprobs: np.ndarray | None = None  # float32 [num_nodes, vocab]: the law each node was drawn from
    sources: list[str] | None = None  # one a node, where sources were merged

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError("a tree has one parent a token")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent comes before its child")
        siblings = list(zip(self.parents, self.tokens, strict=True))
        if len(set(siblings)) != len(siblings):
            raise ValueError("two children of one node have the same token")

    @classmethod
    def empty(cls) -> DraftTree:
        return cls([], [])

    @classmethod
    def chain(cls, tokens: list[int], source: str = NO_SOURCE, **fields: object) -> DraftTree:
        fields.setdefault("selection", Selection.DETERMINISTIC if tokens else Selection.ROOT)
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), source, **fields)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> list[int]:
        """Depth of every node; a child of the root has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def ancestor_masks(self) -> list[int]:
        """Ancestor-or-self bits of every node, as integers of any width."""
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        return masks

    def path(self, node: int) -> list[int]:
        """Node indices from the root's child down to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def node_sources(self) -> list[str]:
        return list(self.sources) if self.sources is not None else [self.source] * len(self)

    def merge(self, other: DraftTree) -> DraftTree:
        """Both trees' paths in one tree; a node that both propose keeps this tree's source. Legal for `match` only."""
        if Selection.SAMPLED in (self.selection, other.selection):
            raise ValueError("trees that carry a draft law can't be merged")
        tokens, parents, sources = list(self.tokens), list(self.parents), self.node_sources()
        index = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        place: list[int] = []
        for token, parent, source in zip(other.tokens, other.parents, other.node_sources(), strict=True):
            key = (place[parent] if parent >= 0 else -1, token)
            if key not in index:
                index[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                sources.append(source)
            place.append(index[key])
        selection = Selection.DETERMINISTIC if tokens else Selection.ROOT
        return DraftTree(tokens, parents, self.source or other.source, selection, sources=sources)


@dataclass(frozen=True)
class TreeBatch:
    """The trees of a step's tip sequences, flat. R trees, M nodes in all."""

    rows: np.ndarray  # int32 [R]: rows of the sequence table, in the batch's order
    node_start: np.ndarray  # int32 [R + 1]: nodes of tree r are node_start[r] : node_start[r + 1]
    tokens: np.ndarray  # int32 [M]
    parents: np.ndarray  # int32 [M]: index within the tree, -1 is the root
    depths: np.ndarray  # int32 [M]: from 1
    sources: list[str] = field(default_factory=list)  # [M]
    selections: list[Selection] = field(default_factory=list)  # [R]
    draft_logprobs: dict[int, np.ndarray] = field(default_factory=dict)  # r -> float32 [nodes of r, vocab]

    @classmethod
    def from_trees(cls, trees: list[tuple[int, DraftTree]]) -> TreeBatch:
        sizes = [len(tree) for _, tree in trees]
        return cls(
            rows=np.array([row for row, _ in trees], np.int32),
            node_start=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int32),
            tokens=np.array([t for _, tree in trees for t in tree.tokens], np.int32),
            parents=np.array([p for _, tree in trees for p in tree.parents], np.int32),
            depths=np.array([d for _, tree in trees for d in tree.depths], np.int32),
            sources=[s for _, tree in trees for s in tree.node_sources()],
            selections=[tree.selection for _, tree in trees],
            draft_logprobs={i: tree.draft_logprobs for i, (_, tree) in enumerate(trees) if tree.draft_logprobs is not None},
        )

    @classmethod
    def empty(cls, rows: list[int]) -> TreeBatch:
        return cls.from_trees([(row, DraftTree.empty()) for row in rows])

    @property
    def num_trees(self) -> int:
        return len(self.rows)

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def tree(self, index: int) -> DraftTree:
        """Tree `index` as lists."""
        nodes = slice(self.node_start[index], self.node_start[index + 1])
        return DraftTree(
            tokens=self.tokens[nodes].tolist(),
            parents=self.parents[nodes].tolist(),
            selection=self.selections[index],
            draft_logprobs=self.draft_logprobs.get(index),
            sources=self.sources[nodes],
        )

    def trees(self) -> list[tuple[int, DraftTree]]:
        return [(int(row), self.tree(i)) for i, row in enumerate(self.rows)]

    def ancestor_words(self) -> np.ndarray:
        """int64 [M, words] of ancestor-or-self bits: bit b of word w is node 64 w + b of the same tree."""
        largest = int(np.diff(self.node_start).max(initial=0))
        words = max(1, -(-largest // WORD_BITS))
        masks = np.zeros((self.num_nodes, words), np.uint64)
        local = np.arange(self.num_nodes) - np.repeat(self.node_start[:-1], np.diff(self.node_start))
        masks[np.arange(self.num_nodes), local // WORD_BITS] = np.uint64(1) << (local % WORD_BITS).astype(np.uint64)
        first = np.repeat(self.node_start[:-1], np.diff(self.node_start))
        # One pass a depth: all parents of a depth are complete before it.
        for depth in range(2, int(self.depths.max(initial=0)) + 1):
            nodes = np.flatnonzero(self.depths == depth)
            masks[nodes] |= masks[first[nodes] + self.parents[nodes]]
        return masks.view(np.int64)
