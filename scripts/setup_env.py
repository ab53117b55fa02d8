"""Make .venv: the software of Kaggle's TPU image on Linux x86-64, plain PyTorch elsewhere.

Run by `make demo` and `make test` when .venv is missing or out of date; standard library only.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
SUPPORTED = ("3.11", "3.12")  # torch_xla 2.8 has wheels for these, and Kaggle runs 3.12
HAS_XLA = platform.system() == "Linux" and platform.machine() == "x86_64"
NEEDED_BYTES = 9 * 2**30 if HAS_XLA else 3 * 2**30


def fail(message: str) -> None:
    """Say what is wrong in one line and stop with the exit code of a user error."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def find_python() -> str:
    """Path of a Python 3.11 or 3.12: the one running this script, else the first on PATH."""
    for candidate in (sys.executable, *(f"python{version}" for version in SUPPORTED)):
        path = shutil.which(candidate)
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        if path is None:
            continue
        found = subprocess.run([path, "-c", ask], capture_output=True, text=True)
        if found.stdout.strip() in SUPPORTED:
            return path
    fail(f"Python {' or '.join(SUPPORTED)} is needed, none found on PATH: install one of them")
    raise AssertionError


def main() -> None:
    """Check Python and disk, create the virtual environment, install the project into it."""
    python = find_python()
    free_bytes = shutil.disk_usage(ROOT).free
    if not VENV.exists() and free_bytes < NEEDED_BYTES:
        fail(
            f"{free_bytes / 2**30:.1f} GiB free in {ROOT}, the environment needs about "
            f"{NEEDED_BYTES / 2**30:.0f} GiB: free some space or clone onto a larger disk"
        )
    extras = "tpu,data,dev" if HAS_XLA else "data,dev"
    kind = "Kaggle's TPU software (torch 2.8, torch_xla 2.8)" if HAS_XLA else "plain PyTorch"
    print(
        f"Setting up {VENV} with {kind}: once, about {'8 GB and 3' if HAS_XLA else '2 GB and 2'} "
        f"minutes; {free_bytes / 2**30:.0f} GiB free.",
        flush=True,
    )
    start_s = time.monotonic()
    if not (VENV / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(VENV)], check=True)
    install = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    install += ["--disable-pip-version-check", "--constraint", "kaggle/image-constraints.txt"]
    done = subprocess.run([*install, "--editable", f".[{extras}]"], cwd=ROOT, env=os.environ)
    if done.returncode != 0:
        fail(
            "pip could not install the environment (its own message is above): check network "
            "and disk, then run the same command again"
        )
    (VENV / ".ready").touch()
    print(f"Ready after {time.monotonic() - start_s:.0f} s.", flush=True)


if __name__ == "__main__":
    main()
