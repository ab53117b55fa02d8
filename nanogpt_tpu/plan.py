"""What a run will cost, before it starts: tokens, epochs, hours, sessions, weeks of quota.

print(plan(preset("gpt2", data="data"), tokens_per_s=400_000))
"""

from dataclasses import dataclass

import torch

from nanogpt_tpu.config import TrainConfig
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.model import GPT

SESSION_HOURS, QUOTA_HOURS_PER_WEEK = 9.0, 20.0  # Kaggle's limits for a TPU v5e-8 in 2026
CHINCHILLA = 20  # training tokens per parameter that spend compute best (Hoffmann et al. 2022)


@dataclass(frozen=True)
class Plan:
    """The size of a run, and its time at a given speed. `str(plan)` is a table for people."""

    num_params: int
    num_tokens: int
    tokens_per_step: int
    epochs: float | None
    """How often the training data is read; None without data."""
    hours: float | None
    """At the speed given; None without one."""

    def __str__(self) -> str:
        per_param = self.num_tokens / self.num_params
        rows = [
            ("parameters", f"{self.num_params:,}"),
            ("tokens", f"{self.num_tokens:,} in steps of {self.tokens_per_step:,}"),
            ("tokens per parameter", f"{per_param:.3g} (compute is spent best near {CHINCHILLA})"),
        ]
        if self.epochs is not None:
            rows.append(("epochs over the data", f"{self.epochs:.2g}"))
        if self.hours is not None:
            sessions = -(-self.hours // SESSION_HOURS)
            weeks = self.hours / QUOTA_HOURS_PER_WEEK
            rows.append(("hours", f"{self.hours:.2f}"))
            rows.append(
                (
                    "on Kaggle",
                    f"{sessions:.0f} session(s) of at most {SESSION_HOURS:.0f} h, "
                    f"{weeks:.0%} of a week's {QUOTA_HOURS_PER_WEEK:.0f} h",
                )
            )
        return "\n".join(f"{name:<22}{value}" for name, value in rows)


def plan(config: TrainConfig, tokens_per_s: float | None = None) -> Plan:
    """The plan of a run; builds the model's shape without its memory.

    Args:
        config: the run; `data` may be left out.
        tokens_per_s: a speed measured or published for this preset and device.

    Raises:
        UserError: `data` is set and holds no data.
    """
    manifest = Manifest.load(config.data) if config.data else None
    if manifest is not None:
        config = config.replace(vocab_size=manifest.tokenizer["vocab_size"])
    with torch.device("meta"):
        num_params = GPT(config.model).num_params()
    num_tokens = config.num_steps * config.tokens_per_step
    return Plan(
        num_params=num_params,
        num_tokens=num_tokens,
        tokens_per_step=config.tokens_per_step,
        epochs=num_tokens / manifest.num_tokens("train") if manifest else None,
        hours=num_tokens / tokens_per_s / 3600 if tokens_per_s else None,
    )
