"""What a run starts from: folders, data, vocabulary, checkpoint; checked before any write."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nanogpt_tpu import env
from nanogpt_tpu.checkpoint import (
    STATE,
    Checkpoint,
    newest_valid,
    open_checkpoint,
    valid_checkpoints,
)
from nanogpt_tpu.config import BatchPlan, TrainConfig, preset
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.metrics import METRICS, SAMPLES
from nanogpt_tpu.tokenizer import FILE_NAME as TOKENIZER_FILE
from nanogpt_tpu.tokenizer import Tokenizer, load_tokenizer

# Each of these decides the weights or the batches: a resumed run must share them.
FIXED = ("seed", "seq_len", "tokens_per_step", "packing")
_FREE_MODEL_FIELDS = ("dropout", "attention")  # no effect on the shape of the weights


@dataclass(frozen=True)
class Start:
    """A run about to begin or to go on."""

    config: TrainConfig
    """As given, its vocabulary now that of the data."""
    run_dir: Path
    data_dir: Path
    manifest: Manifest
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None
    """What to go on from; None starts anew."""
    origin: Checkpoint | None
    """Whose weights a new run begins with; None draws them."""
    lines: list[str]
    """What was chosen, and why, for people."""

    @property
    def longest_val_tokens(self) -> int:
        """Tokens in the longest validation shard; 0 if there is none."""
        return max((s.num_tokens for s in self.manifest.splits.get("val", [])), default=0)

    def describe(self, plan: BatchPlan, num_params: int) -> list[str]:
        """What this run is, for people, before it starts."""
        config, train_tokens = self.config, self.manifest.num_tokens("train")
        epochs = config.num_steps * plan.tokens_per_step / train_tokens
        return [
            f"Model: {num_params:,} parameters, context {config.context}",
            f"Data: {train_tokens:,} training tokens; {config.num_steps:,} steps of "
            f"{plan.tokens_per_step:,} are {epochs:.2g} epoch(s)",
            f"Step: {plan.num_micro_steps} micro step(s) of {plan.micro_batch_size} sequences of "
            f"{plan.seq_len} tokens on {plan.num_devices} device(s)",
        ]

    def open_run_dir(self) -> None:
        """Make the run folder; bring along curve and checkpoint of a run that was elsewhere.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.tokenizer.save(self.run_dir)
            text = json.dumps(self.config.to_dict(), indent=1) + "\n"
            (self.run_dir / "config.json").write_text(text, "utf-8")
            self._bring_along()
        except OSError as error:
            raise UserError(f"out {str(self.run_dir)!r} cannot be written ({error})") from error

    def adopt(self) -> None:
        """Bring along a run that needs no step, if it was somewhere else."""
        if env.is_main_process() and not (self.run_dir / "config.json").exists():
            self.open_run_dir()

    def _bring_along(self) -> None:
        if self.checkpoint is None:
            return
        source = self.checkpoint.folder.parent.parent
        if source.resolve() != self.run_dir.resolve():
            if (source / METRICS).is_file():
                shutil.copyfile(source / METRICS, self.run_dir / METRICS)
            _copy_files(source / SAMPLES, self.run_dir / SAMPLES)
            kept = self.run_dir / "checkpoints" / self.checkpoint.folder.name
            _copy_files(self.checkpoint.folder, kept)


def _copy_files(source: Path, target: Path) -> None:
    """Copy a flat folder's files, the commit mark last; writable even where the source is not."""
    files = [path for path in source.glob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == STATE):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)


def find_start(config: TrainConfig) -> Start:
    """Open the data and find the checkpoint of a run; nothing is written.

    Raises:
        UserError: a folder is missing or not writable, the data is not there or of another
            tokenizer, or the checkpoint is of another run.
    """
    run_dir, data_dir = _folders(config)
    manifest = Manifest.load(data_dir)
    origin = None if config.init_from is None else open_checkpoint(config.init_from)
    if origin is not None:
        config = _with_model_of(origin, config)
        if origin.state["tokenizer"]["sha256"] != manifest.tokenizer["sha256"]:
            raise UserError(
                f"init_from {config.init_from!r}: its tokenizer is not that of {data_dir}; prepare "
                f"the data with --tokenizer {origin.folder / TOKENIZER_FILE}"
            )
    config = _follow_data(config, manifest)
    tokenizer = load_tokenizer(data_dir)
    if tokenizer.sha256 != manifest.tokenizer["sha256"]:
        raise UserError(f"data {data_dir}: tokenizer.json is not the one that made its shards")
    checkpoint, lines = _find_checkpoint(config, run_dir, manifest)
    if checkpoint is None and origin is not None:
        lines.append(f"Beginning with the weights of {origin.folder} (step {origin.step}).")
    return Start(config, run_dir, data_dir, manifest, tokenizer, checkpoint, origin, lines)


def _with_model_of(origin: Checkpoint, config: TrainConfig) -> TrainConfig:
    """`config` with the model that weights were made for; dropout and attention stay free."""
    try:
        saved = TrainConfig.from_dict(origin.state["config"]).model
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"{origin.folder}: its state.json is not of a run ({error})") from error
    free = {name: getattr(config.model, name) for name in _FREE_MODEL_FIELDS}
    return config.replace(model=replace(saved, **free))


def _folders(config: TrainConfig) -> tuple[Path, Path]:
    """Run folder and data folder."""
    for name in ("data", "out"):
        if not getattr(config, name):
            raise UserError(f"{name} is not set: say the folder, as in --{name} DIR")
    run_dir = Path(config.out or "")
    ancestor = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise UserError(f"out {config.out!r}: {ancestor} is not a writable folder; choose another")
    return run_dir, Path(config.data or "")


def _follow_data(config: TrainConfig, manifest: Manifest) -> TrainConfig:
    """Give the model the data's vocabulary, unless another than the preset's was asked for."""
    vocab_size = manifest.tokenizer["vocab_size"]
    if config.model.vocab_size not in (vocab_size, preset(config.preset).model.vocab_size):
        raise UserError(
            f"vocab_size {config.model.vocab_size} differs from the {vocab_size} ids of the "
            f"tokenizer of {config.data!r}: leave vocab_size out, it follows the data"
        )
    return config.replace(vocab_size=vocab_size)


def _find_checkpoint(
    config: TrainConfig, run_dir: Path, manifest: Manifest
) -> tuple[Checkpoint | None, list[str]]:
    """What `config.resume` says: a path, never, or auto (newest in `out`, else in the input)."""
    own, damaged = newest_valid(run_dir / "checkpoints")
    lines = [f"Passed over: {line}." for line in damaged]
    checkpoint: Checkpoint | None
    if config.resume == "auto":
        checkpoint = own
        if own is None and damaged:
            raise UserError(
                f"{run_dir}: every checkpoint is damaged ({damaged[-1]}); restore one, or move the "
                "folder away to start again"
            )
        if own is None:
            checkpoint, lines = _find_input_checkpoint(config, manifest)
    elif own is not None or damaged:
        raise UserError(
            f"out {str(run_dir)!r} already holds checkpoints: with --resume {config.resume} choose "
            "another --out, or move that folder away"
        )
    else:
        checkpoint = None if config.resume == "never" else open_checkpoint(config.resume)
    if checkpoint is not None:
        _refuse_another_run(checkpoint, config, manifest)
        lines.append(f"Resuming from {checkpoint.folder} at step {checkpoint.step}.")
    return checkpoint, lines


def _find_input_checkpoint(
    config: TrainConfig, manifest: Manifest
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of this run under the read-only input folder, where outputs mount."""
    if not env.input_dir().is_dir():
        return None, []
    checkpoints, lines = valid_checkpoints(env.input_dir())
    for checkpoint in checkpoints:
        try:
            _refuse_another_run(checkpoint, config, manifest)
        except UserError as error:
            lines.append(f"Not resuming: {error}.")
        else:
            return checkpoint, lines
    return None, lines


def _refuse_another_run(checkpoint: Checkpoint, config: TrainConfig, manifest: Manifest) -> None:
    """Raise if a checkpoint is of another run, naming what differs and both values."""
    if str(checkpoint.state.get("data", {}).get("source")).startswith("imported: "):
        raise UserError(
            f"{checkpoint.folder} holds imported weights, no run to go on with: to begin with "
            "them, name that folder with --init-from and give another --out"
        )
    differing = [
        f"{name} is {now} now and {then} there"
        for name, now, then in _compare(checkpoint, config, manifest)
        if now != then
    ]
    if differing:
        raise UserError(
            f"cannot resume from {checkpoint.folder}: {'; '.join(differing)}; use the same "
            "settings, or another --out, or --resume never"
        )


def _compare(
    checkpoint: Checkpoint, config: TrainConfig, manifest: Manifest
) -> Iterator[tuple[str, Any, Any]]:
    """(name, value now, value in the checkpoint) of all that a run must keep."""
    state = checkpoint.state
    try:
        saved = TrainConfig.from_dict(state["config"])
        tokenizer, data = _label(state["tokenizer"]), state["data"]
        there = f"{data['source']} (sha256 {data['identity'][:8]}, {data['num_tokens']} tokens)"
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"{checkpoint.folder}: its state.json is not of a run ({error})") from error
    yield "tokenizer", _label(manifest.tokenizer), tokenizer
    for f in fields(config.model):
        if f.name not in _FREE_MODEL_FIELDS:
            yield f.name, getattr(config.model, f.name), getattr(saved.model, f.name)
    for name in FIXED:
        yield name, getattr(config, name), getattr(saved, name)
    num_tokens = manifest.num_tokens("train")
    here = f"{manifest.source} (sha256 {manifest.identity[:8]}, {num_tokens} tokens)"
    yield "data", here, there


def _label(tokenizer: dict[str, Any]) -> str:
    return (
        f"{tokenizer['kind']} of {tokenizer['vocab_size']} ids (sha256 {tokenizer['sha256'][:8]})"
    )
