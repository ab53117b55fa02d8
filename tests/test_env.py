"""Environment variables of each device kind, and the one choice a process may make."""

from pathlib import Path

import pytest

from nanogpt_tpu import env
from nanogpt_tpu.errors import UserError

KAGGLE = {"TPU_PROCESS_ADDRESSES": "local", "TPU_SKIP_MDS_QUERY": "1", "PATH": "/usr/bin"}


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        ("tpu", {"PJRT_DEVICE": "TPU", "USE_TORCH_XLA": "1"}),
        ("xla-cpu:8", {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "USE_TORCH_XLA": "1"}),
        ("cpu", {"USE_TORCH_XLA": "0"}),
        ("cuda", {"USE_TORCH_XLA": "0"}),
        ("auto", {"USE_TORCH_XLA": "0"}),
    ],
)
def test_env_changes(device, changes):
    before = dict(KAGGLE)
    assert env.env_changes(before, device) == changes
    assert before == KAGGLE
    assert env.env_changes({**KAGGLE, **changes}, device) == {}


def test_env_changes_names_only_what_differs():
    present = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "USE_TORCH_XLA": "1"}
    assert env.env_changes(present, "xla-cpu:8") == {"CPU_NUM_DEVICES": "8"}


def test_parse_device():
    assert env.parse_device("xla-cpu:8") == ("xla-cpu", 8)
    for device in ("auto", "tpu", "cuda", "mps", "cpu"):
        assert env.parse_device(device) == (device, None)


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("gpu", "say cuda"),
        ("cudas", "did you mean 'cuda'"),
        ("tpu:8", "did you mean 'tpu'"),
        ("cuda:0", "did you mean 'cuda'"),
        ("", "known: auto, tpu"),
        ("xla-cpu", "xla-cpu:8"),
        ("xla-cpu:", "xla-cpu:8"),
        ("xla-cpu:0", "xla-cpu:8"),
        ("xla-cpu:-2", "xla-cpu:8"),
        ("xla-cpu:N", "xla-cpu:8"),
    ],
)
def test_unknown_devices(device, hint):
    with pytest.raises(UserError, match="device") as caught:
        env.parse_device(device)
    assert repr(device) in str(caught.value) and hint in str(caught.value)


def test_folders(monkeypatch):
    monkeypatch.setenv("NANOGPT_TPU_INPUT", "in")
    monkeypatch.setenv("NANOGPT_TPU_WORKING", "work")
    assert (env.input_dir(), env.working_dir()) == (Path("in"), Path("work"))
    monkeypatch.delenv("NANOGPT_TPU_INPUT")
    assert env.input_dir() == Path("/kaggle/input")


TRY = """
import os, sys
from nanogpt_tpu.env import chosen_device, patch_tpu_env
from nanogpt_tpu.errors import UserError
def choose(device):
    try:
        print(device, patch_tpu_env(device), chosen_device())
    except UserError as error:
        print(device, "refused:", error)
"""


@pytest.fixture
def choose(run_python, tmp_path):
    """Runs code in a process that has no packages but this one and empty ones named `installed`."""

    def run(code: str, installed: tuple[str, ...] = (), **environ: str) -> list[str]:
        for name in installed:
            (tmp_path / f"{name}.py").touch()
        clean = {"PJRT_DEVICE": "", "CPU_NUM_DEVICES": "", "USE_TORCH_XLA": "", **environ}
        done = run_python("-S", "-c", f"import sys; sys.path += ['.']\n{TRY}{code}", env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


XLA = ("torch_xla", "accelerate")


def test_one_xla_kind_a_process(choose):
    kinds = ("xla-cpu:2", "xla-cpu:2", "auto", "xla-cpu:4", "cpu", "tpu")
    first, again, auto, *others = choose(f"for kind in {kinds}: choose(kind)", XLA)
    assert "PJRT_DEVICE=CPU" in first and "CPU_NUM_DEVICES=2" in first
    assert again == "xla-cpu:2 [] xla-cpu:2"
    assert auto == "auto [] xla-cpu:2"
    for line in others[:2]:
        assert "refused: this process already runs on 'xla-cpu:2'" in line and "restart" in line
    assert others[2].startswith("tpu refused: device 'tpu': no TPU chip")


def test_xla_cannot_follow_another_kind(choose):
    lines = choose("choose('cpu'); choose('xla-cpu:2'); print(os.environ['USE_TORCH_XLA'])", XLA)
    assert lines[0] == "cpu ['USE_TORCH_XLA=0'] cpu"
    assert "already runs on 'cpu', 'xla-cpu:2' was asked" in lines[1]
    assert lines[2] == "0"


def test_kinds_without_xla_may_follow_one_another(choose):
    lines = choose("for kind in ('auto', 'cpu', 'cuda', 'mps', 'cpu'): choose(kind)", XLA)
    assert [line.split()[-1] for line in lines] == ["auto", "cpu", "cuda", "mps", "cpu"]
    assert not any("refused" in line for line in lines)


@pytest.mark.parametrize("early", XLA)
@pytest.mark.parametrize("device", ["xla-cpu:2", "cpu"])
def test_too_late(choose, early, device):
    lines = choose(f"import {early}; choose({device!r}); print(os.environ['USE_TORCH_XLA'])", XLA)
    assert f"refused: {early} was imported before the device was chosen" in lines[0]
    assert "USE_TORCH_XLA" in lines[0] and f"patch_tpu_env(device={device!r}) first" in lines[0]
    assert lines[1] == ""


def test_not_too_late_when_nothing_must_change(choose):
    right = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "USE_TORCH_XLA": "1"}
    lines = choose("import torch_xla, accelerate; choose('xla-cpu:2')", XLA, **right)
    assert lines == ["xla-cpu:2 [] xla-cpu:2"]
    lines = choose("import torch_xla; choose('cpu')", XLA, USE_TORCH_XLA="0")
    assert lines == ["cpu [] cpu"]


def test_never_too_late_without_torch_xla(choose):
    lines = choose("import accelerate; choose('auto'); choose('cpu')", ("accelerate",))
    assert [line.split()[-1] for line in lines] == ["auto", "cpu"]


@pytest.mark.parametrize("flag", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_flags_that_store_fp32_as_bf16(choose, flag):
    code = "choose('xla-cpu:2'); print(os.environ['PJRT_DEVICE'])"
    lines = choose(code, XLA, **{flag: "1"})
    assert f"refused: {flag}=1 is set" in lines[0] and "bf16" in lines[0]
    assert lines[1] == ""
    assert "refused" not in choose("choose('cpu')", XLA, **{flag: "1"})[0]
    assert "refused" not in choose("choose('xla-cpu:2')", XLA, **{flag: "0"})[0]


def test_devices_that_are_not_there(choose):
    code = "choose('tpu'); choose('xla-cpu:2'); choose('auto'); print('torch' in sys.modules)"
    tpu, xla, auto, has_torch = choose(code)
    assert "tpu refused: device 'tpu' needs torch_xla, which is not installed" in tpu
    assert "refused: device 'xla-cpu:2' needs torch_xla" in xla and "--device cpu" in xla
    assert auto.endswith("auto")
    assert has_torch == "False"


def test_no_tpu_chip(choose):
    (line,) = choose("choose('tpu')", ("torch_xla",))
    assert "no TPU chip on this machine" in line and "--device xla-cpu:8" in line
