"""Preflight: does a run fit a TPU, how fast will it be, what dominates; no TPU, no network.

    found = preflight(preset("tpu-fast"))        # also: nanogpt-tpu preflight --preset tpu-fast

The compiler for the TPU compiles the very programs that `train` runs. Its cycles are an estimate,
not a measurement. Results are kept by content: the same question is answered at once.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanogpt_tpu.config import BatchPlan, TrainConfig
from nanogpt_tpu.errors import UserError, one_of
from nanogpt_tpu.tpu_compiler import check_installed, topology

# The first Kaggle TPU recipe compiled as it very probably ran (every tensor bf16): 317k tokens/s.
# Its author reports over 400k in the loop and 370k end to end: 1.17 to 1.26 times the estimate.
BLOG_TOKENS_PER_S_PER_CHIP = 317_000 / 8
BAND = (
    "A compiler estimate, not a measurement. The one published figure to hold it against is 1.17 "
    "to 1.26 times its estimate (317k; 370k end to end, 400k in the loop); a program nearer to the "
    "chip's limit will show less of that, and may show 0.75."
)
SWEPT = (4, 8, 16, 24, 32, 48, 64)
_PEAK_FLOPS = 197e12  # a v5e chip's published peak, for MFU


def preflight(config: TrainConfig, topology_name: str = "v5e:2x4") -> dict[str, Any]:
    """Compile a run for a TPU and say what it would cost there, per chip.

    Args:
        config: the run; data and out are not used.
        topology_name: a key of `tpu_compiler.TOPOLOGIES`.

    Returns:
        preset, topology, micro_batch_size; hbm_peak_bytes, hbm_limit_bytes, fits, hbm_bytes by
        class; micro_step_s, optimizer_step_s, step_s, evaluation_s (of one batch) and the same by
        the roofline clock; tokens_per_s, mfu (needed flops a token / 197 TFLOP/s a chip),
        pallas_modelled_s of a micro step, vs_blog, hours, collectives, costliest, band. Times and
        speed are None where the compiler finds no room.

    Raises:
        UserError: unknown topology, no compiler installed, a plan that does not divide.
    """
    chip, num_chips = topology(topology_name)
    check_installed()
    plan = config.plan(num_chips)
    measured = _measured(config, topology_name)
    programs = measured["programs"]
    result: dict[str, Any] = {
        "preset": config.preset,
        "topology": topology_name,
        "micro_batch_size": config.micro_batch_size,
        "num_micro_steps": plan.num_micro_steps,
        "hbm_limit_bytes": chip.hbm_bytes,
        "band": BAND,
    }
    if tight := [program for program in programs.values() if "out_of_memory" in program]:
        return {**result, **_no_room(tight[0]["out_of_memory"])}
    return {**result, **_verdict(config, measured, plan, num_chips, chip.hbm_bytes)}


def _verdict(
    config: TrainConfig, measured: dict[str, Any], plan: BatchPlan, num_chips: int, limit: int
) -> dict[str, Any]:
    """Memory, time and speed of a run whose programs all compiled."""
    programs, memory = measured["programs"], _memory(measured)
    micro, update = programs["micro step"], programs["optimizer step"]
    peak = sum(memory.values())
    step_s, roofline_s = (
        plan.num_micro_steps * micro[clock] + update[clock]
        for clock in ("estimate_s", "roofline_s")
    )
    tokens_per_s = plan.tokens_per_step / step_s
    return {
        "hbm_peak_bytes": peak,
        "hbm_bytes": memory,
        "fits": peak <= limit,
        "micro_step_s": micro["estimate_s"],
        "optimizer_step_s": update["estimate_s"],
        "evaluation_s": programs["evaluation"]["estimate_s"],
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "mfu": flops_per_token(config) * tokens_per_s / num_chips / _PEAK_FLOPS,
        "roofline": {
            "micro_step_s": micro["roofline_s"],
            "optimizer_step_s": update["roofline_s"],
            "step_s": roofline_s,
            "tokens_per_s": plan.tokens_per_step / roofline_s,
        },
        "pallas_modelled_s": micro["kinds"].get("kernel", 0.0),
        "vs_blog": tokens_per_s / num_chips / BLOG_TOKENS_PER_S_PER_CHIP,
        "hours": config.num_steps * step_s / 3600,
        "collectives": {
            name: {"count": found["num_collectives"], "bytes": found["collective_bytes"]}
            for name, found in programs.items()
        },
        "kinds": {name: found["kinds"] for name, found in programs.items()},
        "costliest": micro["costliest"],
    }


def flops_per_token(config: TrainConfig) -> float:
    """Needed for one token, forward and backward: 6 a weight, and attention's products.

    6 (block and head weights) + 12 n_layer seq_len n_embd, as PaLM counts (Chowdhery et al. 2022);
    855 MFLOP for tpu-fast.
    """
    model = config.model
    a_block = 4 * model.n_embd**2 + 8 * model.n_embd**2  # swiglu has as many
    weights = model.n_layer * a_block + model.padded_vocab_size * model.n_embd
    return 6.0 * weights + 12.0 * model.n_layer * config.context * model.n_embd


def sweep(config: TrainConfig, topology_name: str, name: str) -> list[dict[str, Any]]:
    """`preflight` for several micro-batch sizes, those that divide the step.

    Raises:
        UserError: a field that cannot be swept.
    """
    one_of("field to sweep", name, ("micro_batch_size",))
    num_chips, found = topology(topology_name)[1], []
    for size in SWEPT:
        if config.tokens_per_step % (size * num_chips * config.context) == 0:
            found.append(preflight(config.replace(micro_batch_size=size), topology_name))
            print("\n".join(describe(found[-1])[:2]))
    return found


def _measured(config: TrainConfig, topology_name: str) -> dict[str, Any]:
    """What `tracing` finds, kept by content."""
    config = config.replace(data=None, out=None)
    request = json.dumps({"config": config.to_dict(), "topology": topology_name})
    sources = sorted(Path(__file__).parent.glob("*.*"))
    versions = "".join(version(name) for name in ("torch", "torch_xla", "jax", "libtpu"))
    content = b"".join(path.read_bytes() for path in sources if path.is_file())
    key = sha256(request.encode() + versions.encode() + content).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = home / "nanogpt_tpu" / "preflight" / f"{key}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    print(f"Compiling three programs for {topology_name}: one to three minutes.", file=sys.stderr)
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    environ.pop("USE_TORCH_XLA", None)
    done = subprocess.run(
        [sys.executable, "-m", "nanogpt_tpu.tracing"],
        input=request, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise UserError(f"the TPU compiler did not finish ({last}): the run was not compiled")
    text = lines[-1].removeprefix("MEASURED ")
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.replace(kept)
    return json.loads(text)


def _memory(measured: dict[str, Any]) -> dict[str, int]:
    """Bytes on a chip by class, at the fullest moment.

    Parameters, optimizer state and gradient sums stay; torch_xla updates them in place, which the
    compiler was told.
    """
    programs = measured["programs"]
    stays = programs["optimizer step"]["argument_bytes"]
    known = measured["parameter_bytes"] + measured["optimizer_bytes"]
    return {
        "parameters": measured["parameter_bytes"],
        "parameters in bf16": measured["copy_bytes"],
        "optimizer state": measured["optimizer_bytes"],
        "gradient sums": stays - known,
        "activations": max(p["temp_bytes"] + p["new_output_bytes"] for p in programs.values()),
        "code": sum(program["code_bytes"] for program in programs.values()),
    }


def _no_room(message: str) -> dict[str, Any]:
    """The compiler refused: how much it wanted, in its own words."""
    used = re.search(r"[Uu]sed ([\d.]+)G of ([\d.]+)G", message)
    peak = round(float(used.group(1)) * 2**30) if used else None
    empty = dict.fromkeys(("step_s", "micro_step_s", "optimizer_step_s", "tokens_per_s", "mfu"))
    return {**empty, "fits": False, "hbm_peak_bytes": peak}


def describe(found: dict[str, Any]) -> list[str]:
    """What a person reads of a result; the first two lines are the verdict."""
    gib = 2**30
    limit, peak = found["hbm_limit_bytes"] / gib, found["hbm_peak_bytes"]
    head = f"{found['preset']}, micro_batch_size {found['micro_batch_size']}, {found['topology']}"
    if not found["fits"]:
        over = f"{peak / gib - limit:.2f} GiB too much" if peak else "the compiler finds no room"
        return [
            f"{head}: does not fit {limit:.2f} GiB ({over})",
            "  halve --micro-batch-size, or recompute with --gradient-checkpointing",
        ]
    roof = found["roofline"]
    lines = [
        f"{head}: fits, {peak / gib:.2f} of {limit:.2f} GiB a chip",
        f"  {found['tokens_per_s']:,.0f} tokens/s by the compiler's clock, "
        f"{roof['tokens_per_s']:,.0f} by the roofline; MFU {found['mfu']:.0%}; "
        f"{found['vs_blog']:.2f}x the estimate of the first Kaggle recipe (124M)",
        f"  step {found['step_s'] * 1e3:.0f} ms = {found['num_micro_steps']} x "
        f"{found['micro_step_s'] * 1e3:.1f} + {found['optimizer_step_s'] * 1e3:.1f} ms "
        f"(roofline {roof['micro_step_s'] * 1e3:.1f} and {roof['optimizer_step_s'] * 1e3:.1f}); "
        f"kernels modelled at {found['pallas_modelled_s'] * 1e3:.1f} ms a micro step",
        f"  the planned tokens take {found['hours']:.1f} h ({found['hours'] * 60:.0f} min), "
        "evaluations, compiling and saving apart",
    ]
    lines += [f"  {size / gib:6.2f} GiB {name}" for name, size in found["hbm_bytes"].items()]
    for name, moved in found["collectives"].items():
        lines.append(f"  {name}: {moved['count']} collectives, {moved['bytes'] / 1e6:,.0f} MB")
    lines.append("  dearest of a micro step:")
    for op in found["costliest"][:10]:
        what = f"{op['kind']:10} {op['from']}  {op['shape'][:48]}"
        lines.append(f"  {op['s'] * 1e3:7.2f} ms  x{op['count']:<3} {what}")
    return [*lines, found["band"]]


def draw(results: Iterable[dict[str, Any]], path: Path) -> None:
    """Where the time and the memory go, a bar for each result that fits."""
    from matplotlib.figure import Figure

    fitting = [found for found in results if found["fits"]]
    if not fitting:
        return
    figure = Figure(figsize=(10, 1.8 + 0.5 * len(fitting)), dpi=120, layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    labels = [f"{f['preset']} {f['micro_batch_size']}, {f['topology']}" for f in fitting]
    times = [
        {
            **{k: v * f["num_micro_steps"] * 1e3 for k, v in f["kinds"]["micro step"].items()},
            "optimizer step": f["optimizer_step_s"] * 1e3,
        }
        for f in fitting
    ]
    memory = [{k: v / 2**30 for k, v in f["hbm_bytes"].items()} for f in fitting]
    for axes, bars, unit in ((time_axes, times, "ms a step"), (memory_axes, memory, "GiB a chip")):
        left = [0.0] * len(bars)
        for name in dict.fromkeys(name for bar in bars for name in bar):
            values = [bar.get(name, 0.0) for bar in bars]
            axes.barh(labels, values, left=left, label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_xlabel(f"{unit} (compiler estimate)")
        axes.legend(frameon=False, fontsize=7)
    memory_axes.axvline(fitting[0]["hbm_limit_bytes"] / 2**30, color="#b00020")
    memory_axes.set_yticks([])
    figure.savefig(path)
