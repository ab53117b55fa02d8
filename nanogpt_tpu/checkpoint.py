"""Checkpoints: written whole or not at all, verified before use, the last few kept.

    RUN/checkpoints/step_00000500/{model.safetensors, optimizer.safetensors, tokenizer.json,
    state.json}, and RUN/checkpoints/latest.json naming the newest

`state.json` is written last and is the commit mark: it holds the sha256 of its siblings, and a
folder without it does not exist. No pickle anywhere: a stranger's checkpoint cannot run code.
Knows tensors by name on the host, not what model or device they belong to.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.shardfile import hash_file
from nanogpt_tpu.ties import check_tied_values, find_ties
from nanogpt_tpu.tokenizer import FILE_NAME as TOKENIZER_FILE
from nanogpt_tpu.tokenizer import Tokenizer

FORMAT_VERSION = 1
STATE, MODEL, OPTIMIZER = "state.json", "model.safetensors", "optimizer.safetensors"
LATEST = "latest.json"
_FOLDER = re.compile(r"step_\d{8,}")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder and the contents of its state.json."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return int(self.state["step"])

    def verify(self) -> None:
        """Compare every file with its hash.

        Raises:
            UserError: one is missing or changed; its name is given.
        """
        for name, digest in self.state["sha256"].items():
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"checkpoint {self.folder}: {name} is missing")
            if hash_file(path) != digest:
                raise UserError(f"checkpoint {self.folder}: {name} is damaged (sha256 differs)")

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one file, on the host.

        Raises:
            UserError: the file is missing or no safetensors file.
        """
        try:
            return load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"checkpoint {self.folder}: {name} cannot be read ({error})") from error


def save_checkpoint(
    run_dir: Path,
    state: dict[str, Any],
    model: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    keep_last: int,
) -> Path:
    """Write a checkpoint of `state["step"]`, then remove all but the newest `keep_last`.

    Args:
        run_dir: the run folder.
        state: all that a resume needs besides tensors; must hold "step".
        model: host tensors by name.
        optimizer: host tensors by path, as `optimizer_tensors` names them.
        tokenizer: travels with the weights.
        keep_last: how many checkpoints stay.

    Raises:
        UserError: the disk is full or not writable; no stump is left under a final name.
    """
    parent = run_dir / "checkpoints"
    final = parent / f"step_{state['step']:08d}"
    partial = parent / f".{final.name}.tmp"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(model, partial / MODEL)
        save_file(optimizer, partial / OPTIMIZER)
        tokenizer.save(partial)
        digests = {}
        for name in (MODEL, OPTIMIZER, TOKENIZER_FILE):
            _sync_to_disk(partial / name)
            digests[name] = hash_file(partial / name)
        marks = {"versions": _versions(), "sha256": digests}
        committed = {"format_version": FORMAT_VERSION, **state, **marks}
        _write_json(partial / STATE, committed)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _write_json(parent / LATEST, {"step": state["step"], "folder": final.name})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"checkpoint {final} could not be written ({error}), "
            f"{shutil.disk_usage(run_dir).free / 2**30:.1f} GiB free: make room, then start the "
            "same command again; earlier checkpoints are whole"
        ) from error
    # Only ours, and only up to this step: one above it is damaged and was passed over.
    ours = [path for path in parent.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
    for old in sorted(path for path in ours if path <= final)[:-keep_last]:
        shutil.rmtree(old)
    return final


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Committed checkpoints in or anywhere below `folder`, newest first; not yet verified."""
    return _scan(folder)[0]


def _scan(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Those, and a line for each folder of ours whose mark cannot be read.

    A folder without a state.json, or with another program's, is not seen.
    """
    found: list[Checkpoint] = []
    complaints: list[str] = []
    for path in sorted(folder.rglob(STATE)):
        if path.parent.name.startswith("."):
            continue  # never committed
        try:
            found.append(Checkpoint(path.parent, _read_state(path)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if _FOLDER.fullmatch(path.parent.name):
                complaints.append(f"checkpoint {path.parent}: {STATE} is damaged ({error})")
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True), complaints


def _read_state(path: Path) -> dict[str, Any]:
    """A state.json of this format; any of the errors above when it is none."""
    state = json.loads(path.read_text("utf-8"))
    if state["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version {state['format_version']}, this program reads 1")
    if not (isinstance(state["step"], int) and state["step"] >= 0):
        raise ValueError(f"step {state['step']}")
    if not all(isinstance(part, str) for pair in state["sha256"].items() for part in pair):
        raise ValueError("sha256 is no table of hashes")
    return state


def valid_checkpoints(folder: Path) -> tuple[Iterator[Checkpoint], list[str]]:
    """Checkpoints whose hashes agree, newest first, found one by one; and a growing list of lines.

    Each line says what was passed over as damaged. Hashing is slow: take no more than needed.
    """
    found, complaints = _scan(folder)

    def verified() -> Iterator[Checkpoint]:
        for checkpoint in found:
            try:
                checkpoint.verify()
            except UserError as error:
                complaints.append(str(error))
            else:
                yield checkpoint

    return verified(), complaints


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose hashes agree, and a line for each damaged one passed over."""
    checkpoints, complaints = valid_checkpoints(folder)
    return next(checkpoints, None), complaints


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """The newest valid checkpoint of a run folder, a checkpoint folder or a folder above one.

    Raises:
        UserError: nothing there, or nothing undamaged.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise UserError(f"{str(source)!r}: no such folder; give a run or a checkpoint")
    checkpoint, complaints = newest_valid(folder)
    if checkpoint is None:
        detail = f" ({'; '.join(complaints)})" if complaints else ""
        raise UserError(f"{folder}: no checkpoint in or below it{detail}; train first")
    return checkpoint


def _versions() -> dict[str, str | None]:
    """Versions of what computed these weights; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in ("nanogpt-tpu", "torch", "torch_xla", "accelerate", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_suffix(".json.tmp")
    partial.write_text(json.dumps(values, indent=1), "utf-8")  # ASCII: paths may be no UTF-8
    _sync_to_disk(partial)
    partial.replace(path)


def _sync_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into a model on the host; raises as `fill` does."""
    fill(model, checkpoint.load(MODEL), checkpoint.folder)


def fill(model: nn.Module, tensors: dict[str, torch.Tensor], origin: object) -> None:
    """Copy weights by name into a model on the host; `origin` is named in errors.

    Raises:
        UserError: a name is missing or unknown, a shape differs (both are given), or tied weights
            differ.
    """
    wanted = model.state_dict()
    for problem, names in (
        ("the model needs", wanted.keys() - tensors.keys()),
        ("the model has no", tensors.keys() - wanted.keys()),
    ):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{origin}: weights do not fit: {problem} {min(names)}{others}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{origin}: weights do not fit: {name} has shape {tuple(tensor.shape)} there, "
                f"{tuple(wanted[name].shape)} in the model; use the settings it was trained with"
            )
    check_tied_values(tensors, find_ties(model), origin)
    model.load_state_dict(tensors)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> dict[str, torch.Tensor]:
    """An optimizer's state as flat tensors "exp_avg/h.0.attn.c_attn.weight", still on device."""
    return {
        f"{key}/{names[param]}": value
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Put saved state back, each tensor on its parameter's device (scalars of AdamW included).

    Raises:
        UserError: the saved state is not that of these parameters.
    """
    wanted = {names[param]: param for param in optimizer.state}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        states.setdefault(name, {})[key] = tensor
    if states.keys() != wanted.keys():
        odd = sorted(states.keys() ^ wanted.keys())
        raise UserError(
            f"the optimizer state in the checkpoint is not this model's: {odd[0]!r} and "
            f"{len(odd) - 1} more differ; start with --resume never"
        )
    for name, state in states.items():
        param = wanted[name]
        for key, tensor in state.items():
            if key != "step" and tensor.shape != param.shape:
                raise UserError(
                    f"optimizer state {key} of {name} has shape {tuple(tensor.shape)}, the "
                    f"parameter has {tuple(param.shape)}: start with --resume never"
                )
        optimizer.state[param] = {key: t.to(param.device) for key, t in state.items()}
