"""What the log of a run says is wrong, each in one line with its numbers and what to do."""

import math
from typing import Any

import numpy as np

from nanogpt_tpu.metrics import Table, finite

_WINDOW = 10  # log lines taken together: the loss of one batch is noisy


def find_problems(table: Table, config: dict[str, Any]) -> list[str]:
    """Every warning that a run gives cause for, the gravest first; config.json may be {}."""
    found = []
    if table["is_bad"].any():
        step = table["step"][table["is_bad"]][0]
        found.append(
            f"Loss or gradient is not finite, first at step {step:,.0f}. Unchanged it will happen "
            "again: go on with a lower --learning-rate, or start anew with more warmup or qk_norm."
        )
    losses, rates = finite(table["loss"]), finite(table["tokens_per_s"])
    few = min(_WINDOW, losses.size // 2)
    if losses.size < 2:
        found.append("Fewer than two steps are logged, too few for a curve: train on.")
    elif few > 1 and (now := losses[-few:].mean()) >= (start := losses[:few].mean()):
        found.append(
            f"The loss is not lower than at the start ({start:.3g}, now {now:.3g}): nothing is "
            "learned. Check the data (nanogpt-tpu inspect) and try another learning_rate."
        )
    ratio = _perplexity_ratio(table)
    if ratio > 1.5:
        found.append(
            f"Validation perplexity is {ratio:.2g} times the training perplexity: overfitting if "
            "the text was seen more than once (more text helps, or fewer steps, or dropout), else "
            "the validation text is of another kind."
        )
    clip = number(config, "grad_clip", math.inf)
    is_late = table["step"] > number(config, "warmup_steps", 0)  # large norms are the rule before
    norms = finite(table["grad_norm"][is_late])[-_WINDOW:]
    if norms.size > 3 and (share := np.mean(norms > clip)) > 0.5:
        found.append(
            f"The gradient was clipped (norm above {clip:g}) on {share:.0%} of the last logged "
            "steps, the clip sets the pace: try a lower learning_rate or a higher grad_clip."
        )
    few = min(_WINDOW, rates.size // 2)
    if few > 1 and (now := np.median(rates[-few:])) < (before := np.median(rates[:-few])) / 2:
        found.append(
            f"Speed fell from {before:,.0f} to {now:,.0f} tokens/s: another device, a busy "
            "machine, or programs compiled again and again."
        )
    return found


def _perplexity_ratio(table: Table) -> float:
    """Validation over training perplexity at the last evaluation; 1 if there is none."""
    for at in np.flatnonzero(np.isfinite(table["val_loss"]))[-1:]:
        losses = finite(table["loss"][:at])[-_WINDOW:]
        if losses.size:
            return math.exp(min(table["val_loss"][at] - losses.mean(), 20))
    return 1.0


def number(config: dict[str, Any], name: str, default: float) -> float:
    """A number among the settings; the default if it is off, or not there."""
    value = config.get(name)
    return value if isinstance(value, int | float) else default
