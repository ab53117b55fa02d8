"""What a run's log says is wrong, each in one line with its numbers and what to do.

    find_problems(history, config, epochs=1.5)  ->  ["Validation perplexity is 1.9 times ...", ...]

Looks at numbers only; report.py shows the lines.
"""

import math
from typing import Any

import numpy as np

from nanogpt_tpu.metrics import History

OVERFIT_RATIO = 1.5  # validation perplexity over training perplexity
_WINDOW = 10  # log lines averaged: the loss of one batch is noisy


def find_problems(history: History, config: dict[str, Any], epochs: float | None) -> list[str]:
    """Every warning that the log of a run gives cause for, the gravest first.

    Args:
        history: the log.
        config: config.json; {} if it is not there.
        epochs: how often the training text was seen; None if not known.
    """
    found = (
        _non_finite(history),
        _no_progress(history),
        _overfitting(history, epochs),
        _clipping(history, config),
        _slowdown(history),
        _too_short(history),
    )
    return [line for line in found if line is not None]


def _non_finite(history: History) -> str | None:
    bad = history.non_finite
    if not bad:
        return None
    step, key = bad[0]
    return (
        f"{len(bad)} logged value{'s are' if len(bad) > 1 else ' is'} not finite, the first "
        f"{key} at step {step:,}: gaps in the curves. Go on from the last checkpoint with a lower "
        "learning_rate, or start again with a longer warmup or with qk_norm."
    )


def _no_progress(history: History) -> str | None:
    losses = _finite(history.training["loss"])
    if losses.size < 4:
        return None
    size = min(_WINDOW, losses.size // 2)
    first, last = losses[:size].mean(), losses[-size:].mean()
    if last < first:
        return None
    return (
        f"The training loss is not lower than at the start ({first:.3g}, now {last:.3g}): nothing "
        "is learned. Check the data (nanogpt-tpu inspect) and try another learning_rate."
    )


def _overfitting(history: History, epochs: float | None) -> str | None:
    evaluations, training = history.evaluations, history.training
    is_finite = np.isfinite(evaluations["val_loss"])
    if not is_finite.any():
        return None
    step, val_loss = (evaluations[key][is_finite][-1] for key in ("step", "val_loss"))
    losses = _finite(training["loss"][training["step"] <= step])[-_WINDOW:]
    if not losses.size or val_loss - losses.mean() <= math.log(OVERFIT_RATIO):
        return None
    ratio = math.exp(min(val_loss - losses.mean(), 20))
    if epochs is not None and epochs <= 1:
        why = "no text was seen twice, so the validation text is of another kind: look at the split"
    else:
        seen = "" if epochs is None else f" after {epochs:.2g} epochs"
        why = f"overfitting{seen}: more text helps most, else fewer steps, or dropout"
    return f"Validation perplexity is {ratio:.2g} times the training perplexity, {why}."


def _clipping(history: History, config: dict[str, Any]) -> str | None:
    clip, warmup_steps = config.get("grad_clip"), config.get("warmup_steps", 0)
    if not isinstance(clip, int | float) or not isinstance(warmup_steps, int | float):
        return None
    is_later = history.training["step"] > warmup_steps  # before, large gradients are the rule
    norms = _finite(history.training["grad_norm"][is_later])
    norms = norms[-max(_WINDOW, norms.size // 5) :]
    if norms.size < 4:
        return None
    share = float(np.mean(norms > clip))
    if share <= 0.5:
        return None
    return (
        f"The gradient was clipped (norm above {clip:g}) on {share:.0%} of the last logged steps: "
        "the clip sets the pace; try a lower learning_rate or a higher grad_clip."
    )


def _slowdown(history: History) -> str | None:
    rates = _finite(history.training["tokens_per_s"])
    tail = max(3, rates.size // 10)
    if rates.size < 2 * tail:
        return None
    before, now = np.median(rates[:-tail]), np.median(rates[-tail:])
    if now >= before / 2:
        return None
    return (
        f"Speed fell from {before:,.0f} to {now:,.0f} tokens/s: another device, a busy machine, or "
        "programs compiled again and again."
    )


def _too_short(history: History) -> str | None:
    num_lines = history.training["step"].size
    if num_lines > 1:
        return None
    have = "Only one step is" if num_lines else "No training step is"
    return f"{have} logged: there are no curves yet; train on, or log more often (log_every)."


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]
