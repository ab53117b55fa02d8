"""One optimizer step: micro steps that accumulate the gradient, then clip and update.

This is what runs on the device; `train` decides when, `runtime` knows where. The programs are the
same from the first step to the last: one micro step, one update.
"""

import torch
from torch import nn

from nanogpt_tpu import kernels
from nanogpt_tpu.config import BatchPlan, TrainConfig
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.model import GPT, Attention, Block
from nanogpt_tpu.optim import make_optimizer, set_step
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.spmd import LocalGradients


class TrainStep:
    """A model with its optimizer on the device, advanced by `run`.

    Attributes:
        model: as prepared by the runtime.
        optimizer: the optimizer itself, without Accelerate's wrapper.
        loss, grad_norm: device scalars of the last step: mean loss over the step's tokens, and the
            norm of the gradient before clipping.
        bad_step: device scalar, the first step whose loss or gradient was not finite, else 0.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, plan: BatchPlan, runtime: Runtime
    ) -> None:
        self._config, self._plan, self._runtime = config, plan, runtime
        if config.gradient_checkpointing:
            runtime.checkpoint_blocks(model)
        self.model = runtime.prepare(model)
        self.optimizer = make_optimizer(self.model, config, runtime.mesh)
        self._prepared_optimizer = runtime.prepare_optimizer(self.optimizer)
        self._local = self._local_gradients()
        for param in self.model.parameters():
            if runtime.is_xla and self._local is None:
                param.grad = torch.zeros_like(param)  # so that the first micro step adds, too
        self._loss_sum, self.bad_step = runtime.zero(), runtime.zero()
        self.loss = self.grad_norm = self.bad_step
        runtime.cut(wait=True)

    def _local_gradients(self) -> LocalGradients | None:
        """For our own model on a mesh; drawn on each chip alone, dropout would be the same on all.

        A model that is not ours may compute across the rows of a batch: it sees all of them.
        """
        mesh, model = self._runtime.mesh, self.model
        if mesh is None or not isinstance(model, GPT) or model.config.dropout > 0:
            return None
        return LocalGradients(model, mesh, self._runtime.dtype)

    def parameter_names(self) -> dict[torch.Tensor, str]:
        """Each parameter's name in the unwrapped model: how optimizer state is stored."""
        return {p: name for name, p in self._runtime.unwrap(self.model).named_parameters()}

    def run(self, step: int, idx: torch.Tensor, targets: torch.Tensor) -> None:
        """Do optimizer step number `step` (from 1) on a host batch (n, T).

        n is the plan's sequences_per_step.
        """
        rows = self._plan.sequences_per_micro_step
        self._probe = idx[: self._plan.num_devices]
        for micro_step in range(self._plan.num_micro_steps):
            part = slice(micro_step * rows, (micro_step + 1) * rows)
            self._runtime.seed(self._config.seed, step, micro_step)
            is_last = micro_step == self._plan.num_micro_steps - 1
            placed_idx, placed_targets = self._runtime.place(idx[part], targets[part])
            self._micro_step(placed_idx, placed_targets, is_last)
        self._update(step)

    def describe(self) -> list[str]:
        """Where it runs and, on XLA, how attention is computed: lines for people."""
        runtime, lines = self._runtime, [f"Device: {self._runtime.describe()}"]
        model = runtime.unwrap(self.model)
        if runtime.is_xla and runtime.precision == "bf16" and isinstance(model, GPT):
            how = kernels.describe(self._plan.micro_batch_size, self._plan.seq_len, model.config)
            lines.append(f"Attention: {how}")
        return lines

    def copies(self) -> list[torch.Tensor]:
        """What is held on the device beside weights, gradients and optimizer state."""
        return [] if self._local is None else list(self._local.copies.values())

    def measure(self) -> dict[str, float]:
        """Read the device: loss, grad_norm, bad_step and, of our layers, max_attention_logit."""
        values = {"loss": self.loss, "grad_norm": self.grad_norm, "bad_step": self.bad_step}
        model, runtime = self._runtime.unwrap(self.model), self._runtime
        if _has_our_attention(model):
            assert isinstance(model, GPT)
            # One sequence a device, plain and in fp32: XLA adds one small program, always the same.
            model.eval()
            logit = model.max_attention_logit(*runtime.place(self._probe))
            values["max_attention_logit"] = runtime.largest(logit)
            model.train()
            runtime.cut()
        return dict(zip(values, runtime.read(*values.values()), strict=True))

    def _micro_step(self, idx: torch.Tensor, targets: torch.Tensor, is_last: bool) -> None:
        """Add one micro-batch's share to the gradient and to the loss."""
        if self._local is not None:
            self._local.add(idx, targets, self._runtime.autocast)
            self._runtime.cut()
            return
        with self._runtime.sync_gradients(self.model, is_last):
            with self._runtime.autocast():
                _, loss = self.model(idx, targets)
            if loss is None:
                raise UserError("the model gave no loss: forward(idx, targets) -> (logits, loss)")
            loss = loss.float() / self._plan.num_micro_steps
            self._runtime.backward(loss)
        self._loss_sum += loss.detach()
        # XLA: without this cut all micro steps become one program, too large for memory.
        self._runtime.cut()

    def _update(self, step: int) -> None:
        """Clip the accumulated gradient once, step the optimizer, start the next sum at zero."""
        runtime = self._runtime
        if self._local is not None:
            self._loss_sum = self._local.reduce(self._plan.num_micro_steps)
        self.grad_norm = runtime.clip(self.model, self._config.grad_clip)
        self.loss = self._loss_sum.clone()
        bad = ~torch.isfinite(self.loss + self.grad_norm) & (self.bad_step == 0)
        self.bad_step = torch.where(bad, runtime.scalar(step), self.bad_step)
        set_step(self.optimizer, self._config, step, runtime.hyperparameter)
        self._prepared_optimizer.step()
        self._prepared_optimizer.zero_grad(
            set_to_none=self._local is not None or not runtime.is_xla
        )
        self._loss_sum.zero_()
        if self._local is not None:
            self._local.copy_weights()
        runtime.cut()


def _has_our_attention(model: nn.Module) -> bool:
    """Whether attention logits can be computed: not where a GPT's layers have been exchanged."""
    blocks = list(model.h) if isinstance(model, GPT) else []
    ours = (type(block) is Block and type(block.attn) is Attention for block in blocks)
    return bool(blocks) and all(ours)
