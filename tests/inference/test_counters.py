"""Live counters: a rate over a recent window, one line for a console, and Prometheus's text."""

import dataclasses
import urllib.request

import pytest

from mujica_jax.errors import UserError
from mujica_jax.inference.counters import LiveCounters, between, serve_metrics
from mujica_jax.inference.generator import GeneratorStatistics
from tests.helpers.patience import HANG_SECONDS

NONE = GeneratorStatistics(
    requests=3,
    prompt_tokens=40,
    prefilled_tokens=10,
    generated_tokens=0,
    refused=2,
    seconds=1.5,
    running=2,
    waiting=1,
    free_pages=7,
    evicted_pages=4,
    compiled_programs=5,
)


class Told:
    """A generator and a clock with values that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.counters = LiveCounters(
            lambda: dataclasses.replace(NONE, generated_tokens=self.tokens),
            clock=lambda: self.seconds,
        )

    def later(self, seconds: float, tokens: int) -> float:
        self.seconds += seconds
        self.tokens += tokens
        return self.counters.now()[1]


def test_tokens_a_second_are_those_of_the_last_ten_seconds():
    told = Told()
    assert told.later(0.0, 0) == 0.0
    assert told.later(2.0, 100) == 50.0
    assert told.later(8.0, 0) == 10.0
    assert told.later(2.0, 0) == 0.0, "the window begins after the burst"


def test_a_reader_that_comes_seldom_gets_the_rate_since_its_last_visit():
    told = Told()
    assert told.later(60.0, 600) == 10.0
    assert told.later(60.0, 1200) == 20.0


def test_a_progress_display_gets_what_happens_now():
    told = Told()
    told.later(1.0, 2000)
    assert told.counters.figures() == {
        "running": 2,
        "waiting": 1,
        "tokens_per_second": 2000.0,
        "cached": "75%",
        "programs": 5,
    }


def test_between_two_readings_lies_what_was_done():
    after = dataclasses.replace(
        NONE,
        requests=5,
        prompt_tokens=140,
        prefilled_tokens=35,
        generated_tokens=300,
        seconds=3.5,
        running=0,
    )
    assert between(NONE, after) == {
        "requests": 2,
        "refused": 0,
        "prompt_tokens": 100,
        "prefilled_tokens": 25,
        "generated_tokens": 300,
        "evicted_pages": 0,
        "compiled_programs": 0,
        "engine_seconds": 2.0,
        "cache_hit_rate": 0.75,
        "tokens_per_second": 150.0,
    }
    assert between(NONE, NONE)["cache_hit_rate"] == between(NONE, NONE)["tokens_per_second"] == 0.0


def test_every_statistic_is_served_over_http_under_its_name():
    told = Told()
    port, close = serve_metrics(told.counters, port=0)
    told.later(1.0, 20)
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS
        ) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        close()
    for name in (
        "running 2.0",
        "waiting 1.0",
        "free_pages 7.0",
        "cache_hit_rate 0.75",
        "tokens_per_second 20.0",
    ):
        assert f"mujica_{name}" in lines
    for name in (
        "requests_total 3.0",
        "refused_total 2.0",
        "seconds_total 1.5",
        "compiled_programs_total 5.0",
    ):
        assert f"mujica_{name}" in lines
    for field in dataclasses.fields(GeneratorStatistics):
        assert any(line.startswith(f"mujica_{field.name}") for line in lines), (
            f"{field.name} is not exposed"
        )
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS)


def test_a_port_in_use_is_explained():
    port, close = serve_metrics(Told().counters, port=0)
    try:
        with pytest.raises(
            UserError, match=f"127.0.0.1:{port} cannot be opened .*choose another port"
        ):
            serve_metrics(Told().counters, port=port)
    finally:
        close()


def test_what_an_engine_does_not_say_is_left_out():
    silent = dataclasses.replace(NONE, free_pages=None, evicted_pages=None, compiled_programs=None)
    counters = LiveCounters(lambda: silent)
    assert "programs" not in counters.figures()
    names = {family.name for family in counters.collect()}
    assert "mujica_running" in names
    assert names.isdisjoint(
        {"mujica_free_pages", "mujica_evicted_pages", "mujica_compiled_programs"}
    )
    difference = between(silent, dataclasses.replace(silent, requests=5))
    assert difference["requests"] == 2
    assert "evicted_pages" not in difference
