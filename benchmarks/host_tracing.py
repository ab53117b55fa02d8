"""How long the host needs to trace one micro step, against what the chip needs to run it.

    python benchmarks/host_tracing.py

The real `tpu-fast` and `gpt2` with their kernels, on tensors without data (as preflight traces
them): what is counted is the processor time of building the graph of both passes. Looking the
program up and launching it comes on top; it is measured with a tiny width on eight virtual devices.
"""

import os
import statistics
import time

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import nanogpt_tpu as ng

ng.patch_tpu_env("xla-cpu:8")

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.step import TrainStep
from nanogpt_tpu.tracing import Tracer

NUM_STEPS = 15


def tracing_ms(name: str) -> float:
    """Median of placing a batch and tracing a micro step, in the real shape."""
    config = ng.preset(name, attention="pallas")
    plan = config.plan(8)
    runtime = Tracer(8, "bf16")
    with torch.device("meta"):
        model = ng.GPT(config.model)
    step = TrainStep(model, config, plan, runtime)
    ids = torch.zeros(plan.sequences_per_micro_step, config.context, dtype=torch.long)
    times = []
    for _ in range(NUM_STEPS):
        start_s = time.process_time()
        step._local.add(*runtime.place(ids, ids), runtime.autocast)
        times.append((time.process_time() - start_s) * 1e3)
        runtime.cut()
        runtime.programs.clear()
    return statistics.median(times[3:])


def launch_ms(name: str) -> float:
    """Shortest call that looks up and launches a micro step: the virtual devices run beside it."""
    shape = {"n_embd": 96, "block_size": 128, "vocab_size": 256, "micro_batch_size": 1}
    config = ng.preset(name, **shape, tokens_per_step=8 * 128)
    runtime = Runtime("xla-cpu:8", "bf16")
    step = TrainStep(ng.GPT(config.model), config, config.plan(8), runtime)
    ids, times = torch.randint(256, (8, 128)), []
    for _ in range(NUM_STEPS):
        step._local.add(*runtime.place(ids, ids), runtime.autocast)
        xm.wait_device_ops()
        start_s = time.perf_counter()
        torch_xla.sync()
        times.append((time.perf_counter() - start_s) * 1e3)
    return min(times)


if __name__ == "__main__":
    for name in ("tpu-fast", "gpt2"):
        found = ng.preflight(ng.preset(name))
        device_ms = found["micro_step_s"] * 1e3
        trace, launch = tracing_ms(name), launch_ms(name)
        print(
            f"{name}: trace {trace:.1f} ms + launch {launch:.1f} ms on the host, chip "
            f"{device_ms:.1f} ms (estimate): {(trace + launch) / device_ms:.0%}"
        )
