"""BlockPool against a naive model: lists searched from end to end, under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specengine.core.block_pool import BlockPool

NAMES = st.sampled_from([bytes([n]) for n in range(8)])


class BlockPoolMachine(RuleBasedStateMachine):
    """The model keeps holders, a free list in order of reuse, and which block owns which name."""

    @initialize(num_blocks=st.integers(1, 8), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, 2, enable_prefix_caching=caching)
        self.caching = caching
        self.held: list[list[int]] = []
        self.free = list(range(num_blocks))
        self.owner: dict[bytes, int] = {}
        self.fresh: list[int] = []

    def count(self, block: int) -> int:
        return sum(holder.count(block) for holder in self.held)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        found = self.pool.allocate(count)
        if count > len(self.free):
            assert found is None
            return
        assert found == self.free[:count]
        del self.free[:count]
        self.owner = {name: block for name, block in self.owner.items() if block not in found}
        self.fresh = list(dict.fromkeys(self.fresh + found))
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(holder)
        for place, block in reversed(list(enumerate(holder))):
            if self.count(block) == 0 and block not in holder[:place]:
                self.free.insert(len(self.free) if block in self.owner.values() else 0, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.held))
        shared = holder[: data.draw(st.integers(0, len(holder)))]
        self.pool.share(shared)
        self.held.append(list(shared))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), name=NAMES)
    def publish(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted({b for holder in self.held for b in holder})))
        if any(b == block and key != name for key, b in self.owner.items()):
            return
        self.pool.publish(block, name)
        if self.caching:
            self.owner.setdefault(name, block)

    @rule(names=st.lists(NAMES, max_size=4))
    def look_up_and_share(self, names: list[bytes]) -> None:
        known: list[int] = []
        for name in names:
            if name not in self.owner:
                break
            known.append(self.owner[name])
        found = self.pool.match_prefix(names)
        assert found == known
        self.pool.share(found)
        self.held.append(found)
        self.free = [block for block in self.free if block not in found]

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.held))
        self.pool.unpublish(holder)
        self.owner = {name: block for name, block in self.owner.items() if block not in holder}

    @rule()
    def take_fresh(self) -> None:
        assert self.pool.take_fresh() == self.fresh
        self.fresh = []

    @rule()
    def reset(self) -> None:
        idle = len(self.free) == self.pool.num_blocks
        assert self.pool.reset_prefix_cache() is idle
        if idle:
            self.owner = {}

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.pool
        assert pool.ref_counts == [self.count(block) for block in range(pool.num_blocks)]
        assert list(pool._free) == self.free
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert pool._by_hash == self.owner
        assert {block: name for name, block in pool._by_hash.items()} == pool._hash_of
        assert all(pool.is_published(block) == (block in self.owner.values()) for block in range(pool.num_blocks))


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestBlockPoolAtLength(BlockPoolMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=5000, stateful_step_count=60, deadline=None)
