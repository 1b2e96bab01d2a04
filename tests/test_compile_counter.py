"""Compilations are counted as JAX reports them; spans that lie in one another count once."""

import jax
import jax.numpy as jnp
import pytest

from mujica_jax.runtime.compile_counter import COMPILED, STAGES, CompileCounter, compile_counter


def test_a_program_is_counted_when_it_is_compiled_and_not_when_it_runs():
    counted = compile_counter()
    twice = jax.jit(lambda values: values * 2 + 40)
    short, long = jnp.ones(3), jnp.ones(4)
    before = counted.programs, counted.seconds
    twice(short)
    assert counted.programs == before[0] + 1 and counted.seconds > before[1]
    after = counted.programs, counted.seconds
    twice(short)
    assert (counted.programs, counted.seconds) == after
    twice(long)
    assert counted.programs == after[0] + 1, "another shape is another program"


def test_every_second_counts_once():
    counted = CompileCounter()
    trace = STAGES[1]
    counted.add(trace, 2.0, 3.0)
    counted.add(trace, 4.0, 4.5, fun_name="inner")
    counted.add(trace, 1.0, 5.0)  # both lie in it
    counted.add("/jax/something/else", 5.0, 9.0)
    counted.add(COMPILED, 5.0, 7.0)
    assert counted.seconds == pytest.approx(6.0)
    assert counted.programs == 1
