"""Ids that came before are known, and little is kept of each."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from mujica_jax.retrieval.text.passage_ids import PassageIds


@given(st.lists(st.one_of(st.none(), st.integers(0, 12).map(str), st.sampled_from(["00", "07", "x", "", "-1", "²"]))))
def test_it_says_what_a_set_says(given_ids):
    ids, known = PassageIds(), set()
    for given_id in given_ids:
        identifier = str(len(known)) if given_id is None else given_id
        assert ids.add(identifier, len(known)) == (identifier not in known)
        known.add(identifier)


def test_of_many_ids_each_is_known_and_takes_tens_of_bytes():
    count = 50_000
    tracemalloc.start()
    try:
        ids = PassageIds()
        assert all(ids.add(f"doc{number}", number) for number in range(count))
        kept, most = tracemalloc.get_traced_memory()
        own = PassageIds()
        assert all(own.add(str(number), number) for number in range(count))
        assert tracemalloc.get_traced_memory()[0] - kept < 25_000, "of positions nothing is kept"
    finally:
        tracemalloc.stop()
    assert kept < 50 * count and most < 75 * count
    assert not any(ids.add(f"doc{number}", count) for number in range(count))
