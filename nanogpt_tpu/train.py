"""The training loop.

    result = train(preset("demo", data="data", out="run"))

A run is a row of optimizer steps; each is a function of (seed, step) and of the state before it, so
a run that stops and resumes gives the same weights as one that does not. The device is read on log
steps, evaluations and saves only.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from nanogpt_tpu.checkpoint import (
    MODEL,
    OPTIMIZER,
    Checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from nanogpt_tpu.config import TrainConfig, preset
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.evaluate import Evaluator
from nanogpt_tpu.metrics import MetricsLog
from nanogpt_tpu.model import GPT
from nanogpt_tpu.optim import learning_rate
from nanogpt_tpu.resume import carry_history, find_resume
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.shards import Manifest, ShardLoader
from nanogpt_tpu.step import TrainStep
from nanogpt_tpu.stopping import Stopper
from nanogpt_tpu.tokenizer import load_tokenizer

OnLog = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainResult:
    """What a session came to."""

    model: nn.Module
    step: int
    """Optimizer steps finished, in all sessions."""
    val_loss: float | None
    """The last one measured."""
    run_dir: Path
    stopped_because: str
    """done, session, step, signal or nan."""


def train(
    config: TrainConfig, model: nn.Module | None = None, on_log: OnLog | None = None
) -> TrainResult:
    """Train until done or until this session must end; save; return.

    Args:
        config: the run; `data` and `out` must be set.
        model: any module with forward(idx, targets) -> (logits, loss); a GPT of `config.model`
            unless given.
        on_log: called with every line written to metrics.jsonl, to draw while training.

    Raises:
        UserError: anything wrong with settings, data, device or checkpoint, before a file is
            written; or a full disk later.
    """
    session = _Session(config, model, on_log)
    if session.step >= config.num_steps:
        session.say(f"Already finished: step {session.step} of {config.num_steps}.")
        return session.result("done")
    with Stopper(config.stop_after_step, config.session_hours) as stopper, session:
        reason = None
        while reason is None:
            session.run_step()
            reason = stopper.reason(session.step, session.reserve_s)
            if session.step >= config.num_steps:
                reason = "done"
            if session.is_time_to_save() or reason is not None:
                session.save()
            if session.is_nan:
                reason = "nan"
    return session.result(reason)


class _Session:
    """One process's part of a run: everything opened and checked, then stepped, logged, saved."""

    def __init__(self, config: TrainConfig, model: nn.Module | None, on_log: OnLog | None) -> None:
        self._on_log = on_log
        self._run_dir, data = _folders(config)
        self._manifest = Manifest.load(data)
        self._tokenizer = load_tokenizer(data)
        self.config = config = _follow_data(config, self._manifest)
        self._runtime = Runtime(config.device, config.precision)
        self._plan = config.plan(self._runtime.num_devices)
        self._loader = ShardLoader(
            data, "train", config.context, self._plan.sequences_per_step, config.seed
        )
        self._evaluator = self._make_evaluator(data)
        checkpoint, lines = find_resume(config, self._manifest)
        torch.manual_seed(config.seed)
        self._model = model or GPT(config.model)
        if checkpoint is not None:
            _load_weights(self._model, checkpoint)
        self._train_step = TrainStep(self._model, config, self._plan, self._runtime)
        self.step, self._val_loss = 0, None
        self._resumed_from = checkpoint
        if checkpoint is not None:
            names = self._train_step.parameter_names()
            restore_optimizer(self._train_step.optimizer, names, checkpoint.load(OPTIMIZER))
            self.step, self._val_loss = checkpoint.step, checkpoint.state["val_loss"]
        self.is_nan = False
        for line in [*self._describe(), *lines]:
            self.say(line)

    def _make_evaluator(self, data: Path) -> Evaluator | None:
        if self.config.eval_every is None:
            return None
        if self._manifest.num_tokens("val") <= self.config.context:
            self.say(f"No evaluation: {data} has no val split of a whole sequence.")
            return None
        rows = self._plan.sequences_per_micro_step
        return Evaluator(data, "val", self.config.context, rows, self.config.eval_tokens)

    def _describe(self) -> list[str]:
        """What this run is, for people, before it starts."""
        config, plan = self.config, self._plan
        num_params = sum(param.numel() for param in self._model.parameters())
        if isinstance(self._model, GPT):
            num_params = self._model.num_params()
        train_tokens = self._manifest.num_tokens("train")
        total_tokens = config.num_steps * plan.tokens_per_step
        return [
            f"Device: {self._runtime.describe()}",
            f"Model: {num_params:,} parameters ({config.preset}), context {config.context}",
            f"Data: {train_tokens:,} training tokens, {total_tokens / train_tokens:.2g} epoch(s)",
            f"Step: {plan.tokens_per_step:,} tokens = {plan.micro_batch_size} sequences x "
            f"{plan.seq_len} x {plan.num_devices} device(s) x {plan.num_micro_steps} micro step(s)"
            f"; {config.num_steps:,} steps",
        ]

    def say(self, line: str) -> None:
        """Tell the user something, once over all processes, above any progress bar."""
        if self._runtime.is_main:
            tqdm.write(line)

    def __enter__(self) -> "_Session":
        """Start writing: the run folder, its config, tokenizer and log."""
        if self._runtime.is_main:
            _open_run_dir(self._run_dir)
            config_text = json.dumps(self.config.to_dict(), indent=1)
            (self._run_dir / "config.json").write_text(config_text + "\n", "utf-8")
            self._tokenizer.save(self._run_dir)
            if self._resumed_from is not None:
                carry_history(self._resumed_from, self._run_dir)
            self._log: MetricsLog | None = MetricsLog(self._run_dir, self.step)
        else:
            self._log = None
        self._progress = tqdm(
            total=self.config.num_steps,
            initial=self.step,
            desc="compiling" if self._runtime.is_xla else "training",
            unit="step",
            disable=not self._runtime.is_main,
        )
        self._saved_s = self._logged_s = time.monotonic()
        self._logged_step, self._paused_s, self.reserve_s = self.step, 0.0, 0.0
        if self.step == 0:
            self._evaluate()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        if self._log is not None:
            self._log.close()

    def run_step(self) -> None:
        """Do the next optimizer step; log and evaluate when it is time."""
        idx, targets = self._loader(self.step)
        self.step += 1
        self._train_step.run(self.step, idx, targets)
        if self._progress.desc != "training: ":
            self._progress.set_description("training", refresh=False)
        self._progress.update()
        is_last = self.step in (self.config.num_steps, self.config.stop_after_step)
        if self.step % self.config.log_every == 0 or is_last:
            self._log_step()
        every = self.config.eval_every
        if every and not self.is_nan and (self.step % every == 0 or is_last):
            self._evaluate()

    def _log_step(self) -> None:
        """Read the device once; write and show what the last step came to."""
        step = self._train_step
        loss, grad_norm, bad_step = self._runtime.read(step.loss, step.grad_norm, step.bad_step)
        now_s = time.monotonic()
        seconds = now_s - self._logged_s - self._paused_s
        num_tokens = (self.step - self._logged_step) * self._plan.tokens_per_step
        self._write(
            loss=loss,
            lr=learning_rate(self.config, self.step),
            grad_norm=grad_norm,
            tokens_per_s=num_tokens / max(seconds, 1e-9),
        )
        self._progress.set_postfix_str(
            f"loss {loss:.3f}, {num_tokens / max(seconds, 1e-9):,.0f} tokens/s"
        )
        self.reserve_s = 2 * seconds / max(1, self.step - self._logged_step)
        self._logged_s, self._logged_step, self._paused_s = now_s, self.step, 0.0
        self.is_nan = bad_step > 0
        if self.is_nan:
            self.say(
                f"Stopped: loss or gradient of step {bad_step:.0f} was not finite "
                f"(loss {loss}, gradient norm {grad_norm}). Nothing was saved after it; the last "
                "checkpoint is good. Try a lower learning_rate, a longer warmup, or qk_norm."
            )

    def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        start_s = time.monotonic()
        self._val_loss = self._evaluator.loss(self._train_step.model, self._runtime)
        seconds = time.monotonic() - start_s
        self._paused_s += seconds
        self._write(
            val_loss=self._val_loss,
            bits_per_byte=self._val_loss / math.log(2) * self._evaluator.tokens_per_byte,
            eval_s=seconds,
        )
        self.say(f"step {self.step:>6}: validation loss {self._val_loss:.4f}")

    def _write(self, **values: float) -> None:
        """One line of metrics, also to the callback."""
        if self._log is None:
            return
        tokens = self.step * self._plan.tokens_per_step
        line = self._log.write(step=self.step, tokens=tokens, **values, time=time.time())
        if self._on_log is not None:
            self._on_log(line)

    def is_time_to_save(self) -> bool:
        """Whether a checkpoint is due by step or by clock."""
        minutes, every = self.config.checkpoint_minutes, self.config.checkpoint_every
        by_clock = minutes is not None and time.monotonic() - self._saved_s > minutes * 60
        return by_clock or (every is not None and self.step % every == 0)

    def save(self) -> None:
        """Write a checkpoint of this step, unless a step since the last log was not finite."""
        if self._logged_step != self.step:
            self._log_step()
            if self.is_nan:
                return
        start_s = time.monotonic()
        runtime, step = self._runtime, self._train_step
        model = runtime.state_to_host(runtime.unwrap(step.model).state_dict())
        tensors = optimizer_tensors(step.optimizer, step.parameter_names())
        optimizer = runtime.state_to_host(tensors)
        if runtime.is_main:
            save_checkpoint(
                self._run_dir, self._state(), model, optimizer, self._tokenizer,
                self.config.keep_last,
            )  # fmt: skip
        self._saved_s = time.monotonic()
        self._paused_s += self._saved_s - start_s

    def _state(self) -> dict[str, Any]:
        """All that a resume needs besides tensors."""
        return {
            "step": self.step,
            "tokens": self.step * self._plan.tokens_per_step,
            "val_loss": self._val_loss,
            "config": self.config.to_dict(),
            "model_class": type(self._model).__qualname__,
            "tokenizer": self._tokenizer.describe(),
            "data": {
                "identity": self._manifest.identity,
                "source": self._manifest.source,
                "folder": self.config.data,
            },
            "versions": _versions(),
        }

    def result(self, reason: str) -> TrainResult:
        """What the caller gets."""
        model = self._runtime.unwrap(self._train_step.model)
        return TrainResult(model, self.step, self._val_loss, self._run_dir, reason)


def _folders(config: TrainConfig) -> tuple[Path, Path]:
    """Run folder and data folder; refused when missing or when the run folder is not writable."""
    for name in ("data", "out"):
        if not getattr(config, name):
            raise UserError(f"{name} is not set: say the folder, as in --{name} DIR")
    assert config.data is not None and config.out is not None
    run_dir = Path(config.out)
    ancestor = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise UserError(f"out {config.out!r}: {ancestor} is not a writable folder; choose another")
    return run_dir, Path(config.data)


def _follow_data(config: TrainConfig, manifest: Manifest) -> TrainConfig:
    """Give the model the vocabulary of the data's tokenizer.

    Raises:
        UserError: another vocab_size was asked for than the preset's own.
    """
    vocab_size = manifest.tokenizer["vocab_size"]
    if config.model.vocab_size == vocab_size:
        return config
    if config.model.vocab_size != preset(config.preset).model.vocab_size:
        raise UserError(
            f"vocab_size {config.model.vocab_size} differs from the {vocab_size} ids of the "
            f"tokenizer of {config.data!r}: leave vocab_size out, it follows the data"
        )
    return config.replace(vocab_size=vocab_size)


def _load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    try:
        model.load_state_dict(checkpoint.load(MODEL))
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise UserError(f"{checkpoint.folder}: weights do not fit the model: {first}") from error


def _open_run_dir(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"out {str(run_dir)!r} cannot be written ({error.strerror})") from error


def _versions() -> dict[str, str | None]:
    """Versions of what computed these weights."""
    found: dict[str, str | None] = {}
    for name in ("nanogpt-tpu", "torch", "torch_xla", "accelerate", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
