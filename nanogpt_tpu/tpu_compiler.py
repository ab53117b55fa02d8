"""The real TPU compiler on a machine without a TPU: a traced program to what it costs on a chip.

libtpu compiles for a topology that is only described to it; jax carries the program there.
"""

import os
from dataclasses import dataclass
from typing import Any

from nanogpt_tpu.errors import UserError, unknown_name

# Before jax and libtpu are loaded: no device to look for, no metadata server to ask.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two compiles at once fight over a lock file
}


@dataclass(frozen=True)
class Chip:
    """What one chip can do."""

    clock_hz: float
    peak_flops: float  # bf16
    hbm_bytes: int
    hbm_bytes_per_s: float


_V5E = Chip(1.5e9, 196.6e12, 16_909_336_576, 819e9)
_V6E = Chip(1.75e9, 918e12, 33_550_237_696, 1640e9)
TOPOLOGIES = {  # name: chip, number of chips
    "v5e:2x4": (_V5E, 8),
    "v5e:4x4": (_V5E, 16),
    "v5e:16x16": (_V5E, 256),
    "v6e:2x4": (_V6E, 8),
}


@dataclass(frozen=True)
class Program:
    """A compiled program, per chip."""

    hlo_text: str
    argument_bytes: int
    temp_bytes: int
    new_output_bytes: int
    """Outputs that do not take the place of an argument."""
    code_bytes: int


def topology(name: str) -> tuple[Chip, int]:
    """Chip and number of chips of a topology.

    Raises:
        UserError: not one of `TOPOLOGIES`.
    """
    if name not in TOPOLOGIES:
        raise unknown_name("topology", name, TOPOLOGIES)
    return TOPOLOGIES[name]


def check_installed() -> None:
    """Refuse to begin without compiler.

    Raises:
        UserError: jax or libtpu is missing; says what to install.
    """
    from importlib.util import find_spec

    missing = [name for name in ("torch_xla", "jax", "libtpu") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"preflight needs {', '.join(missing)}, not installed here: on Linux x86-64, "
            "pip install torch==2.8.0 torch_xla==2.8.0 libtpu==0.0.17 jax==0.6.2"
        )


def compile_program(hlo: bytes, topology_name: str, updates_in_place: bool) -> Program:
    """Compile a traced program (an HLO proto with shardings) for every chip of a topology.

    With `updates_in_place`, outputs take the place of arguments of their size, as torch_xla has it
    at run time, though it is not in the program that can be traced.
    """
    os.environ.update(ENVIRONMENT)
    import numpy as np
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import _jax, xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir

    devices: list[Any] = list(topologies.get_topology_desc(topology_name, "tpu").devices)
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    assignment = xla_client.DeviceAssignment.create(np.arange(len(devices)).reshape(1, -1))
    options.num_partitions = build.num_partitions = len(devices)
    options.device_assignment = build.device_assignment = assignment
    build.use_spmd_partitioning = True
    build.allow_spmd_sharding_propagation_to_output = [True]  # or split outputs are gathered
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(hlo))
        _complete(module, ir, updates_in_place)
        client, listed = devices[0].client, xla_client.DeviceList(tuple(devices))
        executable = client.compile(jax_mlir.module_to_bytecode(module), listed, options)
    memory = executable.get_compiled_memory_stats()
    return Program(
        hlo_text=executable.hlo_modules()[0].to_string(),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        new_output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )


def _complete(module: Any, ir: Any, updates_in_place: bool) -> None:
    """Give arguments the sharding of their first use, and say which may be overwritten.

    A tensor that was traced without data has no sharding of its own.
    """
    main = next(op for op in module.body.operations if op.name.value == "main")
    attributes = []
    for argument, given in zip(main.arguments, main.arg_attrs, strict=True):
        found = {named.name: named.attr for named in given}
        for use in argument.uses:
            owner = use.owner
            if owner.name != "stablehlo.custom_call":
                continue
            if ir.StringAttr(owner.attributes["call_target_name"]).value == "Sharding":
                found.setdefault("mhlo.sharding", owner.attributes["mhlo.sharding"])
        if updates_in_place:
            found["jax.buffer_donor"] = ir.BoolAttr.get(True)
        attributes.append(ir.DictAttr.get(found))
    main.arg_attrs = ir.ArrayAttr.get(attributes)
