"""What each chip computes alone: gradients stay on their chip until the step's end.

Written as for one device, every micro step would all-reduce every gradient. In here a program is
"manual": it sees its own chip's rows, and nothing crosses chips until `LocalGradients.reduce`.

Letters: n devices.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import nn


def lay_out(tensor: torch.Tensor, mesh: Any, first: str | None) -> torch.Tensor:
    """The tensor, its first dimension split over the devices if `first` is "data", else whole."""
    import torch_xla

    # XLA: not enable_manual_sharding, which would lay a tensor out anew before its use.
    tensor = tensor.clone()
    torch_xla._XLAC._xla_annotate_custom_sharding(tensor, _layout(mesh, first, tensor.dim()))
    return tensor


def _layout(mesh: Any, first: str | None, num_dims: int) -> Any:
    """XLA's own form of it. Its wrappers around tensors are left out: they cost the host 10 %."""
    return mesh.get_op_sharding((first, *[None] * (num_dims - 1)) if num_dims else ())


@cache
def _manual_layout() -> Any:
    import torch_xla
    from torch_xla.distributed.spmd import ShardingType

    return torch_xla._XLAC.OpSharding([], [], [], ShardingType.MANUAL)


class LocalGradients:
    """Sums of a model's gradient and loss over micro steps, one for each device of the mesh.

    Attributes:
        copies: matrices by name in `dtype`, what autocast would make of them in every micro step.
    """

    def __init__(self, model: nn.Module, mesh: Any, dtype: torch.dtype) -> None:
        self._model, self._mesh, self._num_devices = model, mesh, int(mesh.size())
        self._params = dict(model.named_parameters())
        self._dtype = dtype
        self.copies: dict[str, torch.Tensor] = {}
        self.copy_weights()
        self._sums: dict[str, torch.Tensor] = {}  # (n, *shape) fp32, the first dimension split
        self._loss = self._zeros(())
        self._clear()

    def add(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Add the gradient and loss of a batch (rows, T), rows split over the devices."""
        local = {name: self._enter(tensor) for name, tensor in self._model.named_buffers()}
        for name, param in self._params.items():
            # In fp32, so that gradients are; the compiler drops the way there and back.
            weight = self._enter(self.copies.get(name, param.detach())).float()
            local[name] = weight.detach().requires_grad_(param.requires_grad)
        step = _ForwardBackward(self._model, autocast)
        weights = {f"model.{name}": tensor for name, tensor in local.items()}
        batch = (self._enter(idx, "data"), self._enter(targets, "data"))
        loss = torch.func.functional_call(step, weights, batch)
        self._loss += self._leave(loss)
        for name, total in self._sums.items():
            grad = local[name].grad
            assert grad is not None, f"{name} takes no part in the loss"
            total += self._leave(grad)
        self._keep_split()

    def reduce(self, num_micro_steps: int) -> torch.Tensor:
        """Give each parameter its mean gradient: the one all-reduce. Returns the mean loss."""
        count = num_micro_steps * self._num_devices
        for name, total in self._sums.items():
            self._params[name].grad = total.sum(0) / count
        loss = self._loss.sum() / count
        self._clear()
        return loss

    def copy_weights(self) -> None:
        """Take the weights as they are now; to be called after each update of them."""
        if self._dtype != torch.float32:
            matrices = {name: param for name, param in self._params.items() if param.dim() >= 2}
            self.copies = {name: p.detach().to(self._dtype) for name, p in matrices.items()}

    def _clear(self) -> None:
        self._loss = self._zeros(())
        for name, param in self._params.items():
            if param.requires_grad:
                self._sums[name] = self._zeros(param.shape)
        self._keep_split()

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        device = next(iter(self._params.values())).device
        return torch.zeros(self._num_devices, *shape, device=device)

    def _keep_split(self) -> None:
        """XLA: state it each time, or the compiler may gather the sums on every chip."""
        import torch_xla

        for total in (self._loss, *self._sums.values()):
            layout = _layout(self._mesh, "data", total.dim())
            torch_xla._XLAC._xla_mark_sharding(total, layout)

    def _enter(self, tensor: torch.Tensor, first: str | None = None) -> torch.Tensor:
        """Each device's own part: all of it, or its rows if the first dimension is "data"."""
        import torch_xla

        return torch_xla._XLAC._spmd_full_to_shard_shape(lay_out(tensor, self._mesh, first))

    def _leave(self, part: torch.Tensor) -> torch.Tensor:
        """All devices' parts beside each other: (n, *shape), the first dimension split."""
        import torch_xla

        shape = (self._num_devices, *part.shape)
        part = part.unsqueeze(0)
        torch_xla._XLAC._mark_manual_sharding(part, _manual_layout())
        layout = _layout(self._mesh, "data", part.dim())
        return torch_xla._XLAC._spmd_shard_to_full_shape(part, layout, shape, part.dtype)


class _ForwardBackward(nn.Module):
    """Both passes in one forward, so that recomputed blocks see the same weights."""

    def __init__(
        self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            _, loss = self.model(idx, targets)
        loss = loss.float()
        loss.backward()
        return loss.detach()
