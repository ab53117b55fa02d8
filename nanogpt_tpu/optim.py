"""The optimizers and their learning rate.

AdamW everywhere, or Muon for the matrices inside blocks and AdamW for embeddings, head and vectors.
Weight decay goes to matrices only. State and learning rate are tensors where XLA needs them to be.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanogpt_tpu.config import TrainConfig
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.spmd import lay_out

MUON_MOMENTUM = (0.85, 0.95, 300)  # from, to, over so many steps (modded-nanogpt)
WSD_DECAY_SHARE = 0.4  # of the steps; the rest after warmup is constant
# Each row is one Newton-Schulz step a X + b X X' X + c (X X')^2 X; five of them carry singular
# values from [0.001, 1] to about 1 (Amsel et al. 2025, "The Polar Express", made safe for bf16).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: parameters of two dimensions and more with weight decay, the others without."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module, config: TrainConfig, mesh: Any = None
) -> torch.optim.Optimizer:
    """The optimizer of a config, for a model on its device; Muon's work is split over a mesh.

    XLA: step count and learning rate are tensors (`capturable`). As Python numbers they would be
    constants of the program, and new programs appear when a bias correction becomes exactly 1
    (steps near 325 and 709) and when the rate reaches 0.

    Raises:
        UserError: muon for a model that has no matrices in blocks named h.
    """
    if not any(param.requires_grad for param in model.parameters()):
        raise UserError("the model has no parameter to train: set requires_grad on some")
    device = next(model.parameters()).device
    on_xla = device.type == "xla"
    settings: dict[str, Any] = {
        "lr": torch.tensor(config.learning_rate, device=device) if on_xla else config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": 1e-8,
        "capturable": on_xla,
        "fused": device.type in ("cpu", "cuda"),
    }
    groups = param_groups(model, config.weight_decay)
    optimizer: torch.optim.Optimizer
    if config.optimizer == "muon":
        groups, muon_group = _split_hidden(model, groups, config.weight_decay)
        optimizer = Muon(muon_group, torch.optim.AdamW(groups, **settings), mesh)
    else:
        optimizer = torch.optim.AdamW(groups, **settings)
    for group in optimizer.param_groups:
        for param in group["params"]:  # from the start, so that step 1 is the program of step 2
            optimizer.state[param] = _fresh_state(param, is_muon="num_parts" in group)
    return optimizer


def _fresh_state(param: torch.Tensor, is_muon: bool) -> dict[str, torch.Tensor]:
    if is_muon:
        return {"momentum": torch.zeros_like(param)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


def _split_hidden(
    model: nn.Module, groups: list[dict[str, Any]], weight_decay: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """AdamW's groups without the matrices inside blocks, and Muon's group with them."""
    hidden = {p: n for n, p in model.named_parameters() if ".h." in f".{n}" and p.dim() == 2}
    if not hidden:
        raise UserError("muon trains the matrices in blocks named 'h', this model has none")
    for group in groups:
        group["params"] = [param for param in group["params"] if param not in hidden]
    # Queries, keys and values are three matrices in one parameter.
    num_parts = [3 if name.endswith("c_attn.weight") else 1 for name in hidden.values()]
    muon_group = {"params": list(hidden), "weight_decay": weight_decay, "num_parts": num_parts}
    return [group for group in groups if group["params"]], muon_group


class Muon(torch.optim.Optimizer):
    """Hidden matrices step by their orthogonalized momentum, all the rest by AdamW.

    Momentum is Nesterov's (Jordan et al. 2024). The step is scaled to the size of AdamW's, so that
    one learning rate and one weight decay serve both (Liu et al. 2025, "Muon is scalable").
    """

    def __init__(self, group: dict[str, Any], adamw: torch.optim.AdamW, mesh: Any = None) -> None:
        super().__init__([*adamw.param_groups, group], {"lr": adamw.defaults["lr"]})
        self._adamw, self._mesh = adamw, mesh
        self.momentum: float | torch.Tensor = MUON_MOMENTUM[0]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every group."""
        *rest, group = self.param_groups  # anew each time: load_state_dict replaces them
        self._adamw.param_groups, self._adamw.state = rest, self.state
        self._adamw.step(closure)
        self._step_muon(group)

    def _step_muon(self, group: dict[str, Any]) -> None:
        """Update a group's matrices; those of one shape share one batched product."""
        stacks: dict[torch.Size, list[torch.Tensor]] = {}
        for param, num_parts in zip(group["params"], group["num_parts"], strict=True):
            momentum = self.state[param]["momentum"].lerp_(param.grad, 1 - self.momentum)
            nesterov = param.grad.lerp(momentum, self.momentum)
            for part in map(_wide, nesterov.chunk(num_parts)):
                stacks.setdefault(part.shape, []).append(part)
        steps = {shape: iter(self._orthogonalize(torch.stack(s))) for shape, s in stacks.items()}
        for param, num_parts in zip(group["params"], group["num_parts"], strict=True):
            parts = param.chunk(num_parts)
            shape = _wide(parts[0]).shape
            is_tall = parts[0].shape != shape
            step = torch.cat(
                [next(steps[shape]).mT if is_tall else next(steps[shape]) for _ in parts]
            )
            size = 0.2 * math.sqrt(max(shape))
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step * (group["lr"] * size))

    def _orthogonalize(self, stack: torch.Tensor) -> torch.Tensor:
        """`orthogonalize`, each device of the mesh doing its share of the matrices."""
        if self._mesh is None:
            return orthogonalize(stack)
        # XLA: whole first, or the compiler makes each device's share by passing matrices around.
        stack = lay_out(stack.bfloat16(), self._mesh, None)
        steps = orthogonalize(lay_out(stack, self._mesh, "data"))
        return lay_out(steps, self._mesh, None)  # gathered in bf16


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix or its transpose, whichever has no more rows than columns."""
    return matrix if matrix.size(0) <= matrix.size(1) else matrix.mT


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Replace singular values by about 1 (Newton-Schulz with Polar Express coefficients).

    Takes (n, rows, columns) with rows <= columns, any float dtype. The products run, and the result
    is, in bf16 on accelerators, where the method was made to, and in fp32 on the CPU.
    """
    x = matrices.float()
    # In fp32: a sum of squares in bf16 comes out too small, and the iteration then diverges (seen).
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    x = x if x.device.type == "cpu" else x.bfloat16()
    for a, b, c in POLAR_EXPRESS:
        square = x @ x.mT  # (n, rows, rows)
        x = a * x + (b * square + c * square @ square) @ x
    return x


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1.

    Rises linearly to learning_rate at step warmup_steps, then: cosine and linear fall to
    min_lr_ratio of it at num_steps (Loshchilov and Hutter 2017); wsd stays and falls linearly over
    the last 40 % of the steps (Hu et al. 2024); constant stays.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, round(config.num_steps * (1 - WSD_DECAY_SHARE)))
    done = min(1.0, max(0, step - start) / max(1, config.num_steps - start))
    fall = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    low = config.min_lr_ratio
    return config.learning_rate * (low + (1 - low) * fall)


def set_step(
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    step: int,
    place: Callable[[float], float | torch.Tensor],
) -> None:
    """Give the optimizer what depends on the step: learning rate, and Muon's momentum.

    `place` brings a number to where the optimizer needs it: on XLA, to the device.
    """
    rate = place(learning_rate(config, step))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if isinstance(optimizer, Muon):
        low, high, num_steps = MUON_MOMENTUM
        optimizer.momentum = place(low + (high - low) * min(1.0, step / num_steps))
