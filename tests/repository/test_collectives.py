"""Collectives are read from a program's text: kinds, bytes, loops, and pieces of one that count
once.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.collectives_of_programs import Collective, collectives

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%fused_gather (param: bf16[4,8]) -> bf16[16,8] {
  %param = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,8]{1,0:T(8,128)} all-gather(%param), channel_id=3, dimensions={0}, \
metadata={op_name="step/while/dot"}
}

%ring_body (state: (f32[2,4], s32[])) -> (f32[2,4], s32[]) {
  %permute = f32[2,4]{1,0} collective-permute(%part), channel_id=5, source_target_pairs={{0,1},{1,0}}
  ROOT %next = (f32[2,4], s32[]) tuple(%permute, %count)
}

%ring_condition (state: (f32[2,4], s32[])) -> pred[] {
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

%layer_body (state: (f32[8], s32[])) -> (f32[8], s32[]) {
  %first = bf16[16,8]{1,0} fusion(%part), kind=kCustom, calls=%fused_gather
  %again = bf16[16,8]{1,0} all-gather(%part), channel_id=3, dimensions={0}
  %ring = (f32[2,4], s32[]) while(%start), condition=%ring_condition, body=%ring_body
  ROOT %next = (f32[8], s32[]) tuple(%x, %count)
}

%layer_condition (state: (f32[8], s32[])) -> pred[] {
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

%unreachable (x: f32[1000]) -> f32[1000] {
  ROOT %all-reduce.9 = f32[1000]{0} all-reduce(%x), channel_id=9, to_apply=%sum
}

ENTRY %main (x: f32[8]) -> f32[2] {
  %layers = (f32[8], s32[]) while(%start), condition=%layer_condition, body=%layer_body
  %norms = (f32[8]{0}, f8e4m3fn[64]{0}) all-reduce-start(%a, %b), channel_id=7, to_apply=%sum
  %done = (f32[8]{0}, f8e4m3fn[64]{0}) all-reduce-done(%norms)
  ROOT %reduce-scatter = f32[2]{0} reduce-scatter(%x), channel_id=8, dimensions={0}, to_apply=%sum, \
metadata={op_name="step/head"}
}
"""


def test_each_collective_is_listed_once_with_its_bytes_and_loops():
    assert collectives(PROGRAM) == [
        Collective(kind="all-gather", bytes=16 * 8 * 2, loops=1, source="step/while/dot"),
        Collective(kind="all-reduce", bytes=64, loops=0, source=""),
        Collective(kind="collective-permute", bytes=2 * 4 * 4, loops=2, source=""),
        Collective(kind="reduce-scatter", bytes=2 * 4, loops=0, source="step/head"),
    ]


def test_a_program_of_one_device_sends_nothing():
    assert collectives(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text()) == []


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("nothing of the kind")
