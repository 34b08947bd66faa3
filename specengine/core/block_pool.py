"""`BlockPool`: which KV blocks are in use, by how many, and which hold a prefix that can be used again.

Owns reference counts, prefix hashes, and the free list, which is in least-recently-used order: a block that is freed
keeps its contents until it is handed out again. Every operation is O(1) a block. Knows nothing about sequences or tensors.

    pool = BlockPool(num_blocks=1024, block_size=16, enable_prefix_caching=True)
    ids = pool.allocate(3)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike

from specengine.errors import ConfigError, EngineError

NO_PARENT = bytes(32)  # as long as a hash, so that a first block can't be mistaken for a later one
ABSENT = (2**32 - 1).to_bytes(4, "little")


def block_hash(parent: bytes, token_ids: ListLike[int], extra_keys: tuple[str | None, ...] = ()) -> bytes:
    """SHA-256 over the parent block's hash, the block's token ids, and what else keys the cache (salt, adapter).

    `extra_keys` have fixed places; None is told from every string. Returns 32 bytes.
    """
    parts = [parent, array("q", token_ids).tobytes()]
    for key in extra_keys:
        if key is None:
            parts.append(ABSENT)
            continue
        text = key.encode("utf-8", "surrogatepass")
        parts += (len(text).to_bytes(4, "little"), text)
    return hashlib.sha256(b"".join(parts)).digest()


class BlockPool:
    """Blocks 0 to num_blocks - 1 of `block_size` token slots each. Raises ConfigError for sizes below 1."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool):
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"the KV cache has {num_blocks} blocks of {block_size} tokens; allowed is at least 1 of each")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))  # next to go first
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._fresh: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, those with a cached prefix included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix can be found in, in use or not."""
        return len(self._hash_of)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_used / self.num_blocks

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with a reference count of 1, least recently used first; None where fewer are free."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self.ref_counts[block] = 1
            self._fresh[block] = None
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each block, free ones (with contents kept) included."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def release(self, blocks: ListLike[int]) -> None:
        """Gives one reference of each back. The last block of a prefix goes first, so that its start stays longest.

        Raises EngineError for a block that nobody holds.
        """
        for block in reversed(blocks):
            if self.ref_counts[block] <= 0:
                raise EngineError(f"KV block {block} is released more often than it was taken")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)  # nothing in it is worth keeping

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest known run of `hashes`; takes no reference and counts no query."""
        found: list[int] = []
        if self.enable_prefix_caching:
            for key in hashes:
                block = self._by_hash.get(key)
                if block is None:
                    break
                found.append(block)
        return found

    def count_query(self, num_tokens: int, num_hit: int) -> None:
        """Counts a look-up that was used: tokens asked for, and tokens found."""
        self.queried_tokens += num_tokens
        self.hit_tokens += num_hit

    def publish(self, block: int, key: bytes) -> None:
        """Makes a full block of committed tokens findable; a block that already holds the same prefix stays the owner.

        Raises EngineError for a block that is not in use or that is published under another hash.
        """
        if not self.enable_prefix_caching:
            return
        if self.ref_counts[block] == 0 or self._hash_of.get(block, key) != key:
            raise EngineError(f"KV block {block} can't be published: it is free, or holds another prefix")
        if self._by_hash.setdefault(key, block) == block:
            self._hash_of[block] = key

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Takes blocks out of the prefix cache, whoever uses them: their contents can't be trusted."""
        for block in blocks:
            self._forget(block)

    def is_published(self, block: int) -> bool:
        return block in self._hash_of

    def take_fresh(self) -> list[int]:
        """Blocks handed out since the last call, each once: nothing in them is valid for any model."""
        fresh, self._fresh = list(self._fresh), {}
        return fresh

    def reset_prefix_cache(self) -> bool:
        """Forgets every prefix. False, and nothing happens, while blocks are in use."""
        if self.num_used:
            return False
        self._by_hash.clear()
        self._hash_of.clear()
        return True

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._by_hash[key]
