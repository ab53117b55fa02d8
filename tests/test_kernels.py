"""The attention kernels: their arithmetic, the payloads that are shipped, the choice of one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanogpt_tpu import kernels, preset
from nanogpt_tpu.kernels import find, kernel_key

HAS_JAX = importlib.util.find_spec("jax") is not None


@pytest.fixture(scope="module")
def rehearsal():
    if not HAS_JAX:
        pytest.skip("needs jax")
    script = Path(__file__).with_name("rehearse_kernels.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_agree_with_plain_attention(rehearsal):
    for of_output, of_gradient in rehearsal["errors"]:
        assert of_output < 0.005 and of_gradient < 0.01


def test_scores_without_qk_norm_may_be_large(rehearsal):
    assert rehearsal["large_scores"] < 0.05


def test_shipped_payloads_are_what_the_generator_makes(rehearsal):
    if rehearsal["jax"] != "0.6.2":
        pytest.skip("payloads are made with jax 0.6.2")
    assert rehearsal["same_payloads"], "run python -m nanogpt_tpu.pallas_attention"


def test_a_kernel_is_chosen_by_shape_and_libtpu(monkeypatch):
    config = preset("tpu-fast").model
    assert find(16, 1024, config) is None, "auto is plain where there is no TPU"
    monkeypatch.setattr(kernels, "_is_known_tpu", lambda: True)
    assert find(16, 1024, config).key == kernel_key(16, 1024, config)
    assert find(17, 1024, config) is None and find(16, 512, config) is None
    assert find(16, 1024, preset("gpt2").model).key == "16x1024 12x64"
    assert find(16, 1024, preset("tpu-fast", attention="xla").model) is None


def test_pallas_by_name_needs_no_tpu():
    assert find(16, 1024, preset("tpu-fast", attention="pallas").model) is not None


def test_an_unknown_libtpu_gets_no_kernel(monkeypatch):
    kernels.is_known_libtpu.cache_clear()
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.99")
    assert find(16, 1024, preset("tpu-fast").model) is None
    kernels.is_known_libtpu.cache_clear()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "a kernel"),
        ({"micro_batch_size": 7}, "matrix products (no kernel of shape 7x1024 6x128 qk_norm rope;"),
        ({"attention": "xla"}, "matrix products, as asked"),
        ({"attention_fp32": True}, "plain"),
        ({"dropout": 0.1}, "plain"),
    ],
)
def test_what_is_said_of_attention(monkeypatch, changes, words):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr("nanogpt_tpu.kernels.is_known_libtpu", lambda: True)
    config = preset("tpu-fast", **changes)
    said = kernels.describe(config.micro_batch_size, config.context, config.model)
    assert said.startswith(words)


def test_attention_elsewhere_needs_no_kernel(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    config = preset("tpu-fast")
    assert "kernels are for TPUs" in kernels.describe(16, 1024, config.model)
