"""Pages against a memory that remembers what was written where, and against a search by hand
through all of it."""

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


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@dataclasses.dataclass(eq=False)
class Running:
    """A request as an engine sees it: its table of pages is the one it was started with."""

    block_table: BlockTable
    table: list[int]
    prompt: tuple[int, ...]
    capacity_tokens: int
    written: tuple[int, ...]  # tokens whose keys and values are in memory


class PagesMachine(RuleBasedStateMachine):
    """A place in memory holds the whole sequence up to its token, as keys and values stand for all
    that came before."""

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
        more=st.integers(1, 8),
        reuse=st.sampled_from([True, True, True, False]),
    )
    def allocate(self, prompt, more, reuse):
        needed = -(-(len(prompt) + more) // self.size)
        known = self.known_of_tree()
        longest = (
            max((alike(known[page], prompt[:-1]) for page in known), default=0) if reuse else 0
        )
        before = self.snapshot()
        in_use = {node.page for one in self.running for node in one.block_table.shared}
        # Pages that nobody reads can be had; those the prompt begins with are kept and count
        # towards what it needs.
        begins = [
            page
            for page, held in known.items()
            if len(held) <= longest and held == prompt[: len(held)]
        ]
        full = [page for page in begins if len(known[page]) % self.size == 0]
        room = self.pages.free + len(set(known) - in_use - set(full))
        block_table = self.pages.allocate(tokens_of(*prompt), len(prompt) + more, reuse=reuse)
        if needed - len(full) > room:
            assert block_table is None, "there are not so many pages"
            assert self.snapshot() == before, "what cannot be had changes nothing"
            return
        assert block_table is not None, "there are pages enough"
        assert len(block_table.pages) == needed == len(set(block_table.pages))
        short = needed - len(full) == room  # then there may be no page for a copy
        assert block_table.cached_tokens == longest or (
            short and block_table.cached_tokens == len(full) * self.size
        )
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
                len(prompt) + more,
                prompt[: block_table.cached_tokens],
            )
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), of=st.integers(0, 99), tokens=st.integers(0, 14))
    def share(self, data, of, tokens):
        """What a running request has computed of its prompt, read by others from now on."""
        one = self.running[of % len(self.running)]
        self.write(one, one.prompt[: max(len(one.written), min(tokens, len(one.prompt) - 1))])
        self.pages.share(one.block_table, tokens_of(*one.written))
        self.learn(one)

    @precondition(lambda self: self.running)
    @rule(of=st.integers(0, 99), completion=st.lists(st.integers(0, 1), max_size=8).map(tuple))
    def release(self, of, completion):
        one = self.running.pop(of % len(self.running))
        self.write(
            one, max(one.written, (one.prompt + completion)[: one.capacity_tokens - 1], key=len)
        )
        for n in range(len(one.written)):
            assert self.memory[one.table[n // self.size]][n % self.size] == one.written[: n + 1], (
                "overwritten"
            )
        self.pages.release(one.block_table, tokens_of(*one.written))
        self.learn(one)
        known = self.known_of_tree()
        found = max((alike(held, one.written) for held in known.values()), default=0)
        assert found == len(one.written), "what was computed can be found"

    @precondition(lambda self: self.running)
    @rule(of=st.integers(0, 99))
    def cancel(self, of):
        self.pages.release(self.running.pop(of % len(self.running)).block_table, tokens_of())

    @precondition(lambda self: self.running)
    @rule(of=st.integers(0, 99))
    def evict(self, of):
        """What it computed is not to be read: it leaves the tree unless others read it already."""
        one = self.running.pop(of % len(self.running))
        private = self.pages.evict(one.block_table)
        assert not set(private) & {*cached(self.pages), *self.pages._free}
        assert not any(
            set(private) & {*other.table, *other.block_table.pages} for other in self.running
        )
        self.pages.release(one.block_table, tokens_of())

    @invariant()
    def every_page_is_in_one_place(self):
        if not hasattr(self, "pages"):
            return
        self.unlearn()
        places = collections.Counter([*self.pages._free, *cached(self.pages)])
        for one in self.running:
            places.update(
                [*one.block_table.pages[len(one.block_table.shared) :], *one.block_table.duplicates]
            )
        assert places == collections.Counter(range(self.pages.count))

    @invariant()
    def users_are_those_who_run(self):
        if not hasattr(self, "pages"):
            return
        readers = collections.Counter(
            id(node) for one in self.running for node in one.block_table.shared
        )
        for node in nodes_of(self.pages):
            assert node.users == readers[id(node)]
            assert node.order == sorted(node.children)
            assert (node in self.pages._idle) == (node.users == 0)
            assert node.users >= max((child.users for child in node.children.values()), default=0)

    def teardown(self):
        if not hasattr(self, "pages"):
            return
        for one in self.running:
            self.pages.release(one.block_table, tokens_of())
        assert self.pages.free + len(cached(self.pages)) == self.pages.count

    def write(self, one: Running, tokens: tuple[int, ...]) -> None:
        """Through the table that the request was started with; only where nobody else reads."""
        shared = set(cached(self.pages)) | {
            page for other in self.running if other is not one for page in other.table
        }
        for n in range(len(one.written), len(tokens)):
            page = one.table[n // self.size]
            assert page not in shared, "a page is written that others read"
            assert page not in self.pages._free, "a page is written that nobody has"
            self.memory[page][n % self.size] = tokens[: n + 1]
        one.written = tokens

    def unlearn(self) -> None:
        held_pages = set(cached(self.pages))
        self.known = {page: held for page, held in self.known.items() if page in held_pages}

    def learn(self, one: Running) -> None:
        """What a page in the tree holds does not change: a sequence that ends in the middle of one
        says nothing new of it."""
        self.unlearn()
        new = set(cached(self.pages)) - set(self.known)
        for index in range(-(-len(one.written) // self.size)):
            until = min((index + 1) * self.size, len(one.written))
            for page in new:
                if self.memory[page][(until - 1) % self.size] == one.written[:until]:
                    self.known[page] = one.written[:until]

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
    """A request that came, computed these tokens and left."""
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
    assert [cached_tokens(pages, *of) for of in ([1, 1, 3, 3], [1, 1, 2, 2], [4, 4])] == [2, 4, 2]
    pages.release(allocated(pages, 6, capacity_tokens=10), tokens_of())
    assert (pages.evicted, pages.free) == (4, 5)


def test_a_page_that_a_request_reads_is_never_evicted():
    pages = BlockAllocator(3, page_tokens=2)
    computed(pages, 1, 1)
    running = allocated(pages, 1, 1, 2, capacity_tokens=4)
    assert running.cached_tokens == 2
    assert pages.allocate(tokens_of(7), 4) is None
    assert pages.evicted == 0 and cached(pages) == [running.pages[0]]


def test_a_request_that_needs_every_page_gets_them_although_its_beginning_lies_in_one_of_them():
    """The page would have to be copied and there is none to copy it to."""
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
    assert (block_table.pages[0], block_table.cached_tokens, block_table.copied) == (page, 3, None)
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
    """An engine's table is that of the start: the copy in the tree is not in it."""
    pages = BlockAllocator(4, page_tokens=2)
    one, other = allocated(pages, 1, 2, 3), allocated(pages, 1, 2, 3)
    table = list(other.pages)
    pages.share(one, tokens_of(1, 2))
    pages.share(other, tokens_of(1, 2))
    assert pages.free == 0 and pages.allocate(tokens_of(5), 2) is None, f"{table} are still read"
    pages.release(other, tokens_of(1, 2))
    assert pages.free == 2


def test_a_request_that_is_too_large_at_present_evicts_nothing():
    pages = BlockAllocator(4, page_tokens=2)
    computed(pages, 1, 1)
    running = allocated(pages, 2, capacity_tokens=4)
    assert pages.allocate(tokens_of(3), 8) is None
    assert pages.evicted == 0 and len(cached(pages)) == 1
    pages.release(running, tokens_of())


@pytest.mark.parametrize("size", [1, 3])
def test_requests_that_do_not_reuse_find_nothing_and_leave_nothing_behind(size):
    pages = BlockAllocator(8, page_tokens=size)
    computed(pages, 1, 2, 3)
    held = cached(pages)
    block_table = pages.allocate(tokens_of(1, 2, 3), 4, reuse=False)
    assert block_table is not None and (block_table.cached_tokens, block_table.shared) == (0, [])
    pages.release(block_table, tokens_of())
    assert cached(pages) == held
