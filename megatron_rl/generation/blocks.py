"""Blocks of the paged KV cache: who owns which, shared prefixes, reference counts.

A block holds the keys and values of `block_size` consecutive positions. A full block is known by
the hash of all tokens up to its end, so that another sequence with the same beginning (prompts with
one few-shot header) uses it instead of computing it again. Sharing is safe within one forward pass,
too: each layer writes all keys and values before it attends. The samples of one prompt fork its
table as a whole, the half-filled last block included; whoever writes into that one first copies it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

DROPPED = -1  # place of a block that has left the attention window


@dataclass(kw_only=True, slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens; `DROPPED` where a window has passed.
    `hashes` covers the full and published ones."""

    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


class Blocks:
    """Allocator of a fixed number of blocks.

    A freed block keeps its contents (and its hash) until it is taken again, so a prefix survives
    the sequence that computed it.
    """

    def __init__(self, count: int, block_size: int, *, share_prefixes: bool = True) -> None:
        self.count, self.block_size, self.share_prefixes = count, block_size, share_prefixes
        self._free: deque[int] = deque(range(count))
        self._references = [0] * count
        self._hash_of: list[int | None] = [None] * count
        self._block_of: dict[int, int] = {}
        self.shared_blocks = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def match_prefix(self, table: BlockTable, tokens: list[int]) -> int:
        """Takes known blocks for the beginning of `tokens` into an empty table.

        The last token is never covered: its logits have to be computed.

        Returns:
            Tokens that need no computation.
        """
        assert not table.blocks, "prefixes are matched before anything is allocated"
        if not self.share_prefixes:
            return 0
        parent = 0
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            parent = _chain(parent, tokens[start : start + self.block_size])
            block = self._block_of.get(parent)
            if block is None:
                break
            self._take(block)
            table.blocks.append(block)
            table.hashes.append(parent)
            self.shared_blocks += 1
        return len(table.blocks) * self.block_size

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Allocates blocks until the table holds `tokens` tokens; all or nothing.

        Returns:
            False when there are not enough free blocks.
        """
        missing = self.needed(tokens) - len(table.blocks)
        if missing > len(self._free):
            return False
        table.blocks += [self._new() for _ in range(missing)]
        return True

    def publish(self, table: BlockTable, tokens: list[int], written: int) -> None:
        """Makes full blocks known whose first `written` tokens are (being) written."""
        if not self.share_prefixes:
            return
        while (len(table.hashes) + 1) * self.block_size <= written:
            index = len(table.hashes)
            parent = table.hashes[-1] if table.hashes else 0
            start = index * self.block_size
            key = _chain(parent, tokens[start : start + self.block_size])
            table.hashes.append(key)
            if key not in self._block_of and table.blocks[index] != DROPPED:
                self._block_of[key] = table.blocks[index]
                self._hash_of[table.blocks[index]] = key

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks."""
        for block in table.blocks:
            if block != DROPPED:
                self._take(block)
        self.shared_blocks += len(table.blocks)
        return BlockTable(blocks=list(table.blocks), hashes=list(table.hashes))

    def shared(self, table: BlockTable, index: int) -> bool:
        """Whether another table has this block, too."""
        return self._references[table.blocks[index]] > 1

    def make_own(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Gives the table a block of its own in place of a shared one (copy on write).

        Returns:
            (from, to): the contents to copy; equal if the block was its own already. None when
            there is no free block.
        """
        old = table.blocks[index]
        if self._references[old] == 1:
            return old, old
        if not self._free:
            return None
        table.blocks[index] = self._new()
        self._give_back(old)
        return old, table.blocks[index]

    def drop_before(self, table: BlockTable, token: int) -> None:
        """Gives back the blocks that hold only tokens before `token`."""
        for index in range(min(token // self.block_size, len(table.blocks)) - 1, -1, -1):
            if table.blocks[index] == DROPPED:
                return
            self._give_back(table.blocks[index])
            table.blocks[index] = DROPPED

    def release(self, table: BlockTable) -> None:
        """Gives a sequence's blocks back; the last tokens' blocks are reused first."""
        for block in reversed(table.blocks):
            if block != DROPPED:
                self._give_back(block)
        table.blocks, table.hashes = [], []

    def _give_back(self, block: int) -> None:
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} was released twice"
        if self._references[block] == 0:
            self._free.append(block)

    def _new(self) -> int:
        block = self._free.popleft()
        self._forget(block)
        self._references[block] = 1
        return block

    def _take(self, block: int) -> None:
        if self._references[block] == 0:
            self._free.remove(block)
        self._references[block] += 1

    def _forget(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._block_of[key]
            self._hash_of[block] = None


def _chain(parent: int, tokens: list[int]) -> int:
    """Identity of a block: its tokens and everything before them. Python's tuple hash is 64 bits
    wide and equal in all processes for integers."""
    return hash((parent, tuple(tokens)))
