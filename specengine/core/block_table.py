"""`BlockTable`: the ordered blocks of one sequence.

Owns growth, rollback and forking over a `BlockPool`. Position p lies in block p // block_size at offset
p % block_size, for every model of the sequence. Knows nothing about tokens.

    table = BlockTable(pool)
    new_ids = table.reserve(40)
    table.truncate(33)
"""

from __future__ import annotations

from specengine.core.block_pool import BlockPool
from specengine.errors import EngineError


class BlockTable:
    def __init__(self, pool: BlockPool, blocks: list[int] | None = None):
        self.pool = pool
        self.block_size = pool.block_size
        self.blocks: list[int] = blocks if blocks is not None else []

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_slots(self) -> int:
        return len(self.blocks) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, num_tokens: int) -> int:
        """Blocks that `reserve(num_tokens)` would take."""
        return max(0, self.blocks_for(num_tokens) - len(self.blocks))

    def reserve(self, num_tokens: int) -> list[int] | None:
        """Grows to hold `num_tokens`; returns the new block ids, or None (and nothing changes) where the pool is short."""
        missing = -(-num_tokens // self.block_size) - len(self.blocks)
        if missing <= 0:
            return []
        new = self.pool.allocate(missing)
        if new is not None:
            self.blocks.extend(new)
        return new

    def adopt(self, blocks: list[int]) -> None:
        """Shares blocks found in the prefix cache. Raises EngineError for a table that has blocks already."""
        if self.blocks:
            raise EngineError("only an empty block table can take cached blocks")
        self.pool.share(blocks)
        self.blocks = list(blocks)

    def truncate(self, num_tokens: int) -> list[int]:
        """Rollback: gives back every block beyond `num_tokens` and returns their ids."""
        keep = self.blocks_for(num_tokens)
        gone = self.blocks[keep:]
        if gone:
            self.pool.release(gone)
            del self.blocks[keep:]
        return gone

    def fork(self, num_tokens: int) -> tuple[BlockTable, list[tuple[int, int]]] | None:
        """A table that shares the full blocks of the first `num_tokens` tokens, with a copy of the tail to be made.

        Returns the table and the block copies (source, destination), or None where the pool has no block for the tail.
        """
        full = num_tokens // self.block_size
        tail: list[int] | None = []
        if num_tokens % self.block_size:
            tail = self.pool.allocate(1)
            if tail is None:
                return None
        shared = self.blocks[:full]
        self.pool.share(shared)
        copies = [(self.blocks[full], tail[0])] if tail else []
        return BlockTable(self.pool, shared + (tail or [])), copies
