"""The programs that `train` runs, traced without data or TPU, compiled for one and read.

    echo '{"config": {...}, "topology": "v5e:2x4"}' | python -m nanogpt_tpu.tracing

`preflight` runs this in a process of its own: it needs as many virtual devices as the topology has
chips. The model, the step and the optimizer are those of training; only where training would run a
program, it is taken down, and its results become tensors without data.
"""

import gc
import json
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanogpt_tpu import env, kernels
from nanogpt_tpu.config import TrainConfig
from nanogpt_tpu.costs import Cost, program_costs
from nanogpt_tpu.model import GPT
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.step import TrainStep
from nanogpt_tpu.tpu_compiler import ENVIRONMENT, Program, compile_program, topology

NUM_COSTLIEST = 20


class Tracer(Runtime):
    """A runtime that takes programs down instead of running them.

    Attributes:
        programs: HLO of every program so far, in the order that training runs them.
    """

    def __init__(self, num_chips: int, precision: str) -> None:
        super().__init__(f"xla-cpu:{num_chips}", precision)
        self.programs: list[bytes] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        """Replace parameters and buffers by tensors on the device without data."""
        for name, param in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            empty = nn.Parameter(_without_data(param), requires_grad=param.requires_grad)
            model.get_submodule(owner)._parameters[leaf] = empty
        for name, buffer in list(model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = _without_data(buffer)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """As it is."""
        return optimizer

    def cut(self, wait: bool = False) -> None:
        """Take down the program that computes every living tensor, then forget how they came."""
        import torch_xla
        from torch_xla.distributed import spmd

        xla = torch_xla._XLAC
        with warnings.catch_warnings(action="ignore"):  # looking at every object touches old ones
            living = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        living = [tensor for tensor in living if tensor.device.type == "xla"]
        is_due = xla._check_tensor_need_materialization(living)
        due = {xla._xla_get_tensor_id(t): t for t, is_ in zip(living, is_due, strict=True) if is_}
        if not due:
            return
        self.programs.append(xla._get_xla_tensors_hlo_proto(list(due.values())))
        for tensor in due.values():
            empty = _without_data(tensor)
            if "devices" in (xla._get_xla_sharding_spec(tensor) or ""):
                spec = ("data", *[None] * (tensor.dim() - 1))
                empty = spmd.annotate_custom_sharding(empty.clone(), self.mesh, spec).global_tensor
            xla._replace_xla_tensor(tensor, empty)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    from torch_xla.core.xla_builder import create_placeholder_tensor

    return create_placeholder_tensor(tensor.shape, tensor.dtype)


@dataclass(frozen=True)
class Traced:
    """HLO of each program, and bytes of what stays in memory between them."""

    hlo: dict[str, bytes]
    parameter_bytes: int
    copy_bytes: int
    optimizer_bytes: int


def trace(config: TrainConfig, num_chips: int) -> Traced:
    """Take down the micro step, the optimizer step and the evaluation of a config."""
    if config.model.attention == "auto" and kernels.is_known_libtpu():
        config = config.replace(attention="pallas")
    rows = config.micro_batch_size * num_chips
    config = config.replace(tokens_per_step=rows * config.context)  # one micro step
    plan = config.plan(num_chips)
    runtime = Tracer(num_chips, config.precision)
    ids = torch.zeros(rows, config.context, dtype=torch.long)
    hlo = {"evaluation": _trace_evaluation(config, runtime, ids)}
    with torch.device("meta"):
        model = GPT(config.model)
    step = TrainStep(model, config, plan, runtime)
    runtime.programs.clear()  # those of the start
    step.run(1, ids, ids)
    hlo["micro step"], hlo["optimizer step"] = runtime.programs
    states = [tensor for state in step.optimizer.state.values() for tensor in state.values()]
    held = (model.parameters(), step.copies(), states)
    return Traced(hlo, *(sum(map(_num_bytes, tensors)) for tensors in held))


def _trace_evaluation(config: TrainConfig, runtime: Tracer, ids: torch.Tensor) -> bytes:
    import torch_xla

    with torch.device("meta"):
        model = GPT(config.model).eval()
    runtime.prepare(model)
    with torch.no_grad(), runtime.autocast():
        _, loss = model(*runtime.place(ids, ids))
    return torch_xla._XLAC._get_xla_tensors_hlo_proto([loss])


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def measure(config: TrainConfig, topology_name: str) -> dict[str, Any]:
    """Trace, compile and read every program: plain values per chip, by program."""
    chip, num_chips = topology(topology_name)
    traced = trace(config, num_chips)
    programs = {}
    for name, hlo in traced.hlo.items():
        in_place = name != "evaluation"
        try:
            program = compile_program(hlo, topology_name, in_place)
        except RuntimeError as error:  # what jax raises, with the compiler's own words
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            programs[name] = {"out_of_memory": str(error)[:2000]}
            continue
        tokens = config.micro_batch_size * config.context if name != "optimizer step" else 0
        costs = program_costs(program.hlo_text, chip, config.model.head_size, tokens)
        programs[name] = _summary(program, costs)
    return {
        "parameter_bytes": traced.parameter_bytes,
        "copy_bytes": traced.copy_bytes,
        "optimizer_bytes": traced.optimizer_bytes,
        "programs": programs,
    }


def _summary(program: Program, costs: list[Cost]) -> dict[str, Any]:
    kinds: dict[str, float] = {}
    ops: dict[tuple[str, str, str], list[float]] = {}
    for cost in costs:
        kinds[cost.kind] = kinds.get(cost.kind, 0.0) + cost.estimate_s
        ops.setdefault((cost.kind, cost.origin, cost.shape), []).append(cost.estimate_s)
    dearest = sorted(ops.items(), key=lambda item: -sum(item[1]))[:NUM_COSTLIEST]
    return {
        "estimate_s": sum(cost.estimate_s for cost in costs),
        "roofline_s": sum(cost.roofline_s for cost in costs),
        "kinds": kinds,
        "collective_bytes": sum(cost.collective_bytes for cost in costs),
        "num_collectives": sum(cost.kind == "collective" for cost in costs),
        "argument_bytes": program.argument_bytes,
        "temp_bytes": program.temp_bytes,
        "new_output_bytes": program.new_output_bytes,
        "code_bytes": program.code_bytes,
        "costliest": [
            {"s": sum(times), "count": len(times), "kind": kind, "from": origin, "shape": shape}
            for (kind, origin, shape), times in dearest
        ],
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    # Read when torch_xla is loaded: with them each operation knows its line of our source.
    os.environ.update(ENVIRONMENT, XLA_HLO_DEBUG="1", XLA_IR_DEBUG="1")
    env.patch_tpu_env(f"xla-cpu:{topology(request['topology'])[1]}")
    found = measure(TrainConfig.from_dict(request["config"]), request["topology"])
    print("MEASURED " + json.dumps(found))
