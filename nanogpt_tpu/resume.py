"""Which checkpoint a run goes on from, and whether it may."""

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanogpt_tpu import env
from nanogpt_tpu.checkpoint import Checkpoint, newest_valid, open_checkpoint
from nanogpt_tpu.config import TrainConfig
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.metrics import METRICS
from nanogpt_tpu.shards import Manifest

# Each of these decides the weights or the batches: a resumed run must share them.
FIXED = ("seed", "seq_len", "tokens_per_step")
_FREE_MODEL_FIELDS = ("dropout", "attention")  # no effect on the shape of the weights


def find_resume(config: TrainConfig, manifest: Manifest) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from (None: start anew), and lines that say what was chosen and why.

    `config.resume` "auto" takes the newest valid one in `out`, else the newest under the input
    folder if it is of this run; "never" none; a path must hold one.

    Raises:
        UserError: the checkpoint in `out` or at the path is of another run, with both values; or
            `out` holds only damaged ones.
    """
    if config.resume == "never":
        return None, []
    if config.resume != "auto":
        checkpoint = open_checkpoint(config.resume)
        _check(checkpoint, config, manifest)
        return checkpoint, [f"Resuming from {checkpoint.folder} at step {checkpoint.step}."]
    assert config.out is not None
    checkpoint, lines = newest_valid(Path(config.out))
    lines = [f"Passed over: {line}." for line in lines]
    if checkpoint is None and lines:
        raise UserError(
            f"{config.out}: every checkpoint is damaged ({lines[-1]}); restore one, or start "
            "again with --resume never"
        )
    if checkpoint is not None:
        _check(checkpoint, config, manifest)
        return checkpoint, [*lines, f"Resuming from {checkpoint.folder} at step {checkpoint.step}."]
    if not env.input_dir().is_dir():
        return None, []
    checkpoint, lines = newest_valid(env.input_dir())
    if checkpoint is None:
        return None, lines
    try:
        _check(checkpoint, config, manifest)
    except UserError as error:
        return None, [*lines, f"Not resuming from {checkpoint.folder}: {error}."]
    return checkpoint, [*lines, f"Resuming from {checkpoint.folder} at step {checkpoint.step}."]


def carry_history(checkpoint: Checkpoint, run_dir: Path) -> None:
    """Bring the metrics and samples of a run that goes on in another folder: one curve."""
    source = checkpoint.folder.parent.parent
    if source.resolve() == run_dir.resolve():
        return
    if (source / METRICS).is_file():
        shutil.copyfile(source / METRICS, run_dir / METRICS)
    if (source / "samples").is_dir():
        shutil.copytree(source / "samples", run_dir / "samples", dirs_exist_ok=True)


def _check(checkpoint: Checkpoint, config: TrainConfig, manifest: Manifest) -> None:
    """Refuse a checkpoint of another run, naming what differs and both values."""
    state = checkpoint.state
    try:
        saved = TrainConfig.from_dict(state["config"])
        saved_tokenizer, saved_data = state["tokenizer"]["sha256"], state["data"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{checkpoint.folder}: its state.json is not of a run ({error})") from error
    differing: list[tuple[str, Any, Any]] = []
    if saved_tokenizer != manifest.tokenizer["sha256"]:
        differing.append(("tokenizer", _label(state["tokenizer"]), _label(manifest.tokenizer)))
    for f in fields(config.model):
        pair = getattr(saved.model, f.name), getattr(config.model, f.name)
        if pair[0] != pair[1] and f.name not in _FREE_MODEL_FIELDS:
            differing.append((f.name, *pair))
    for name in FIXED:
        pair = getattr(saved, name), getattr(config, name)
        if pair[0] != pair[1]:
            differing.append((name, *pair))
    if not differing and saved_data["identity"] != manifest.identity:
        data = os.fspath(config.data or "")
        differing.append(("data", f"{saved_data['source']} ({saved_data['folder']})", data))
    if differing:
        what = "; ".join(f"{name} is {now} now and {then} there" for name, then, now in differing)
        raise UserError(
            f"cannot resume from {checkpoint.folder}: {what}; use the same settings, or another "
            "--out, or --resume never"
        )


def _label(tokenizer: dict[str, Any]) -> str:
    return (
        f"{tokenizer['kind']} of {tokenizer['vocab_size']} ids (sha256 {tokenizer['sha256'][:8]})"
    )
