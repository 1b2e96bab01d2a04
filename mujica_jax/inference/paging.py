"""Assign tokens to pages of the KV cache: block tables, reference counts, and a radix tree.

Memory is cut into pages of `page_tokens` tokens. A request's block table has the pages that its
longest possible sequence needs. If its prompt begins like an earlier sequence, the pages of that
prefix come from the tree (the prefix cache) and are not computed again.

The tree's nodes are pages: inner nodes are full, a leaf may be partly filled. A page that several
sequences read is never written. A sequence that continues from the middle of a page gets a copy
(copy on write). There is one exception: a partly filled leaf that is continued where it ends, and
that no other sequence reads, is taken over.

Pages that no running request uses stay in the tree until memory is needed. Then the least recently
used leaves are evicted. This module holds numbers only. The arrays are in the engine, and the
scheduler decides when requests come and go.
"""

import bisect
import collections
import dataclasses

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(eq=False, slots=True)
class RadixNode:
    """A page in the tree."""

    tokens: np.ndarray  # what it holds; only a leaf holds fewer than a page
    page: int
    parent: "RadixNode | None"  # None for the root, and once it has left the tree
    users: int = 0  # running requests that read this page
    children: "dict[bytes, RadixNode]" = dataclasses.field(default_factory=dict)
    # The children's keys, sorted: what begins alike stands together.
    order: list[bytes] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
class BlockTable:
    """The pages of one running request. Token n lies in `pages[n // page_tokens]`."""

    pages: list[int]
    shared: list[RadixNode]  # the tree's nodes among them, from the front
    cached_tokens: int  # tokens whose keys and values were in memory when it was allocated
    # (from, to): a page to copy before anything is computed.
    copied: tuple[int, int] | None
    # Pages whose tokens the tree has in other pages. The engine's table still names them.
    duplicates: list[int] = dataclasses.field(default_factory=list)


class BlockAllocator:
    """All pages of an engine."""

    def __init__(self, count: int, page_tokens: int) -> None:
        assert count >= 1 and page_tokens >= 1, (
            f"{count} pages of {page_tokens} tokens hold nothing"
        )
        self.count = count
        self.page_tokens = page_tokens
        self.evicted = 0  # pages, since the beginning
        self._free = list(range(count - 1, -1, -1))
        self._root = RadixNode(np.zeros(0, np.int32), -1, None)
        # Pages of the tree that no running request reads, so that all are available. The longest
        # unused comes first, and each page before its parent.
        self._idle: collections.OrderedDict[RadixNode, None] = collections.OrderedDict()

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that can be allocated: empty pages, and pages that no running request reads."""
        return len(self._free) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Return how many pages hold this many tokens."""
        return -(-tokens // self.page_tokens)

    def allocate(
        self, prompt: Int[np.ndarray, " prompt"], capacity_tokens: int, *, reuse: bool = True
    ) -> BlockTable | None:
        """Return a block table for a sequence that begins with `prompt`; None if memory is short.

        The sequence may have up to `capacity_tokens`. The last prompt token never counts as cached,
        because its logits are needed.
        """
        # The full pages of the prefix, and a page of which only the first tokens match.
        path: list[RadixNode] = []
        tail = None
        tail_tokens = 0
        if reuse:
            path, tail, tail_tokens = self._match(prompt[:-1])

        # Pinned pages are not evicted by the allocation below.
        for node in path:
            self._pin(node)
        if tail is not None:
            self._pin(tail)

        # The tail is taken over or copied. A copy needs one page more than there is if the tail is
        # the missing page itself: then do without it.
        needed_pages = self.needed(capacity_tokens) - len(path)
        is_taken_over = tail is not None and tail.users == 1 and len(tail.tokens) == tail_tokens
        if tail is not None and not is_taken_over and needed_pages > self.available:
            self._unpin(tail)
            tail = None
            tail_tokens = 0

        new_pages = self._allocate(needed_pages - 1 if is_taken_over else needed_pages)
        if new_pages is None:
            if tail is not None:
                self._unpin(tail)
            self._unpin(*path)
            return None
        copied = None
        if tail is not None and is_taken_over:
            self._detach(tail)
            new_pages.insert(0, tail.page)
        elif tail is not None:
            self._unpin(tail)
            copied = (tail.page, new_pages[0])
        cached_tokens = len(path) * self.page_tokens + tail_tokens
        pages = [node.page for node in path] + new_pages
        return BlockTable(pages, shared=path, cached_tokens=cached_tokens, copied=copied)

    def cached_pages(self, prompt: Int[np.ndarray, " prompt"]) -> int:
        """Return how many full pages of this prompt are in the tree. Pins nothing."""
        return len(self._match(prompt[:-1])[0])

    def share(self, table: BlockTable, tokens: Int[np.ndarray, " tokens"]) -> None:
        """Put the full pages of a table into the tree. The table's pages hold these tokens now."""
        size = self.page_tokens
        node = table.shared[-1] if table.shared else self._root
        for index in range(len(table.shared), len(tokens) // size):
            block = tokens[index * size : (index + 1) * size]
            child = node.children.get(_key(block))
            if child is None:
                child = self._attach(node, block, table.pages[index])
            else:
                # Another request computed the same. This request's own page is freed when it ends.
                table.duplicates.append(table.pages[index])
                table.pages[index] = child.page
            self._pin(child)
            table.shared.append(child)
            node = child

    def release(self, table: BlockTable, tokens: Int[np.ndarray, " tokens"]) -> None:
        """End a request whose pages hold these tokens. The pages go to the tree, or are freed.

        Pass no `tokens` if the contents of the pages must not be used again.
        """
        self.share(table, tokens)
        pages_in_tree = len(table.shared)
        rest = tokens[pages_in_tree * self.page_tokens :]
        if 0 < len(rest) < self.page_tokens:
            parent = table.shared[-1] if table.shared else self._root
            if self._keep_tail(parent, rest, table.pages[pages_in_tree]):
                pages_in_tree += 1
        self._free.extend(table.pages[pages_in_tree:])
        self._free.extend(table.duplicates)
        self._unpin(*table.shared)
        table.pages = []
        table.shared = []
        table.duplicates = []

    def evict(self, table: BlockTable) -> list[int]:
        """Take the table's pages out of the tree, because their contents must not be read.

        Pages that other requests read stay. Returns the pages that only this request has. They must
        be emptied before it is released.
        """
        while table.shared and table.shared[-1].users == 1 and not table.shared[-1].children:
            self._detach(table.shared.pop())
        return table.pages[len(table.shared) :] + table.duplicates

    def _match(self, tokens: np.ndarray) -> tuple[list[RadixNode], RadixNode | None, int]:
        """Find the longest beginning of `tokens` in the tree.

        Returns (its full pages, the page that continues it best, how many tokens of that page).
        """
        path = []
        node = self._root
        size = self.page_tokens
        for start in range(0, len(tokens) - size + 1, size):
            child = node.children.get(_key(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        rest = tokens[len(path) * size :][:size]
        if len(rest) == 0 or not node.children:
            return path, None, 0

        # In sorted order the child with the longest common beginning is a neighbour.
        index = bisect.bisect_left(node.order, _key(rest))
        neighbours = [node.children[key] for key in node.order[max(0, index - 1) : index + 1]]
        best = max(neighbours, key=lambda child: _common_tokens(child.tokens, rest))
        common_tokens = _common_tokens(best.tokens, rest)
        if common_tokens == 0:
            return path, None, 0
        return path, best, common_tokens

    def _keep_tail(self, parent: RadixNode, rest: np.ndarray, page: int) -> bool:
        """Put a partly filled page into the tree. It replaces an unused page that it continues.

        Returns False if the tree has these tokens already.
        """
        key = _key(rest)
        index = bisect.bisect_left(parent.order, key)
        if index < len(parent.order) and parent.order[index].startswith(key):
            return False
        if index > 0:
            key_before = parent.order[index - 1]
            before = parent.children[key_before]
            if before.users == 0 and key.startswith(key_before):
                self._detach(before)
                self._free.append(before.page)
        node = self._attach(parent, rest, page)
        self._idle[node] = None
        return True

    def _pin(self, node: RadixNode) -> None:
        """Count one more request that reads this page, so that it is not evicted."""
        self._idle.pop(node, None)
        node.users += 1

    def _unpin(self, *path: RadixNode) -> None:
        """Count one request less for each of these pages, which are in order from the root.

        The last page is released first, so that children are idle before their parents.
        """
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self._idle[node] = None

    def _allocate(self, count: int) -> list[int] | None:
        """Return this many free pages, evicting idle ones as needed. None if there are too few."""
        if count > self.available:
            return None
        while count > len(self._free):
            leaf = next(iter(self._idle))
            assert not leaf.children, "a page is idle before its parent"
            self._detach(leaf)
            self._free.append(leaf.page)
            self.evicted += 1
        return [self._free.pop() for _ in range(count)]

    def _attach(self, parent: RadixNode, tokens: np.ndarray, page: int) -> RadixNode:
        """Add a page to the tree."""
        node = RadixNode(tokens.copy(), page, parent)
        key = _key(tokens)
        parent.children[key] = node
        bisect.insort(parent.order, key)
        return node

    def _detach(self, node: RadixNode) -> None:
        """Take a page out of the tree."""
        parent = node.parent
        key = _key(node.tokens)
        assert parent is not None, "the root stays, and nobody leaves twice"
        del parent.children[key]
        del parent.order[bisect.bisect_left(parent.order, key)]
        node.parent = None
        self._idle.pop(node, None)


def _key(tokens: np.ndarray) -> bytes:
    """Return bytes that sort as the tokens do."""
    return tokens.astype(">u4").tobytes()


def _common_tokens(tokens: np.ndarray, others: np.ndarray) -> int:
    """Return the length of the common beginning of two sequences."""
    length = min(len(tokens), len(others))
    different = tokens[:length] != others[:length]
    return int(different.argmax()) if different.any() else length
