"""The training loop.

    result = train(preset("demo", data="data", out="run"))

Each optimizer step is a function of (seed, step) and of the state before it, so a run that stops
and resumes gives the same weights as one that does not. The device is read on log steps only.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from nanogpt_tpu import env
from nanogpt_tpu.checkpoint import (
    OPTIMIZER,
    load_weights,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from nanogpt_tpu.config import TrainConfig
from nanogpt_tpu.evaluate import Evaluator
from nanogpt_tpu.metrics import MetricsLog
from nanogpt_tpu.model import GPT, num_params
from nanogpt_tpu.optim import learning_rate
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.sample import generate
from nanogpt_tpu.shards import ShardLoader
from nanogpt_tpu.start import Start, find_start
from nanogpt_tpu.step import TrainStep
from nanogpt_tpu.stopping import Stopper

PROMPT_TOKENS = 8
OnLog = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainResult:
    """What a session came to."""

    model: nn.Module
    step: int  # optimizer steps finished, in all sessions
    val_loss: float | None  # the last one measured
    run_dir: Path
    stopped_because: str  # done, session, step, signal or nan


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
    if isinstance(model, GPT):
        config = config.replace(model=model.config)
    start = find_start(config)
    session = _Session(start, model, on_log)
    last_step = min(config.num_steps, config.stop_after_step or config.num_steps)
    if session.step >= last_step:
        session.say(f"Already finished: step {session.step} of {last_step}.")
        start.adopt()
        return session.result("done" if session.step >= config.num_steps else "step")
    with Stopper(config.stop_after_step, config.session_hours) as stopper, session:
        reason = None
        while reason is None:
            session.run_step()
            reason, is_save_due = session.decide(stopper)
            if is_save_due:
                session.save()
            if session.is_nan:
                reason = "nan"
    return session.result(reason)


class _Session:
    """One process's part of a run: all opened and checked here, written to only in its `with`."""

    def __init__(self, start: Start, model: nn.Module | None, on_log: OnLog | None) -> None:
        self._start, self._on_log = start, on_log
        self._config = config = start.config
        self._runtime = Runtime(config.device, config.precision)
        self._plan = config.plan(self._runtime.num_devices)
        size, packing = (config.context, self._plan.sequences_per_step), config.packing
        self._loader = ShardLoader(start.data_dir, "train", *size, config.seed, packing=packing)
        self._evaluator = self._make_evaluator()
        torch.manual_seed(config.seed)
        self._model = GPT(config.model) if model is None else model
        if isinstance(self._model, GPT):
            self._model.tokenizer_sha256 = start.tokenizer.sha256
        if (weights := start.checkpoint or start.origin) is not None:
            load_weights(self._model, weights)
        self._train_step = TrainStep(self._model, config, self._plan, self._runtime)
        self.step, self._val_loss, self.is_nan = 0, None, False
        if (checkpoint := start.checkpoint) is not None:
            names = self._train_step.parameter_names()
            restore_optimizer(self._train_step.optimizer, names, checkpoint.load(OPTIMIZER))
            self.step, self._val_loss = checkpoint.step, checkpoint.state.get("val_loss")
        lines = start.describe(self._plan, num_params(self._model))
        for line in [*self._train_step.describe(), *lines, *start.lines]:
            self.say(line)

    def _make_evaluator(self) -> Evaluator | None:
        config, start = self._config, self._start
        if config.eval_every is None:
            return None
        if start.longest_val_tokens <= config.context:
            self.say(f"No evaluation: {start.data_dir} has no val shard of a whole sequence.")
            return None
        rows = self._plan.sequences_per_micro_step
        return Evaluator(start.data_dir, "val", config.context, rows, config.eval_tokens)

    def say(self, line: str) -> None:
        """Tell the user something, once over all processes, above any progress bar."""
        if self._runtime.is_main:
            tqdm.write(line)

    def __enter__(self) -> "_Session":
        """Open the run folder, its log and the progress bar; evaluate a run that is new."""
        self._log = None
        if self._runtime.is_main:
            self._start.open_run_dir()
            self._log = MetricsLog(self._start.run_dir, self.step)
        self._progress = tqdm(
            total=self._config.num_steps,
            initial=self.step,
            desc="compiling" if self._runtime.is_xla else "training",
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file need not flicker
            disable=not self._runtime.is_main,
        )
        self._saved_s = self._logged_s = time.monotonic()
        self._logged_step, self._paused_s, self._step_s = self.step, 0.0, 0.0
        if self.step == 0:
            self._evaluate()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._runtime.uncheckpoint_blocks(self._model)
        if self._log is not None:
            self._log.close()

    def run_step(self) -> None:
        """Do the next optimizer step; log and evaluate when it is time."""
        idx, targets = self._loader(self.step)
        self.step += 1
        self._train_step.run(self.step, idx, targets)
        self._progress.update()
        config = self._config
        wants_eval, wants_samples = map(self._is_due, (config.eval_every, config.sample_every))
        if self._is_due(config.log_every) or wants_eval or wants_samples:
            self._log_step()
        if wants_eval and not self.is_nan:
            self._evaluate()
        if wants_samples and not self.is_nan:
            self._write_samples()

    def _is_due(self, every: int | None) -> bool:
        """Whether something done every so many steps, and at the planned end, is due."""
        is_last = self.step in (self._config.num_steps, self._config.stop_after_step)
        return every is not None and (self.step % every == 0 or is_last)

    def _log_step(self) -> None:
        """Read the device once; write and show what the last step came to."""
        values = self._train_step.measure()
        loss, bad_step = values["loss"], values.pop("bad_step")
        now_s, num_steps = time.monotonic(), self.step - self._logged_step
        self._step_s = max(1e-9, now_s - self._logged_s - self._paused_s) / num_steps
        self._logged_s, self._logged_step, self._paused_s = now_s, self.step, 0.0
        tokens_per_s = self._plan.tokens_per_step / self._step_s
        rate = learning_rate(self._config, self.step)
        self._write(**values, lr=rate, tokens_per_s=tokens_per_s)
        self._progress.set_description("training", refresh=False)
        self._progress.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s")
        self.is_nan = bad_step > 0
        if self.is_nan:
            self.say(
                f"Stopped: loss or gradient of step {bad_step:.0f} was not finite. Nothing was "
                "saved after it, the last checkpoint is good. Try a lower learning_rate, a longer "
                "warmup, or qk_norm."
            )

    def _evaluate(self) -> None:
        """Measure and write the validation loss."""
        if self._evaluator is None:
            return
        start_s = time.monotonic()
        self._val_loss = self._evaluator.loss(self._train_step.model, self._runtime)
        bits = self._val_loss / math.log(2) * self._evaluator.tokens_per_byte
        eval_s = time.monotonic() - start_s
        self._write(val_loss=self._val_loss, bits_per_byte=bits, eval_s=eval_s)
        self.say(f"step {self.step:>6}: validation loss {self._val_loss:.4f}")
        self._paused_s += eval_s

    def _write_samples(self) -> None:
        """What the model writes now, from nothing and from the start of the validation text."""
        model = self._runtime.unwrap(self._train_step.model)
        if not isinstance(model, GPT):
            return
        start_s, tokenizer = time.monotonic(), self._start.tokenizer
        texts = [
            {"prompt": prompt, "text": generate(model, tokenizer, prompt, runtime=self._runtime)}
            for prompt in self._prompts
        ]
        if self._log is not None:
            self._log.write_samples(self.step, self._tokens, texts)
        self._paused_s += time.monotonic() - start_s

    @cached_property
    def _prompts(self) -> list[str]:
        if self._evaluator is None:
            return [""]
        idx, _, _ = self._evaluator.batch(0)
        return ["", self._start.tokenizer.decode(idx[0, :PROMPT_TOKENS].tolist())]

    @property
    def _tokens(self) -> int:
        return self.step * self._plan.tokens_per_step

    def _write(self, **values: float) -> None:
        """One line of metrics, also to the callback."""
        if self._log is not None:
            line = self._log.write(step=self.step, tokens=self._tokens, **values, time=time.time())
            try:
                if self._on_log is not None:
                    self._on_log(line)
            except Exception as error:  # whatever a drawing does, a night's training goes on
                self.say(f"on_log failed and is called no more: {type(error).__name__}: {error}")
                self._on_log = None

    def decide(self, stopper: Stopper) -> tuple[str | None, bool]:
        """Why to stop now, if at all, and whether to save: the same in every process."""
        config = self._config
        is_done = self.step >= config.num_steps
        reason = "done" if is_done else stopper.reason(self.step, reserve_s=2 * self._step_s)
        minutes = config.checkpoint_minutes
        by_clock = minutes is not None and time.monotonic() - self._saved_s > minutes * 60
        is_save_due = reason is not None or by_clock or self._is_due(config.checkpoint_every)
        return self._runtime.agree((reason, is_save_due))

    def save(self) -> None:
        """Write a checkpoint of this step, unless a step since the last log was not finite."""
        if self._logged_step != self.step:
            self._log_step()
        if self.is_nan:
            return
        start_s = time.monotonic()
        runtime, step = self._runtime, self._train_step
        model = runtime.to_host(runtime.unwrap(step.model).state_dict())
        moments = runtime.to_host(optimizer_tensors(step.optimizer, step.parameter_names()))
        if runtime.is_main:
            run_dir, tokenizer = self._start.run_dir, self._start.tokenizer
            keep_last = self._config.keep_last
            save_checkpoint(run_dir, self._state(), model, moments, tokenizer, keep_last)
        self._saved_s = time.monotonic()
        self._paused_s += self._saved_s - start_s

    def _state(self) -> dict[str, Any]:
        """All that a resume needs besides tensors, and what a reader of the folder asks."""
        manifest = self._start.manifest
        return {
            "step": self.step,
            "tokens": self._tokens,
            "val_loss": self._val_loss,
            "config": self._config.to_dict(),
            "model_class": type(self._model).__qualname__,
            "num_params": num_params(self._model),
            "git_commit": env.git_commit(),
            "tokenizer": self._start.tokenizer.describe(),
            "data": {
                "identity": manifest.identity,
                "source": manifest.source,
                "num_tokens": manifest.num_tokens("train"),
            },
        }

    def result(self, reason: str) -> TrainResult:
        """What the caller gets."""
        model = self._runtime.unwrap(self._train_step.model)
        return TrainResult(model, self.step, self._val_loss, self._start.run_dir, reason)
