"""The optimizer and its learning rate.

Weight decay goes to matrices only; biases, gains and other vectors are left alone.
"""

import math
from typing import Any

import torch
from torch import nn

from nanogpt_tpu.config import TrainConfig


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: parameters of two dimensions and more with weight decay, the others without."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) on the model's device.

    XLA: the step count and the learning rate are tensors (`capturable`). As Python numbers they
    would be constants of the program, and new programs appear when a bias correction becomes
    exactly 1 (steps near 325 and 709) and when the rate reaches 0.
    """
    device = next(model.parameters()).device
    on_xla = device.type == "xla"
    optimizer = torch.optim.AdamW(
        param_groups(model, config.weight_decay),
        lr=torch.tensor(config.learning_rate, device=device) if on_xla else config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=1e-8,
        capturable=on_xla,
        fused=device.type in ("cpu", "cuda"),
    )
    for group in optimizer.param_groups:
        for param in group["params"]:  # from the start, so that step 1 is the program of step 2
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | torch.Tensor) -> None:
    """Give every group the rate: a number, or on XLA a scalar tensor on the device."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1.

    Rises linearly to learning_rate at step warmup_steps, then falls to min_lr_ratio of it at
    num_steps along half a cosine (Loshchilov and Hutter 2017) or a line, or stays.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, config.num_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    fall = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    low = config.min_lr_ratio
    return config.learning_rate * (low + (1 - low) * fall)
