"""BlockPool and BlockTable: order of reuse, prefix hashes, rollback and forks."""

from __future__ import annotations

import itertools

import pytest

from specengine.core.block_pool import NO_PARENT, BlockPool, block_hash
from specengine.core.block_table import BlockTable
from specengine.errors import ConfigError, EngineError


def pool_of(num_blocks: int = 6, *, caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, 2, enable_prefix_caching=caching)


def publish_chain(pool: BlockPool, blocks: list[int], name: str = "p") -> list[bytes]:
    keys = [f"{name}{i}".encode() for i in range(len(blocks))]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    return keys


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_below_one_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BlockPool(num_blocks, block_size, enable_prefix_caching=True)


def test_allocates_all_or_nothing() -> None:
    pool = pool_of(4)
    first = pool.allocate(3)
    assert first is not None and len(set(first)) == 3
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used, pool.usage) == (1, 3, 0.75)
    assert pool.allocate(0) == []


def test_blocks_without_a_prefix_are_reused_before_cached_ones() -> None:
    pool = pool_of(4)
    cached, plain = pool.allocate(2), pool.allocate(2)
    assert cached is not None and plain is not None
    publish_chain(pool, cached)
    pool.release(plain)
    pool.release(cached)
    again = pool.allocate(2)
    assert again is not None and set(again) == set(plain)
    assert all(pool.is_published(block) for block in cached)


def test_least_recently_freed_prefix_goes_first_and_its_end_before_its_start() -> None:
    pool = pool_of(6)
    chains = [pool.allocate(3), pool.allocate(3)]
    keys = [publish_chain(pool, chain, name) for chain, name in zip(chains, "ab", strict=True) if chain is not None]
    for chain in reversed(chains):  # the second chain is freed first
        assert chain is not None
        pool.release(chain)
    pool.allocate(1)
    assert len(pool.match_prefix(keys[1])) == 2
    assert len(pool.match_prefix(keys[0])) == 3
    pool.allocate(3)
    assert pool.match_prefix(keys[1]) == []
    assert len(pool.match_prefix(keys[0])) == 2


def test_a_match_taken_again_is_not_handed_out() -> None:
    pool = pool_of(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    pool.release(blocks)
    assert pool.num_free == 3
    found = pool.match_prefix([*keys, b"unknown"])
    assert found == blocks and pool.num_free == 3  # looking takes nothing
    pool.share(found)
    assert pool.num_free == 1 and pool.allocate(2) is None
    pool.share(found)
    pool.release(found)
    assert [pool.ref_counts[b] for b in found] == [1, 1] and pool.num_free == 1


def test_a_match_ends_at_the_first_block_that_is_missing() -> None:
    pool = pool_of()
    blocks = pool.allocate(3)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    assert pool.match_prefix([keys[0], b"x", keys[2]]) == blocks[:1]


def test_the_first_block_published_stays_the_owner() -> None:
    pool = pool_of(2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None and second is not None
    pool.publish(first[0], b"k")
    pool.publish(second[0], b"k")
    pool.publish(first[0], b"k")
    assert pool.match_prefix([b"k"]) == first and pool.num_cached == 1 and not pool.is_published(second[0])
    pool.release(second)  # the duplicate has no value and goes first
    assert pool.allocate(1) == second
    assert pool.match_prefix([b"k"]) == first


def test_publishing_a_free_block_or_another_prefix_is_an_error() -> None:
    pool = pool_of()
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], b"k")
    with pytest.raises(EngineError, match="another prefix"):
        pool.publish(blocks[0], b"other")
    pool.release(blocks)
    with pytest.raises(EngineError, match="can't be published"):
        pool.publish(blocks[0], b"k")


def test_releasing_too_often_is_an_error() -> None:
    pool = pool_of()
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(EngineError, match="more often"):
        pool.release(blocks)


def test_fresh_blocks_are_reported_once_each() -> None:
    pool = pool_of(3)
    blocks = pool.allocate(2)
    assert blocks is not None and pool.take_fresh() == blocks and pool.take_fresh() == []
    keys = publish_chain(pool, blocks)
    pool.release(blocks)
    pool.share(pool.match_prefix(keys))
    assert pool.take_fresh() == []  # a hit is not handed out as new
    third = pool.allocate(1)
    assert third is not None
    pool.release(third)
    assert pool.allocate(1) == third and pool.take_fresh() == third


def test_unpublished_blocks_are_not_found() -> None:
    pool = pool_of()
    blocks = pool.allocate(2)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    pool.unpublish(blocks[1:])
    assert pool.match_prefix(keys) == blocks[:1]
    pool.unpublish(blocks[1:])  # twice is as once


def test_reset_forgets_every_prefix_when_nothing_runs() -> None:
    pool = pool_of()
    blocks = pool.allocate(2)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    assert pool.reset_prefix_cache() is False
    assert pool.match_prefix(keys) == blocks
    pool.release(blocks)
    assert pool.reset_prefix_cache() is True
    assert pool.match_prefix(keys) == [] and pool.num_cached == 0


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = pool_of(caching=False)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], b"k")
    assert pool.match_prefix([b"k"]) == [] and pool.num_cached == 0


def test_queries_and_hits_count_tokens() -> None:
    pool = pool_of()
    pool.count_query(10, 4)
    pool.count_query(3, 0)
    assert (pool.queried_tokens, pool.hit_tokens) == (13, 4)


def test_everything_that_keys_a_block_changes_its_hash() -> None:
    parent = block_hash(NO_PARENT, [1, 2])
    keys: list[tuple[str | None, ...]] = [
        (None, None),
        ("a", None),
        (None, "a"),
        ("a", "b"),
        ("ab", None),
        ("", None),
        ("", ""),
        ("é", None),
    ]
    hashes = [block_hash(p, tokens, k) for p, tokens, k in itertools.product((NO_PARENT, parent), ([1, 2], [2, 1], [1, 2**40]), keys)]
    assert len(set(hashes)) == len(hashes) == 48
    assert all(len(h) == 32 for h in hashes)


def test_a_hash_does_not_change_between_versions() -> None:
    assert block_hash(NO_PARENT, [1, 2, 3], ("salt", None)).hex() == FROZEN_HASH
    assert block_hash(NO_PARENT, (1, 2, 3), ("salt", None)).hex() == FROZEN_HASH


def test_a_lone_surrogate_in_a_salt_is_a_key_like_any_other() -> None:
    assert block_hash(NO_PARENT, [1], ("\ud800",)) != block_hash(NO_PARENT, [1], ("\udfff",))


FROZEN_HASH = "3144dc75f7719d34b62997bc8be1bf9edbab5f1752837b92cf4af1937d155601"


class TestBlockTable:
    def test_grows_by_what_is_missing(self) -> None:
        table = BlockTable(pool_of(4))
        new = table.reserve(3)
        assert new == table.blocks and len(table) == 2 and table.num_slots == 4
        assert table.reserve(4) == [] and table.missing(5) == 1
        assert table.reserve(5) == table.blocks[2:]

    def test_stays_as_it_was_where_the_pool_is_short(self) -> None:
        table = BlockTable(pool_of(2))
        table.reserve(2)
        before = list(table.blocks)
        assert table.reserve(20) is None and table.blocks == before and table.pool.num_free == 1

    @pytest.mark.parametrize(("keep", "freed"), [(8, 0), (7, 0), (6, 1), (5, 1), (1, 3), (0, 4)])
    def test_rollback_gives_back_what_lies_beyond(self, keep: int, freed: int) -> None:
        table = BlockTable(pool_of(4))
        table.reserve(8)
        blocks = list(table.blocks)
        assert table.truncate(keep) == blocks[4 - freed :]
        assert table.blocks == blocks[: 4 - freed] and table.pool.num_free == freed

    def test_only_an_empty_table_adopts(self) -> None:
        pool = pool_of(4)
        owner = BlockTable(pool)
        owner.reserve(4)
        other = BlockTable(pool)
        other.adopt(owner.blocks)
        assert other.blocks == owner.blocks and other.blocks is not owner.blocks and pool.ref_counts[owner.blocks[0]] == 2
        with pytest.raises(EngineError, match="empty"):
            other.adopt(owner.blocks)

    def test_a_fork_shares_full_blocks_and_copies_the_tail(self) -> None:
        pool = pool_of(6)
        parent = BlockTable(pool)
        parent.reserve(6)
        forked = parent.fork(5)
        assert forked is not None
        child, copies = forked
        assert child.blocks[:2] == parent.blocks[:2] and copies == [(parent.blocks[2], child.blocks[2])]
        assert [pool.ref_counts[b] for b in parent.blocks] == [2, 2, 1] and pool.ref_counts[child.blocks[2]] == 1

    def test_a_fork_between_blocks_copies_nothing(self) -> None:
        pool = pool_of(2)
        parent = BlockTable(pool)
        parent.reserve(4)
        forked = parent.fork(4)
        assert forked is not None and forked[1] == [] and forked[0].blocks == parent.blocks

    def test_a_fork_without_room_for_the_tail_takes_nothing(self) -> None:
        pool = pool_of(2)
        parent = BlockTable(pool)
        parent.reserve(4)
        assert parent.fork(3) is None
        assert [pool.ref_counts[b] for b in parent.blocks] == [1, 1]
