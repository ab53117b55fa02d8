"""Preflight end to end with the real TPU compiler, on two layers; and what it refuses."""

import importlib.util
import json

import pytest

import nanogpt_tpu as ng
from nanogpt_tpu.preflight import describe, draw, flops_per_token, preflight, sweep

HAS_COMPILER = all(importlib.util.find_spec(n) for n in ("torch_xla", "jax", "libtpu"))


def test_unknown_topology_and_field_are_refused():
    with pytest.raises(ng.UserError, match="unknown topology 'v5e:2x5': did you mean 'v5e:2x4'"):
        preflight(ng.preset("tpu-fast"), "v5e:2x5")
    with pytest.raises(ng.UserError, match=r"unknown field to sweep 'n_layer'.*micro_batch_size"):
        sweep(ng.preset("tpu-fast"), "v5e:2x4", "n_layer")


@pytest.mark.skipif(not HAS_COMPILER, reason="no TPU compiler here")
def test_a_plan_that_does_not_divide_is_refused_before_compiling():
    with pytest.raises(ng.UserError, match="tokens_per_step 524288 is not a positive multiple"):
        preflight(ng.preset("tpu-fast", micro_batch_size=24))


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ng.UserError, match=r"needs torch_xla, jax, libtpu.*pip install"):
        preflight(ng.preset("tpu-fast"))


def test_needed_flops_are_those_of_the_study():
    assert flops_per_token(ng.preset("tpu-fast")) == pytest.approx(855e6, rel=0.001)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not HAS_COMPILER:
        pytest.skip("no TPU compiler here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        config = ng.preset("tpu-fast", n_layer=2, micro_batch_size=8)
        first = preflight(config)
        patch.setattr("subprocess.run", None)  # the second answer is the kept one
        assert preflight(config.replace(data="elsewhere")) == first
    return first


@pytest.mark.slow
def test_the_training_step_compiles_for_a_tpu(found):
    assert found["fits"] and found["hbm_peak_bytes"] < found["hbm_limit_bytes"]
    assert found["hbm_peak_bytes"] == sum(found["hbm_bytes"].values())
    assert all(size > 0 for size in found["hbm_bytes"].values())
    # Neither clock is a bound of the other: one is blind to waste, the other to some copies.
    assert 0.5 < found["roofline"]["micro_step_s"] / found["micro_step_s"] < 1.2
    assert found["step_s"] == pytest.approx(
        found["num_micro_steps"] * found["micro_step_s"] + found["optimizer_step_s"]
    )
    assert 0.3 < found["mfu"] < 1
    json.dumps(found)


@pytest.mark.slow
def test_no_collective_in_a_micro_step(found):
    """Gradients stay on their chip; the optimizer step sums them once, in fp32."""
    collectives = found["collectives"]
    assert collectives["micro step"]["count"] == 0
    params = 50304 * 768 + 2 * 12 * 768**2
    assert collectives["optimizer step"]["bytes"] >= 4 * params


@pytest.mark.slow
def test_the_kernels_are_in_it(found):
    """8 x 1,024 tokens, 2 layers, 6 heads: half the peak, by the formula."""
    flops = 2 * 0.625 * 1024**2 * 128 * 6 * 8 * 2 * 7
    assert found["pallas_modelled_s"] == pytest.approx(flops / (0.5 * 196.6e12))


@pytest.mark.slow
def test_people_read_and_see_it(found, tmp_path):
    text = "\n".join(describe(found))
    assert "fits" in text and "_HeadLoss" in text and "not a measurement" in text
    draw([found], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_what_does_not_fit_says_by_how_much():
    found = {
        "preset": "gpt2-xl", "micro_batch_size": 64, "topology": "v5e:2x4", "fits": False,
        "hbm_limit_bytes": 16_909_336_576, "hbm_peak_bytes": 20 * 2**30,
    }  # fmt: skip
    first, second = describe(found)
    assert "4.25 GiB too much" in first and "--micro-batch-size" in second
