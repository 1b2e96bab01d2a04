"""Which page of the KV cache holds which tokens: block tables, reference counts, and a radix tree
of shared prefixes.

Memory is cut into pages of `page_tokens` tokens. A request's block table has as many as its longest
possible sequence needs; those of the prefix that its prompt shares with earlier sequences come from
the tree and are not computed again. The tree's nodes are pages: inner ones are full, a leaf may be
partly filled. A page that several sequences read is never written: a sequence that goes on from the
middle of one gets a copy (copy on write), unless it is a partly filled leaf that is continued where
it ends and that no other sequence reads; then it is taken over.

Pages that no running request uses stay in the tree until memory is needed; then the least recently
used leaves are evicted. Numbers only: the arrays are the engine's, and when requests come and go is
the scheduler's.
"""

import bisect
import collections
import dataclasses

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(eq=False, slots=True)
class RadixNode:
    """A page in the tree."""

    tokens: np.ndarray  # those it holds; only a leaf holds fewer than a page
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
    copied: (
        tuple[int, int] | None
    )  # (from, to): a page to copy before anything is computed for anyone
    # Pages that the tree has as well; the engine's table still names them.
    duplicates: list[int] = dataclasses.field(default_factory=list)


class BlockAllocator:
    """All pages of an engine."""

    def __init__(self, count: int, page_tokens: int) -> None:
        assert count >= 1 and page_tokens >= 1, (
            f"{count} pages of {page_tokens} tokens hold nothing"
        )
        self.count, self.page_tokens = count, page_tokens
        self.evicted = 0  # pages, since the beginning
        self._free = list(range(count - 1, -1, -1))
        self._root = RadixNode(np.zeros(0, np.int32), -1, None)
        # Pages of the tree that no running request reads, the longest unused first and each before
        # its parent: all can be had.
        self._idle: collections.OrderedDict[RadixNode, None] = collections.OrderedDict()

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that can be had: those that hold nothing, and those that no running request
        reads."""
        return len(self._free) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self.page_tokens)

    def allocate(
        self, prompt: Int[np.ndarray, " prompt"], capacity_tokens: int, *, reuse: bool = True
    ) -> BlockTable | None:
        """Pages for a sequence of up to `capacity_tokens` that begins with `prompt`; None if memory
        is short at present.

        The last prompt token never counts as cached: its logits are wanted.
        """
        path, tail, tail_tokens = self._match(prompt[:-1]) if reuse else ([], None, 0)
        for node in path if tail is None else [*path, tail]:  # not evicted while pages are sought
            self._pin(node)
        wanted = self.needed(capacity_tokens) - len(path)
        taken_over = tail is not None and tail.users == 1 and len(tail.tokens) == tail_tokens
        if tail is not None and not taken_over and wanted > len(self._free) + len(self._idle):
            self._unpin(
                tail
            )  # a copy needs one page more than there is; the page itself may be what is missing
            tail, tail_tokens = None, 0
        new = self._allocate(wanted - taken_over)
        if new is None:
            self._unpin(*path, *([] if tail is None else [tail]))
            return None
        copied = None
        if tail is not None and taken_over:
            self._detach(tail)
            new.insert(0, tail.page)
        elif tail is not None:
            self._unpin(tail)
            copied = (tail.page, new[0])
        cached_tokens = len(path) * self.page_tokens + tail_tokens
        return BlockTable([node.page for node in path] + new, path, cached_tokens, copied)

    def cached_pages(self, prompt: Int[np.ndarray, " prompt"]) -> int:
        """Full pages that a block table of this prompt would begin with; asking pins nothing."""
        return len(self._match(prompt[:-1])[0])

    def share(self, table: BlockTable, tokens: Int[np.ndarray, " tokens"]) -> None:
        """The table's pages hold these tokens now: let others read the full ones."""
        node, size = (table.shared[-1] if table.shared else self._root), self.page_tokens
        for index in range(len(table.shared), len(tokens) // size):
            block = tokens[index * size : (index + 1) * size]
            child = node.children.get(_key(block))
            if child is None:
                child = self._attach(node, block, table.pages[index])
            else:  # another request computed the same: one of the two pages is enough, once this request is over
                table.duplicates.append(table.pages[index])
                table.pages[index] = child.page
            self._pin(child)
            table.shared.append(child)
            node = child

    def release(self, table: BlockTable, tokens: Int[np.ndarray, " tokens"]) -> None:
        """The request is over; its pages hold these tokens (none, if what they hold is not to be
        used again)."""
        self.share(table, tokens)
        kept = len(table.shared)
        rest = tokens[kept * self.page_tokens :]
        if 0 < len(rest) < self.page_tokens:
            kept += self._keep_tail(
                table.shared[-1] if table.shared else self._root, rest, table.pages[kept]
            )
        self._free.extend(table.pages[kept:])
        self._free.extend(table.duplicates)
        self._unpin(*table.shared)
        table.pages, table.shared, table.duplicates = [], [], []

    def evict(self, table: BlockTable) -> list[int]:
        """What the table's pages hold is not fit to be read: those that nobody else reads leave the
        tree. Returns the pages that are the request's alone, to be emptied before it is released.
        """
        while table.shared and table.shared[-1].users == 1 and not table.shared[-1].children:
            self._detach(table.shared.pop())
        return table.pages[len(table.shared) :] + table.duplicates

    def _match(self, tokens: np.ndarray) -> tuple[list[RadixNode], RadixNode | None, int]:
        """(the full pages that begin `tokens`, the page that goes on best, how many of its
        tokens)."""
        path, node, size = [], self._root, self.page_tokens
        for start in range(0, len(tokens) - size + 1, size):
            child = node.children.get(_key(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        rest = tokens[len(path) * size :][:size]
        # The longest common beginning is that with a neighbour in sorted order.
        place = bisect.bisect_left(node.order, _key(rest))
        neighbours = (
            [node.children[key] for key in node.order[max(0, place - 1) : place + 1]]
            if len(rest)
            else []
        )
        best = max(neighbours, key=lambda child: _common_tokens(child.tokens, rest), default=None)
        alike = 0 if best is None else _common_tokens(best.tokens, rest)
        return path, best if alike else None, alike

    def _keep_tail(self, parent: RadixNode, rest: np.ndarray, page: int) -> bool:
        """Put a partly filled page into the tree, in the place of one that it goes on from; False
        if the tree has one like it.
        """
        key = _key(rest)
        place = bisect.bisect_left(parent.order, key)
        if place < len(parent.order) and parent.order[place].startswith(key):
            return False
        before = parent.children[parent.order[place - 1]] if place else None
        if before is not None and before.users == 0 and key.startswith(parent.order[place - 1]):
            self._detach(before)
            self._free.append(before.page)
        self._idle[self._attach(parent, rest, page)] = None
        return True

    def _pin(self, node: RadixNode) -> None:
        self._idle.pop(node, None)
        node.users += 1

    def _unpin(self, *path: RadixNode) -> None:
        """Nodes from the root on. The last one first: who reads a page reads its parent, so
        children are idle first."""
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self._idle[node] = None

    def _allocate(self, count: int) -> list[int] | None:
        if count > len(self._free) + len(self._idle):
            return None
        while count > len(self._free):
            leaf = next(iter(self._idle))
            assert not leaf.children, "a page is idle before its parent"
            self._detach(leaf)
            self._free.append(leaf.page)
            self.evicted += 1
        return [self._free.pop() for _ in range(count)]

    def _attach(self, parent: RadixNode, tokens: np.ndarray, page: int) -> RadixNode:
        node, key = RadixNode(tokens.copy(), page, parent), _key(tokens)
        parent.children[key] = node
        bisect.insort(parent.order, key)
        return node

    def _detach(self, node: RadixNode) -> None:
        parent, key = node.parent, _key(node.tokens)
        assert parent is not None, "the root stays, and nobody leaves twice"
        del parent.children[key]
        del parent.order[bisect.bisect_left(parent.order, key)]
        node.parent = None
        self._idle.pop(node, None)


def _key(tokens: np.ndarray) -> bytes:
    """Bytes that sort as the tokens do."""
    return tokens.astype(">u4").tobytes()


def _common_tokens(tokens: np.ndarray, others: np.ndarray) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(tokens), len(others))
    different = tokens[:length] != others[:length]
    return int(different.argmax()) if different.any() else length
