"""The allocator of pages, compared with a memory that records each write and with a search through
all of it.
"""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mujica_jax.inference.paging import BlockAllocator, BlockTable
from tests.helpers.traffic import cached, nodes_of

UNKNOWN = None  # what a place holds that nobody has written


def tokens_of(*ids: int) -> np.ndarray:
    return np.asarray(ids, np.int32)


def alike(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    for place, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            return place
    return min(len(first), len(second))


@dataclasses.dataclass(eq=False)
class Running:
    """A request as an engine sees it. Its table of pages stays the one it was started with."""

    block_table: BlockTable
    table: list[int]
    prompt: tuple[int, ...]
    capacity_tokens: int
    written: tuple[int, ...]  # tokens whose keys and values are in memory


class PagesMachine(RuleBasedStateMachine):
    """Allocate, write, share and release pages in any order.

    A place in memory holds the whole sequence up to its token, as keys and values stand for all
    tokens before them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []

    @initialize(count=st.integers(1, 9), size=st.integers(1, 4))
    def begin(self, count, size):
        self.size = size
        self.pages = BlockAllocator(count, size)
        self.memory = [[UNKNOWN] * size for _ in range(count)]
        # of each page in the tree: the sequence up to its last token
        self.known: dict[int, tuple[int, ...]] = {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        new_tokens=st.integers(1, 8),
        reuse=st.sampled_from([True, True, True, False]),
    )
    def allocate(self, prompt, new_tokens, reuse):
        needed = -(-(len(prompt) + new_tokens) // self.size)
        known = self.known_of_tree()
        longest = 0
        if reuse:
            longest = max((alike(known[page], prompt[:-1]) for page in known), default=0)
        before = self.snapshot()
        in_use = {node.page for running in self.running for node in running.block_table.shared}
        # Pages that nobody reads can be had; those the prompt begins with are kept and count
        # towards what it needs.
        begins = [
            page
            for page, content in known.items()
            if len(content) <= longest and content == prompt[: len(content)]
        ]
        full = [page for page in begins if len(known[page]) % self.size == 0]
        room = self.pages.free + len(set(known) - in_use - set(full))
        block_table = self.pages.allocate(tokens_of(*prompt), len(prompt) + new_tokens, reuse=reuse)
        if needed - len(full) > room:
            assert block_table is None, "there are not so many pages"
            assert self.snapshot() == before, "what cannot be had changes nothing"
            return
        assert block_table is not None, "there are pages enough"
        assert len(block_table.pages) == needed
        assert len(set(block_table.pages)) == needed
        if block_table.cached_tokens != longest:
            # There may be no page for a copy. Then only whole pages are shared.
            assert needed - len(full) == room
            assert block_table.cached_tokens == len(full) * self.size
        if block_table.copied is not None:
            source, target = block_table.copied
            assert target in block_table.pages[len(block_table.shared) :]
            self.memory[target] = list(self.memory[source])
        for n in range(block_table.cached_tokens):
            assert self.memory[block_table.pages[n // self.size]][n % self.size] == prompt[: n + 1]
        self.running.append(
            Running(
                block_table,
                list(block_table.pages),
                prompt,
                len(prompt) + new_tokens,
                prompt[: block_table.cached_tokens],
            )
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), choice=st.integers(0, 99), tokens=st.integers(0, 14))
    def share(self, data, choice, tokens):
        """Let others read what a running request has computed of its prompt."""
        running = self.running[choice % len(self.running)]
        computed = max(len(running.written), min(tokens, len(running.prompt) - 1))
        self.write(running, running.prompt[:computed])
        self.pages.share(running.block_table, tokens_of(*running.written))
        self.learn(running)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), completion=st.lists(st.integers(0, 1), max_size=8).map(tuple))
    def release(self, choice, completion):
        running = self.running.pop(choice % len(self.running))
        sequence = (running.prompt + completion)[: running.capacity_tokens - 1]
        self.write(running, max(running.written, sequence, key=len))
        for n in range(len(running.written)):
            page = running.table[n // self.size]
            assert self.memory[page][n % self.size] == running.written[: n + 1], "overwritten"
        self.pages.release(running.block_table, tokens_of(*running.written))
        self.learn(running)
        known = self.known_of_tree()
        longest = max((alike(content, running.written) for content in known.values()), default=0)
        assert longest == len(running.written), "what was computed can be found"

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99))
    def cancel(self, choice):
        self.pages.release(self.running.pop(choice % len(self.running)).block_table, tokens_of())

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99))
    def evict(self, choice):
        """End a request whose pages must not be read.

        They leave the tree unless others already read them.
        """
        running = self.running.pop(choice % len(self.running))
        private = self.pages.evict(running.block_table)
        assert not set(private) & {*cached(self.pages), *self.pages._free}
        assert not any(
            set(private) & {*other.table, *other.block_table.pages} for other in self.running
        )
        self.pages.release(running.block_table, tokens_of())

    @invariant()
    def every_page_is_in_one_place(self):
        if not hasattr(self, "pages"):
            return
        self.unlearn()
        places = collections.Counter([*self.pages._free, *cached(self.pages)])
        for running in self.running:
            places.update(
                [
                    *running.block_table.pages[len(running.block_table.shared) :],
                    *running.block_table.duplicates,
                ]
            )
        assert places == collections.Counter(range(self.pages.count))

    @invariant()
    def users_are_those_who_run(self):
        if not hasattr(self, "pages"):
            return
        readers = collections.Counter(
            id(node) for running in self.running for node in running.block_table.shared
        )
        for node in nodes_of(self.pages):
            assert node.users == readers[id(node)]
            assert node.order == sorted(node.children)
            assert (node in self.pages._idle) == (node.users == 0)
            assert node.users >= max((child.users for child in node.children.values()), default=0)

    def teardown(self):
        if not hasattr(self, "pages"):
            return
        for running in self.running:
            self.pages.release(running.block_table, tokens_of())
        assert self.pages.free + len(cached(self.pages)) == self.pages.count

    def write(self, running: Running, tokens: tuple[int, ...]) -> None:
        """Write tokens through the table that the request was started with.

        Check that nobody else reads these places.
        """
        shared = set(cached(self.pages)) | {
            page for other in self.running if other is not running for page in other.table
        }
        for n in range(len(running.written), len(tokens)):
            page = running.table[n // self.size]
            assert page not in shared, "a page is written that others read"
            assert page not in self.pages._free, "a page is written that nobody has"
            self.memory[page][n % self.size] = tokens[: n + 1]
        running.written = tokens

    def unlearn(self) -> None:
        pages_in_tree = set(cached(self.pages))
        self.known = {
            page: content for page, content in self.known.items() if page in pages_in_tree
        }

    def learn(self, running: Running) -> None:
        """Record what new pages in the tree hold.

        A sequence that ends in the middle of a page changes nothing that is known of it.
        """
        self.unlearn()
        new = set(cached(self.pages)) - set(self.known)
        for index in range(-(-len(running.written) // self.size)):
            until = min((index + 1) * self.size, len(running.written))
            for page in new:
                if self.memory[page][(until - 1) % self.size] == running.written[:until]:
                    self.known[page] = running.written[:until]

    def known_of_tree(self) -> dict[int, tuple[int, ...]]:
        assert set(self.known) == set(cached(self.pages)), (
            "the tree holds what was computed and nothing else"
        )
        return self.known

    def snapshot(self) -> tuple:
        nodes = sorted(
            (node.page, node.tokens.tobytes(), node.users) for node in nodes_of(self.pages)
        )
        return sorted(self.pages._free), nodes, self.pages.evicted


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def allocated(pages: BlockAllocator, *prompt: int, capacity_tokens: int = 0) -> BlockTable:
    block_table = pages.allocate(tokens_of(*prompt), capacity_tokens or len(prompt) + 1)
    assert block_table is not None
    return block_table


def computed(pages: BlockAllocator, *sequence: int) -> None:
    """Play a request that comes, computes these tokens and leaves."""
    pages.release(allocated(pages, *sequence), tokens_of(*sequence))


def cached_tokens(pages: BlockAllocator, *sequence: int) -> int:
    block_table = allocated(pages, *sequence, 9)
    pages.release(block_table, tokens_of())
    return block_table.cached_tokens


def test_what_was_used_longest_ago_is_evicted_first_and_leaves_before_their_parents():
    pages = BlockAllocator(5, page_tokens=2)
    computed(pages, 1, 1, 2, 2)  # two pages, and a third for the token to come
    computed(pages, 1, 1, 3, 3)
    computed(pages, 4, 4)
    assert (pages.free, len(cached(pages))) == (1, 4)  # 1 1, 2 2, 3 3, 4 4
    assert cached_tokens(pages, 1, 1, 2, 2) == 4  # used: 3 3 is the oldest leaf now
    running = allocated(pages, 5, capacity_tokens=4)
    assert pages.evicted == 1
    pages.release(running, tokens_of())
    assert [cached_tokens(pages, *prompt) for prompt in ([1, 1, 3, 3], [1, 1, 2, 2], [4, 4])] == [
        2,
        4,
        2,
    ]
    pages.release(allocated(pages, 6, capacity_tokens=10), tokens_of())
    assert (pages.evicted, pages.free) == (4, 5)


def test_a_page_that_a_request_reads_is_never_evicted():
    pages = BlockAllocator(3, page_tokens=2)
    computed(pages, 1, 1)
    running = allocated(pages, 1, 1, 2, capacity_tokens=4)
    assert running.cached_tokens == 2
    assert pages.allocate(tokens_of(7), 4) is None
    assert pages.evicted == 0
    assert cached(pages) == [running.pages[0]]


def test_a_request_that_needs_every_page_gets_them_although_its_beginning_lies_in_one_of_them():
    """That page would have to be copied, and there is no page for the copy."""
    pages = BlockAllocator(2, page_tokens=4)
    computed(pages, 1, 2, 3)
    block_table = allocated(pages, 1, 2, 9, capacity_tokens=8)
    assert (block_table.cached_tokens, block_table.copied) == (0, None)
    assert sorted(block_table.pages) == [0, 1]


def test_a_partly_filled_page_is_taken_over_by_who_goes_on_from_its_end():
    pages = BlockAllocator(4, page_tokens=4)
    computed(pages, 1, 2, 3)
    (page,) = cached(pages)
    block_table = allocated(pages, 1, 2, 3, 4)
    assert block_table.pages[0] == page
    assert block_table.cached_tokens == 3
    assert block_table.copied is None
    assert cached(pages) == [], "and nobody else can find it"


def test_a_page_is_copied_for_who_goes_on_from_its_middle():
    pages = BlockAllocator(4, page_tokens=4)
    computed(pages, 1, 2, 3)
    (page,) = cached(pages)
    block_table = allocated(pages, 1, 2, 4)
    assert (block_table.copied, block_table.cached_tokens) == ((page, block_table.pages[0]), 2)
    assert cached(pages) == [page]


def test_the_last_token_of_a_prompt_is_never_cached():
    pages = BlockAllocator(4, page_tokens=2)
    computed(pages, 1, 2, 3, 4)
    assert allocated(pages, 1, 2, 3, 4).cached_tokens == 3


def test_a_page_that_was_computed_twice_is_not_given_away_while_its_request_still_reads_it():
    """An engine keeps the table of the start. The copy in the tree is not in it."""
    pages = BlockAllocator(4, page_tokens=2)
    first = allocated(pages, 1, 2, 3)
    second = allocated(pages, 1, 2, 3)
    table = list(second.pages)
    pages.share(first, tokens_of(1, 2))
    pages.share(second, tokens_of(1, 2))
    assert pages.free == 0, f"{table} are still read"
    assert pages.allocate(tokens_of(5), 2) is None, f"{table} are still read"
    pages.release(second, tokens_of(1, 2))
    assert pages.free == 2


def test_a_request_that_is_too_large_at_present_evicts_nothing():
    pages = BlockAllocator(4, page_tokens=2)
    computed(pages, 1, 1)
    running = allocated(pages, 2, capacity_tokens=4)
    assert pages.allocate(tokens_of(3), 8) is None
    assert pages.evicted == 0
    assert len(cached(pages)) == 1
    pages.release(running, tokens_of())


@pytest.mark.parametrize("size", [1, 3])
def test_requests_that_do_not_reuse_find_nothing_and_leave_nothing_behind(size):
    pages = BlockAllocator(8, page_tokens=size)
    computed(pages, 1, 2, 3)
    pages_before = cached(pages)
    block_table = pages.allocate(tokens_of(1, 2, 3), 4, reuse=False)
    assert block_table is not None
    assert (block_table.cached_tokens, block_table.shared) == (0, [])
    pages.release(block_table, tokens_of())
    assert cached(pages) == pages_before
