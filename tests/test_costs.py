"""The reader of compiled programs, on small ones written by hand."""

import pytest

from nanogpt_tpu.costs import program_costs
from nanogpt_tpu.tpu_compiler import TOPOLOGIES

CHIP = TOPOLOGIES["v5e:2x4"][0]
PRODUCT = """
%fused (p0: bf16[256,512], p1: bf16[512,128]) -> bf16[256,128] {
  %p0 = bf16[256,512]{1,0} parameter(0)
  %p1 = bf16[512,128]{1,0} parameter(1)
  ROOT %c = bf16[256,128]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[256,512], b: bf16[512,128]) -> bf16[256,128] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,128]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %f = bf16[256,128]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused, CYCLES
}
""".replace("CYCLES", 'backend_config={"estimated_cycles":"3000"}')


def costs(text, head_size=128, rows=0):
    return program_costs(text, CHIP, head_size, rows)


def test_a_product_by_both_clocks():
    (cost,) = costs(PRODUCT)
    assert cost.kind == "product"
    assert cost.estimate_s == pytest.approx(3000 / 1.5e9)
    moved = 2 * (256 * 512 + 256 * 128)  # b lies in the chip's vector memory
    assert cost.roofline_s == pytest.approx(
        max(moved / 819e9, 2 * 256 * 128 * 512 / 196.6e12), rel=1e-6
    )


def in_loop(config):
    return f"""
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  ROOT %y = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%g, backend_config={{"estimated_cycles":"10"}}
}}

%g (p: f32[8]) -> f32[8] {{
  ROOT %p = f32[8]{{0}} parameter(0)
}}

ENTRY %main (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]) parameter(0)
  ROOT %w = (s32[], f32[8]) while(%s), condition=%c, body=%body{config}
}}
"""


def test_a_loop_counts_as_often_as_it_runs():
    (cost,) = costs(in_loop(', backend_config={"known_trip_count":{"n":"7"}}'))
    assert cost.estimate_s == pytest.approx(70 / 1.5e9)


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="how often it runs"):
        costs(in_loop(""))


def kernel(output, target="tpu_custom_call"):
    return f"""
ENTRY %main (q: bf16[16,1024,2304]) -> bf16[16,1024,768] {{
  %q = bf16[16,1024,2304]{{2,1,0}} parameter(0)
  ROOT %k = bf16[16,1024,{output}]{{2,1,0}} custom-call(%q), custom_call_target="{target}"
}}
"""


def test_kernels_at_half_the_peak():
    (forward,), (backward,) = costs(kernel(768)), costs(kernel(2304))
    flops = 2 * 0.625 * 1024**2 * 128 * 6 * 16 * 2
    assert forward.estimate_s == forward.roofline_s == pytest.approx(flops / (0.5 * 196.6e12))
    assert backward.estimate_s == pytest.approx(2.5 * forward.estimate_s)
    assert 12 * (forward.estimate_s + backward.estimate_s) == pytest.approx(13.8e-3, rel=0.01)


def test_heads_of_64_cost_whole_lanes():
    (wide,), (narrow,) = costs(kernel(768)), costs(kernel(768), head_size=64)
    assert narrow.estimate_s == 2 * wide.estimate_s


def test_a_custom_call_without_formula_is_refused():
    with pytest.raises(ValueError, match=r"no formula.*SomethingNew"):
        costs(kernel(768, "SomethingNew"))


def test_collectives_and_sorting_are_modelled():
    text = """
ENTRY %main (a: f32[1000000]) -> f32[1000000] {
  %a = f32[1000000]{0} parameter(0)
  %g = f32[1000000]{0} gather(%a), offset_dims={0}
  ROOT %r = f32[1000000]{0} all-reduce(%g), to_apply=%add
}
"""
    found = {cost.kind: cost for cost in costs(text, rows=16 * 1024)}
    assert found["collective"].collective_bytes == 4_000_000
    assert found["collective"].estimate_s == pytest.approx(2 * 7 / 8 * 4e6 / 90e9)
    assert found["sort"].estimate_s == pytest.approx(1e-3)
