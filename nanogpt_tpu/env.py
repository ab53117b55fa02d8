"""The machine around a run: TPU environment variables, Kaggle's folders, the session's clock.

`patch_tpu_env()` decides the device kind of this process and sets the variables for it; it must
run before torch_xla or accelerate is imported, and says so when it is too late. Reads no
hardware beyond the existence of device files. Standard library only.
"""

import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from nanogpt_tpu.errors import UserError, unknown_name

SESSION_START_S = time.monotonic()
"""When this process met the package: the session's clock starts here, not at the first step."""

DEVICES = ("auto", "tpu", "xla-cpu:N", "cuda", "mps", "cpu")
_REFUSED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
_chosen: str | None = None  # the device kind of this process, fixed by the first patch_tpu_env


def input_dir() -> Path:
    """Folder of attached, read-only inputs: NANOGPT_TPU_INPUT, else /kaggle/input."""
    return Path(os.environ.get("NANOGPT_TPU_INPUT", "/kaggle/input"))


def working_dir() -> Path:
    """Folder that is kept: NANOGPT_TPU_WORKING, else /kaggle/working, else the current one."""
    default = "/kaggle/working" if Path("/kaggle/working").is_dir() else "."
    return Path(os.environ.get("NANOGPT_TPU_WORKING", default))


def attached_dir() -> Path:
    """Where a notebook looks for what came before: the inputs, where there are none its own."""
    return input_dir() if input_dir().is_dir() else working_dir()


def is_main_process() -> bool:
    """Whether this is the process that speaks and writes, of those a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def session_s() -> float:
    """Seconds since this session (process) began."""
    return time.monotonic() - SESSION_START_S


@functools.cache
def git_commit() -> str | None:
    """The commit this package runs from, "-dirty" added if files differ; None if no checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # no git here: the card says "-"
    return done.stdout.strip()


def has_tpu() -> bool:
    """Whether this machine shows TPU chips and the software to use them."""
    if not _has_xla() or importlib.util.find_spec("libtpu") is None:
        return False
    chips = (*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*"))
    return bool(chips)


def chosen_device() -> str:
    """The device kind this process was prepared for."""
    return _chosen or "auto"


def parse_device(device: str) -> tuple[str, int | None]:
    """Split a device name: ("xla-cpu", 8) for "xla-cpu:8", (kind, None) for the others.

    Raises:
        UserError: no such device; the nearest name is given.
    """
    kind, colon, count = device.partition(":")
    if kind == "xla-cpu":
        if count.isdecimal() and int(count) >= 1:
            return kind, int(count)
        raise UserError(f"device {device!r}: say how many virtual devices, such as xla-cpu:8")
    if kind == "gpu":
        raise UserError(f"unknown device {device!r}: say cuda (NVIDIA, AMD) or mps (Apple)")
    if colon or kind not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    return kind, None


def env_changes(environ: Mapping[str, str], device: str) -> dict[str, str]:
    """The variables that `device` needs set, given the present ones: pure, for tests.

    Kaggle's `TPU_PROCESS_ADDRESSES=local` stays: it is right for one process driving all chips
    (and fatal for one process a chip, which this package does not use).
    """
    kind, count = parse_device(device)
    if kind == "tpu":
        # The image does not set PJRT_DEVICE; a bf16 flag would turn fp32 weights into bf16.
        wanted = {"PJRT_DEVICE": "TPU", "USE_TORCH_XLA": "1"}
    elif kind == "xla-cpu":
        wanted = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count), "USE_TORCH_XLA": "1"}
    else:
        # With torch_xla installed, even Accelerator(cpu=True) lands on XLA unless told not to.
        wanted = {"USE_TORCH_XLA": "0"}
    return {name: value for name, value in wanted.items() if environ.get(name) != value}


def patch_tpu_env(device: str = "auto") -> list[str]:
    """Prepare this process for `device` and return what was changed, one line each.

    Must run before torch_xla and accelerate are imported. A process keeps to one XLA device kind;
    kinds without XLA (auto, cuda, mps, cpu) may follow one another.

    Raises:
        UserError: unknown device; another kind was chosen before; too late; no such software;
            or a variable is set that would store fp32 tensors as bf16.
    """
    global _chosen
    parse_device(device)
    wanted = _resolve(device)
    if _chosen not in (None, wanted) and (_is_xla(wanted) or _is_xla(chosen_device())):
        raise UserError(
            f"this process already runs on {_chosen!r}, {wanted!r} was asked: one device kind a "
            "process; restart Python (on Kaggle: Run > Restart session) and choose it first"
        )
    _refuse_bf16_flags(wanted)
    changes = env_changes(os.environ, wanted)
    # Where torch_xla is not installed, Accelerate has no XLA to choose: never too late.
    late = [name for name in ("torch_xla", "accelerate") if name in sys.modules and _has_xla()]
    if changes and late:
        raise UserError(
            f"{' and '.join(late)} was imported before the device was chosen, too late to set "
            f"{', '.join(changes)}: call patch_tpu_env(device={device!r}) first, in a new process"
        )
    os.environ.update(changes)
    if changes.get("USE_TORCH_XLA") == "0":
        # Waiting threads spin so long before they sleep. GNU's default takes cores from others:
        # beside two busy processes this makes 1.8 times as many tokens/s, on idle cores as many.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    _chosen = wanted
    return [f"{name}={value}" for name, value in changes.items()]


def _has_xla() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def _is_xla(device: str) -> bool:
    return parse_device(device)[0] in ("tpu", "xla-cpu")


def _resolve(device: str) -> str:
    """`device` with "auto" decided as far as it can be without torch, and its software present."""
    if device == "auto":
        if _chosen is not None:
            return _chosen
        return "tpu" if has_tpu() else "auto"
    if _is_xla(device) and not _has_xla():
        raise UserError(
            f"device {device!r} needs torch_xla, which is not installed: on Kaggle choose the "
            "accelerator TPU v5e-8; on Linux x86-64 pip install torch_xla==2.8.0; or --device cpu"
        )
    if device == "tpu" and not has_tpu():
        raise UserError(
            "device 'tpu': no TPU chip on this machine; on Kaggle choose the accelerator "
            "TPU v5e-8 (a phone-verified account); to rehearse here use --device xla-cpu:8"
        )
    return device


def _refuse_bf16_flags(device: str) -> None:
    """XLA: these flags store every fp32 tensor as bf16, master weights and moments included."""
    on = [name for name in _REFUSED if os.environ.get(name, "0").lower() not in ("", "0", "false")]
    if on and _is_xla(device):
        raise UserError(
            f"{on[0]}={os.environ[on[0]]} is set: torch_xla would store all fp32 tensors as bf16 "
            f"(1 + 1e-4 == 1), optimizer state included; unset it, precision is set in the config"
        )
