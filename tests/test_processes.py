"""Two processes on the CPU, as two GPUs would be: the run of one, written once."""

import json
import os
import subprocess
import sys

import pytest

import nanogpt_tpu as ng
from nanogpt_tpu.metrics import read_metrics
from nanogpt_tpu.train import train


@pytest.mark.slow
def test_two_processes_train_the_run_of_one(data_dir, tmp_path):
    settings = {"num_steps": 8, "eval_every": 4, "eval_tokens": 160, "keep_last": 1}
    train(ng.preset("tiny", data=data_dir, out=tmp_path / "one", device="cpu", **settings))

    flags = [part for k, v in settings.items() for part in ("--" + k.replace("_", "-"), str(v))]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    argv += ["-m", "nanogpt_tpu", "train", "--preset", "tiny", "--device", "cpu", "--json", *flags]
    argv += ["--data", str(data_dir), "--out", str(tmp_path / "two")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["step"] == 8  # one object: only one process speaks

    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    for key in ("loss", "val_loss", "grad_norm"):
        values = [[record[key] for record in run if key in record] for run in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-4), key
    checkpoints = [path.name for path in (tmp_path / "two" / "checkpoints").glob("step_*")]
    assert checkpoints == ["step_00000008"]
    assert ng.load_checkpoint(tmp_path / "two")[2]["step"] == 8
