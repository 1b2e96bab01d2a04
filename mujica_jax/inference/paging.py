"""The block manager: assign pages of the KV cache to requests, and keep a prefix cache.

The KV cache is divided into pages of `page_tokens` tokens. Each request has a block table: a list
of enough pages for its prompt and all tokens that it may generate.

The prefix cache is a radix tree of pages. Each node is one page, and the path from the root to a
node spells the tokens of a prefix. Inner nodes are full pages. A leaf may be partly filled. A new
request reuses the pages of the longest path that matches its prompt, and only the rest of the
prompt is computed.

A page that several sequences read is never written. If a prompt matches only the first tokens of a
page, the request gets a copy of that page (copy on write). There is one exception. The prompt may
match all tokens of a partly filled leaf that no other request reads. The request then takes this
page out of the tree and continues to fill it.

When a request ends, its pages stay in the tree until memory is needed. Then the least recently used
leaves are evicted (LRU).

This module holds page numbers and token ids only. The arrays of keys and values are in the engine.
The scheduler calls this module when it admits and ends requests.
"""

import bisect
import collections
import dataclasses

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(eq=False, slots=True)
class RadixNode:
    """One page in the radix tree of the prefix cache."""

    # Token ids in the page, [tokens], int32. Only a leaf holds fewer than `page_tokens`.
    tokens: np.ndarray
    # Number of the page. The root has no page, and its number is -1.
    page: int
    # None for the root, and for a page that was removed from the tree.
    parent: "RadixNode | None"
    # Reference count: how many running requests read this page.
    users: int = 0
    # The next pages. The key is `_key` of the child's tokens.
    children: "dict[bytes, RadixNode]" = dataclasses.field(default_factory=dict)
    # The keys of the children in sorted order, so keys with a common beginning are neighbours.
    order: list[bytes] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
class BlockTable:
    """The pages of one running request. Token n is in page `pages[n // page_tokens]`."""

    # Page numbers, in the order of the tokens.
    pages: list[int]
    # Nodes of the first `len(shared)` pages. These pages are in the tree, and other requests may
    # read them too.
    shared: list[RadixNode]
    # How many prompt tokens were found in the prefix cache when the table was allocated.
    cached_tokens: int
    # (source page, target page): a page to copy before the prompt is computed. None if not needed.
    copied: tuple[int, int] | None
    # Pages of this request whose tokens the tree already holds in another page. The engine may
    # still read them, so they are freed when the request ends.
    duplicates: list[int] = dataclasses.field(default_factory=list)


class BlockAllocator:
    """The block manager of one engine. It owns all `count` pages of `page_tokens` tokens each."""

    def __init__(self, count: int, page_tokens: int) -> None:
        """Make `count` empty pages and an empty prefix cache."""
        assert count >= 1 and page_tokens >= 1, (
            f"{count} pages of {page_tokens} tokens: both numbers must be at least 1"
        )
        self.count = count
        self.page_tokens = page_tokens
        # How many pages were evicted since the allocator was made.
        self.evicted = 0
        self._free = list(range(count - 1, -1, -1))
        self._root = RadixNode(np.zeros(0, np.int32), -1, None)
        # Pages of the tree that no running request reads, so they can be evicted. The least
        # recently used page comes first, and each page comes before its parent.
        self._idle: collections.OrderedDict[RadixNode, None] = collections.OrderedDict()

    @property
    def free(self) -> int:
        """Number of empty pages."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Number of pages that can be allocated: empty pages plus pages that can be evicted."""
        return len(self._free) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Return how many pages a sequence of `tokens` tokens needs."""
        return -(-tokens // self.page_tokens)

    def allocate(
        self, prompt: Int[np.ndarray, " prompt"], capacity_tokens: int, *, reuse: bool = True
    ) -> BlockTable | None:
        """Allocate a block table for a request.

        `prompt` holds the token ids of the prompt. `capacity_tokens` is the largest number of
        tokens of the whole sequence, prompt and completion. With `reuse=False` the prefix cache is
        not searched. Returns None if there are too few pages.

        The last prompt token never counts as cached, because the first decode step computes its
        logits.
        """
        # `path` holds the full pages that match the prompt. `tail` is a page of which only the
        # first `tail_tokens` tokens match.
        path: list[RadixNode] = []
        tail = None
        tail_tokens = 0
        if reuse:
            path, tail, tail_tokens = self._match(prompt[:-1])

        # Pin the matching pages, so that the allocation below does not evict them.
        for node in path:
            self._pin(node)
        if tail is not None:
            self._pin(tail)

        # The tail is either taken over or copied. A copy needs a new page while the tail stays
        # pinned. If that is one page too many, give the tail up and compute its tokens again.
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
        """Return how many full pages of a prompt are in the prefix cache, without pinning them."""
        return len(self._match(prompt[:-1])[0])

    def share(self, table: BlockTable, tokens: Int[np.ndarray, " tokens"]) -> None:
        """Put the full pages of a running request into the prefix cache.

        `tokens` are the token ids whose keys and values the pages of `table` hold, [tokens].
        """
        size = self.page_tokens
        node = table.shared[-1] if table.shared else self._root
        for index in range(len(table.shared), len(tokens) // size):
            block = tokens[index * size : (index + 1) * size]
            child = node.children.get(_key(block))
            if child is None:
                child = self._attach(node, block, table.pages[index])
            else:
                # Another request computed the same page. Free this one when the request ends.
                table.duplicates.append(table.pages[index])
                table.pages[index] = child.page
            self._pin(child)
            table.shared.append(child)
            node = child

    def release(self, table: BlockTable, tokens: Int[np.ndarray, " tokens"]) -> None:
        """Give back the pages of a request that has ended.

        `tokens` are the token ids whose keys and values the pages hold, [tokens]. These pages go to
        the prefix cache, and all other pages become free. Pass an empty array to cache nothing.
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
        """Remove a request's pages from the prefix cache, because their contents are broken.

        Pages that other requests read stay in the cache. Returns the pages that only this request
        uses. The caller must set them to zero before it calls `release`.
        """
        while table.shared and table.shared[-1].users == 1 and not table.shared[-1].children:
            self._detach(table.shared.pop())
        return table.pages[len(table.shared) :] + table.duplicates

    def _match(self, tokens: np.ndarray) -> tuple[list[RadixNode], RadixNode | None, int]:
        """Find the longest prefix of `tokens` in the tree.

        Returns (path, tail, tail tokens). The path holds the nodes of the matching full pages.
        The tail is the next page with the longest match, or None. Its first `tail tokens` tokens
        match.
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

        # The keys are sorted, so the child with the longest common prefix is a neighbour of the
        # place where `rest` would be inserted.
        index = bisect.bisect_left(node.order, _key(rest))
        neighbours = [node.children[key] for key in node.order[max(0, index - 1) : index + 1]]
        best = max(neighbours, key=lambda child: _common_tokens(child.tokens, rest))
        common_tokens = _common_tokens(best.tokens, rest)
        if common_tokens == 0:
            return path, None, 0
        return path, best, common_tokens

    def _keep_tail(self, parent: RadixNode, rest: np.ndarray, page: int) -> bool:
        """Put a partly filled page with the tokens `rest` into the tree, below `parent`.

        If an unused page there holds only the beginning of `rest`, replace that page. Returns False
        if the tree already holds all of these tokens.
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
        """Increase the reference count of a page, so that it is not evicted."""
        self._idle.pop(node, None)
        node.users += 1

    def _unpin(self, *path: RadixNode) -> None:
        """Decrease the reference counts of the pages of a path, given in order from the root.

        The last page comes first, so that a child is evicted before its parent.
        """
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self._idle[node] = None

    def _allocate(self, count: int) -> list[int] | None:
        """Return `count` free pages, and evict idle pages as needed. None if there are too few."""
        if count > self.available:
            return None
        while count > len(self._free):
            leaf = next(iter(self._idle))
            assert not leaf.children, "children must be evicted before their parent"
            self._detach(leaf)
            self._free.append(leaf.page)
            self.evicted += 1
        return [self._free.pop() for _ in range(count)]

    def _attach(self, parent: RadixNode, tokens: np.ndarray, page: int) -> RadixNode:
        """Add a page that holds `tokens` to the tree, as a child of `parent`."""
        node = RadixNode(tokens.copy(), page, parent)
        key = _key(tokens)
        parent.children[key] = node
        bisect.insort(parent.order, key)
        return node

    def _detach(self, node: RadixNode) -> None:
        """Remove a page from the tree."""
        parent = node.parent
        key = _key(node.tokens)
        assert parent is not None, "this page is the root or was already removed from the tree"
        del parent.children[key]
        del parent.order[bisect.bisect_left(parent.order, key)]
        node.parent = None
        self._idle.pop(node, None)


def _key(tokens: np.ndarray) -> bytes:
    """Return tokens as big-endian bytes, which sort in the same order as the tokens."""
    return tokens.astype(">u4").tobytes()


def _common_tokens(tokens: np.ndarray, others: np.ndarray) -> int:
    """Return how many tokens at the start of two sequences are equal."""
    length = min(len(tokens), len(others))
    different = tokens[:length] != others[:length]
    return int(different.argmax()) if different.any() else length
