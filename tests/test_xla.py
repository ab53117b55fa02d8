"""The TPU's path on eight virtual devices: same losses, same programs, exact resume.

One process runs every scenario (tests/rehearse_xla.py); these tests assert on what it saw.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanogpt_tpu as ng
from nanogpt_tpu.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed here"
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("xla_data")
    ng.prepare("demo", folder / "data", "bytes", max_tokens=100_000)
    return folder / "data"


@pytest.fixture(scope="module")
def facts(data, tmp_path_factory):
    script = Path(__file__).with_name("rehearse_xla.py")
    # XLA: unoptimized programs compile several times as fast and compute the same.
    environ = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environ.pop("USE_TORCH_XLA", None)
    done = subprocess.run(
        [sys.executable, str(script), str(data), str(tmp_path_factory.mktemp("xla"))],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    return json.loads(line.removeprefix("FACTS "))


def test_it_really_runs_on_eight_xla_devices_with_the_batch_split(facts):
    placement = facts["placement"]
    assert placement["chosen"] == "xla-cpu:8"
    assert placement["device"].startswith("xla")
    assert placement["mesh"] == {"data": 8}
    assert placement["num_devices"] == 8
    assert placement["batch_sharding"] == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert placement["batch_kept"]
    assert placement["fp32_is_fp32"]


def test_the_next_cell_can_sample_and_evaluate(facts):
    cell = facts["next_cell"]
    assert cell["texts"][0] == cell["texts"][1]
    assert cell["texts"][0].startswith("ab")
    assert cell["losses"] == pytest.approx([cell["trained"]] * 2, rel=1e-4)


def test_tied_weights_of_a_foreign_model_stay_tied(facts):
    assert facts["tied"] is True


def test_losses_are_those_of_the_cpu(facts, data, tmp_path):
    ng.train(
        ng.preset(
            "tiny",
            data=str(data),
            out=str(tmp_path / "cpu"),
            device="cpu",
            num_steps=10,
            checkpoint_every=None,
        )
    )
    records = read_metrics(tmp_path / "cpu")
    cpu = [record["loss"] for record in records if "loss" in record]
    assert facts["ten_losses"] == pytest.approx(cpu, rel=1e-4)
    cpu_val = [record["val_loss"] for record in records if "val_loss" in record]
    assert facts["ten_val_losses"] == pytest.approx(cpu_val, rel=1e-4)
    assert cpu[-1] < cpu[0] - 0.5


def test_muon_learns_as_on_the_cpu(facts, data, tmp_path):
    """Its products run in bf16 here and in fp32 there."""
    run = {"num_steps": 10, "optimizer": "muon", "checkpoint_every": None, "device": "cpu"}
    ng.train(ng.preset("tiny", data=str(data), out=str(tmp_path / "cpu"), **run))
    cpu = [record["loss"] for record in read_metrics(tmp_path / "cpu") if "loss" in record]
    assert facts["muon_losses"] == pytest.approx(cpu, rel=1e-3)
    assert cpu[-1] < cpu[0] - 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_no_new_program_after_the_first_step(facts, optimizer):
    """Also where bias corrections become exactly 1 and where the learning rate reaches 0."""
    counts = facts[f"programs_{optimizer}"]
    assert counts["1"] == counts["2"] == counts["3"]
    late = {number: count for number, count in counts.items() if int(number) >= 320}
    assert len(late) == 12
    assert len(set(late.values())) == 1
    assert counts["320"] <= counts["3"] + 1  # the test's own writing of the step count


def test_resume_is_exact_with_dropout_and_accumulation(facts):
    assert facts["first_part_steps"] == list(range(1, 8))
    assert facts["steps"] == [[1, n] for n in range(1, 8)] + [[2, n] for n in range(8, 21)]
    assert facts["resume_losses"]
    assert facts["resume_exact"]


@pytest.mark.parametrize("dropout", ["0.0", "0.2"])
def test_recomputed_activations_change_nothing(facts, dropout):
    off, on = facts[f"recompute_{dropout}"]
    assert off == on
    assert len(off) == 5


def test_bf16_stays_close_and_keeps_fp32_weights_and_moments(facts):
    assert facts["bf16_state_dtypes"] == ["torch.float32"]
    assert facts["bf16_losses"] == pytest.approx(facts["bf16_exact_losses"], rel=0.02)
    assert facts["bf16_losses"] != facts["bf16_exact_losses"]


def test_max_attention_logit_is_logged_without_new_programs(facts, data, tmp_path):
    ng.train(
        ng.preset("tiny", data=str(data), out=str(tmp_path / "cpu"), device="cpu", num_steps=10)
    )
    records = read_metrics(tmp_path / "cpu")
    assert len(facts["max_logits"]) == 10
    # One sequence here, one on each of eight devices there: as large or larger.
    cpu = [record["max_attention_logit"] for record in records if "loss" in record]
    assert all(a >= b * 0.999 for a, b in zip(facts["max_logits"], cpu, strict=True))
    assert facts["measure_programs"][1:] == [facts["measure_programs"][1]] * 2


FOUND = ("WEIGHT", "REFUSED", "TRIPPED")
BF16_FLAG = """
import torch, torch_xla
param = torch.nn.Parameter(torch.ones(4, device=torch_xla.device()))
optimizer = torch.optim.AdamW([param], lr=1e-4, weight_decay=0.0)
for _ in range(10):
    param.grad = torch.ones_like(param)
    optimizer.step()
    torch_xla.sync()
print("WEIGHT", float(param[0].cpu()), float(optimizer.state[param]["exp_avg"][0].cpu()))
"""
REFUSAL = """
import os
import nanogpt_tpu as ng
from nanogpt_tpu.errors import UserError
try:
    ng.patch_tpu_env("xla-cpu:1")
except UserError as error:
    print("REFUSED", error)
os.environ.pop("XLA_USE_BF16")
ng.patch_tpu_env("xla-cpu:1")
os.environ["XLA_USE_BF16"] = "1"  # as Accelerate does it, behind our back
import torch_xla
from nanogpt_tpu.runtime import Runtime
runtime = Runtime.__new__(Runtime)
runtime.device = torch_xla.device()
try:
    runtime._check_fp32()
except UserError as error:
    print("TRIPPED", error)
"""


def run_with_flag(run_python, code, flag):
    done = run_python("-c", code, env={"PJRT_DEVICE": "CPU", **flag, "USE_TORCH_XLA": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith(FOUND)]


def test_the_bf16_flag_loses_every_small_update_and_rounds_the_moments(run_python):
    word, weight, moment = run_with_flag(run_python, BF16_FLAG, {"XLA_USE_BF16": "1"})[0].split()
    assert (word, float(weight)) == ("WEIGHT", 1.0)  # ten updates of 1e-4, all lost
    exact = 1 - 0.9**10
    assert abs(float(moment) - exact) > 1e-3
    _, weight, moment = run_with_flag(run_python, BF16_FLAG, {})[0].split()
    assert float(weight) == pytest.approx(1 - 10 * 1e-4, abs=1e-6)
    assert float(moment) == pytest.approx(exact, abs=1e-6)


def test_the_bf16_flag_is_refused_and_the_tripwire_finds_it(run_python):
    printed = run_with_flag(run_python, REFUSAL, {"XLA_USE_BF16": "1"})
    assert printed[0].startswith("REFUSED XLA_USE_BF16=1 is set")
    assert printed[1].startswith("TRIPPED fp32 tensors are stored as bf16")


def test_sampling_has_one_shape_and_makes_no_new_program(facts):
    sampling = facts["sampling"]
    assert sampling["shapes"] == [[1, 1], [1, 32]]  # reading, and a token more
    assert sampling["new_programs"] == 0
    assert sampling["num_tokens"] == 40
    assert sampling["max_id"] < 257
