"""The one module that knows devices: Accelerate, torch_xla, precision, randomness, graph cuts.

On a TPU (and on `xla-cpu:N`, its rehearsal) one process drives all chips through SPMD: the
program is written as for one device, each batch is split over a mesh axis named "data", and the
weights are whole on every chip.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from nanogpt_tpu import env
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.ties import check_tied, find_ties, tie

Decision = TypeVar("Decision")
_XLA_MESH: Any = None  # XLA: SPMD can be switched on once a process


class Runtime:
    """Where a run computes: device, mesh, precision. Make it before any other use of torch_xla.

    Attributes:
        device: the torch device.
        num_devices: how many devices share a batch: chips, virtual devices or processes.
        is_main: whether this process writes files and prints.
    """

    def __init__(self, device: str, precision: str) -> None:
        env.patch_tpu_env(device)
        kind, _ = env.parse_device(env.chosen_device())
        _check_present(kind)
        self.is_xla = kind in ("tpu", "xla-cpu")
        self.mesh = _data_mesh() if self.is_xla else None
        from accelerate import Accelerator  # XLA: only now, once environment and SPMD are set

        # XLA: "no", always: Accelerate's own bf16 would set XLA_USE_BF16 on a TPU, and torch_xla
        # would then store every fp32 tensor as bf16, master weights and moments included.
        self.accelerator: Any = Accelerator(mixed_precision="no", cpu=kind == "cpu")
        self.device = self.accelerator.device
        self.num_devices = int(self.mesh.size()) if self.mesh else self.accelerator.num_processes
        self.num_processes = self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        self.is_main = self.accelerator.is_main_process
        self.precision = precision
        self.num_host_reads = 0
        self._check_fp32()

    def _check_fp32(self) -> None:
        """A tripwire: 1 + 1e-4 is 1 where fp32 tensors are silently stored as bf16."""
        one = torch.ones(2, device=self.device)
        if float((one + 1e-4)[0].cpu()) == 1.0:
            raise UserError(
                "fp32 tensors are stored as bf16 on this device: training would lose its small "
                "updates; unset XLA_USE_BF16 and XLA_DOWNCAST_BF16, then restart Python"
            )

    @classmethod
    def around(cls, model: nn.Module) -> "Runtime":
        """The runtime, in fp32, of a model where it already is: for sampling and evaluation."""
        device = next(model.parameters()).device
        if device.type == "xla":
            return cls(env.chosen_device(), "fp32")
        runtime = cls.__new__(cls)  # no Accelerator: this process may train elsewhere
        runtime.accelerator = None
        runtime.device, runtime.precision, runtime.mesh = device, "fp32", None
        runtime.is_xla, runtime.is_main, runtime.rank = False, True, 0
        runtime.num_devices = runtime.num_processes = 1
        runtime.num_host_reads = 0
        return runtime

    def describe(self) -> str:
        """One line for people: device, how many, precision."""
        count = f", {self.num_devices} devices" if self.num_devices > 1 else ""
        how = " as one (SPMD)" if self.mesh is not None else ""
        name = env.chosen_device() if self.is_xla else self.device.type
        return f"{name}{count}{how}, {self.precision}"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, whole on every chip; wrapped where there are processes."""
        ties = find_ties(model)
        model = model.to(self.device)
        tie(model, ties)  # XLA: the move copies each, and the two would train apart
        if self.mesh is not None:
            import torch_xla
            from torch_xla.distributed import spmd

            torch_xla.sync(wait=True)  # XLA: mark_sharding races with a transfer in flight
            for tensor in (*model.parameters(), *model.buffers()):
                spmd.mark_sharding(tensor, self.mesh, (None,) * tensor.dim())
        if self.accelerator is None:
            return model
        prepared = self.accelerator.prepare(model)
        check_tied(self.unwrap(prepared), ties)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Accelerate's wrapper around an optimizer whose parameters are on the device."""
        return self.accelerator.prepare(optimizer)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model itself, out of whatever `prepare` put around it."""
        return self.accelerator.unwrap_model(model)

    def place(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Put host batches (n, T) on the device, rows split over the devices."""
        if self.mesh is not None:
            import torch_xla.core.xla_model as xm
            from torch_xla.distributed import spmd

            sharding = spmd.ShardingSpec(self.mesh, ("data", None))
            return xm.send_cpu_data_to_device(
                [tensor.contiguous() for tensor in tensors], self.device, input_sharding=sharding
            )
        world, rank = self.num_processes, self.rank
        rows = [tensor.chunk(world)[rank] for tensor in tensors]
        return [part.to(self.device, non_blocking=True) for part in rows]

    def rows_here(self, num_real: int, num_rows: int) -> int:
        """How many of a batch's first `num_real` rows `place` leaves to this process."""
        world, rank = self.num_processes, self.rank
        share = num_rows // world
        return max(0, min(share, num_real - rank * share))

    def agree(self, decision: Decision) -> Decision:
        """The main process's decision, in every process: all stop and save at the same step."""
        if self.num_processes == 1:
            return decision
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([decision])[0]

    def scalar(self, value: float) -> torch.Tensor:
        """A number on the device, fp32."""
        number = torch.tensor(value, dtype=torch.float32)
        if self.is_xla:
            import torch_xla.core.xla_model as xm

            # XLA: `.to(device)` makes 0 and 1 constants of the program, so that the step number 1
            # or a learning rate of 0 would be a new program; this makes every value data.
            return xm.send_cpu_data_to_device([number], self.device)[0]
        return number.to(self.device)

    def hyperparameter(self, value: float) -> float | torch.Tensor:
        """A number for the optimizer: on XLA data of the program, elsewhere itself."""
        return self.scalar(value) if self.is_xla else value

    def zero(self) -> torch.Tensor:
        """A scalar to sum into, on the device, as a program would have left it.

        XLA: one sent from the host has another sharding, and its first use another program.
        """
        total = torch.zeros((), device=self.device)
        self.cut()
        return total

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products run in."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        """Matrix products in bf16 over fp32 weights, or nothing for fp32."""
        on = self.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on)

    def backward(self, loss: torch.Tensor) -> None:
        """Accelerate's backward."""
        self.accelerator.backward(loss)

    def sync_gradients(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Between processes, gradients are averaged in the last micro step only."""
        return nullcontext() if is_last else self.accelerator.no_sync(model)

    def clip(self, model: nn.Module, max_norm: float | None) -> torch.Tensor:
        """Clip the whole gradient to `max_norm` (None: not at all); its norm before, on device."""
        limit = float("inf") if max_norm is None else max_norm
        return self.accelerator.clip_grad_norm_(model.parameters(), limit)

    def cut(self, wait: bool = False) -> None:
        """End the lazy graph here and run it; nothing to do where there is no graph."""
        if self.is_xla:
            import torch_xla

            torch_xla.sync(wait=wait)

    def read(self, *tensors: torch.Tensor) -> list[float]:
        """Values of device scalars on the host, averaged over processes. Stalls the device."""
        self.num_host_reads += 1
        if self.num_processes > 1:
            tensors = tuple(self.accelerator.reduce(t.clone(), "mean") for t in tensors)
        return [float(tensor) for tensor in tensors]

    def largest(self, number: torch.Tensor) -> torch.Tensor:
        """The largest of a scalar over processes, on the device."""
        return number if self.num_processes == 1 else self.accelerator.gather(number).max()

    def seed(self, *numbers: int) -> None:
        """Make dropout a function of (seed, step, micro step), whatever ran before."""
        value = 0
        for number in numbers:
            value = (value * 1_000_003 + number) % 2**31
        torch.manual_seed(value + self.rank)
        if self.is_xla:
            import torch_xla.core.xla_model as xm

            xm.set_rng_state(value, self.device)

    def num_programs(self) -> int:
        """Distinct XLA programs compiled so far in this process; 0 without XLA."""
        if not self.is_xla:
            return 0
        import torch_xla.debug.metrics as metrics

        return metrics.counter_value("UncachedCompile") or 0

    def checkpoint_blocks(self, model: nn.Module) -> None:
        """Recompute each block of `model.h` in the backward pass instead of keeping it.

        Raises:
            UserError: the model has no list of blocks named h.
        """
        blocks = getattr(model, "h", None)
        if not isinstance(blocks, nn.ModuleList):
            raise UserError(
                "gradient_checkpointing needs a model with its blocks in an nn.ModuleList named "
                "'h': name it so, or turn gradient_checkpointing off"
            )
        for block in blocks:
            block.forward = _recomputed(block.forward, self.is_xla)

    def uncheckpoint_blocks(self, model: nn.Module) -> None:
        """Undo `checkpoint_blocks`: the wrapper would bind a copy of the model to this one."""
        for block in getattr(model, "h", ()):
            block.__dict__.pop("forward", None)

    def to_host(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies in host memory, apart from the tensors that training goes on to change."""
        self.cut(wait=True)
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _check_present(kind: str) -> None:
    """Refuse a device that is not there, instead of running on another one."""
    is_missing = (kind == "cuda" and not torch.cuda.is_available()) or (
        kind == "mps" and not torch.backends.mps.is_available()
    )
    if is_missing:
        raise UserError(
            f"device {kind!r}: PyTorch {torch.__version__} finds none on this machine; use "
            "--device cpu, or --device auto to take what is there"
        )


def _data_mesh() -> Any:
    """The mesh of all XLA devices, one axis named "data"; made once a process."""
    global _XLA_MESH
    if _XLA_MESH is None:
        import numpy as np
        import torch_xla.runtime as xr
        from torch_xla.distributed import spmd

        xr.use_spmd()
        count = xr.global_runtime_device_count()
        _XLA_MESH = spmd.Mesh(np.arange(count), (count,), ("data",))
        spmd.set_global_mesh(_XLA_MESH)
    return _XLA_MESH


def _recomputed(forward: Callable[..., torch.Tensor], on_xla: bool) -> Callable[..., torch.Tensor]:
    """`forward` under activation checkpointing, with dropout drawn the same the second time."""
    if on_xla:
        # XLA: torch.utils.checkpoint fails on torch_xla 2.8 (it looks for torch.xla).
        from torch_xla.utils.checkpoint import checkpoint as xla_checkpoint

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return xla_checkpoint(forward, *args)
    else:
        from torch.utils.checkpoint import checkpoint

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
