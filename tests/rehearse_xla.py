"""What the XLA tests look at, gathered in one process on eight virtual devices: JSON on stdout.

Starting XLA and compiling costs far more than the steps, so one process runs every scenario and
tests/test_xla.py asserts on what it saw. Run as: python tests/rehearse_xla.py DATA WORK_DIR
"""

import json
import sys
from pathlib import Path

import nanogpt_tpu as ng

ng.patch_tpu_env("xla-cpu:8")

import torch
import torch_xla
from safetensors.torch import load_file

from nanogpt_tpu import env
from nanogpt_tpu.load import load_checkpoint
from nanogpt_tpu.metrics import read_metrics
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.sample import sample
from nanogpt_tpu.shards import ShardLoader
from nanogpt_tpu.step import TrainStep
from nanogpt_tpu.train import train


def config(data, out, **changes):
    return ng.preset("tiny", data=str(data), out=str(out), device="xla-cpu:8", **changes)


def losses(run_dir):
    return [r["loss"] for r in read_metrics(Path(run_dir)) if "loss" in r]


def weights(run_dir):
    newest = max(Path(run_dir).glob("checkpoints/step_*"))
    return load_file(newest / "model.safetensors"), load_file(newest / "optimizer.safetensors")


def same(run_a, run_b):
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(weights(run_a), weights(run_b), strict=True)
    )


def next_cell(result, data):
    """What the cell after training does, in the same process, with either copy of the model."""
    loaded, tokenizer, _ = load_checkpoint(result.run_dir)
    settings = {"max_new_tokens": 5, "temperature": 0}
    return {
        "texts": [ng.generate(m, tokenizer, "ab", **settings) for m in (result.model, loaded)],
        "losses": [
            ng.evaluate(m, data, max_tokens=512)["val_loss"] for m in (result.model, loaded)
        ],
        "trained": result.val_loss,
    }


class Tied(torch.nn.Module):
    """A foreign model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(257, 8)
        self.head = torch.nn.Linear(8, 257, bias=False)
        self.head.weight = self.table.weight

    def forward(self, idx, targets=None):
        logits = self.head(self.table(idx))
        flat = logits.flatten(0, 1)
        return logits, torch.nn.functional.cross_entropy(flat, targets.flatten())


def ties_after(model):
    return model.head.weight is model.table.weight


def placement(runtime, data):
    """Device, mesh, and how a batch lies on it."""
    idx, _ = ShardLoader(data, "train", 32, 16, seed=0)(0)
    (placed,) = runtime.place(idx)
    return {
        "chosen": env.chosen_device(),
        "device": str(runtime.device),
        "mesh": {name: int(size) for name, size in runtime.mesh.shape().items()},
        "num_devices": runtime.num_devices,
        "batch_sharding": torch_xla._XLAC._get_xla_sharding_spec(placed),
        "batch_kept": bool((placed.cpu() == idx).all()),
        "fp32_is_fp32": float((torch.ones(1, device=runtime.device) + 1e-4).cpu()) != 1.0,
    }


def program_counts(runtime, data, out, optimizer):
    """Programs compiled after each of some steps that tempt XLA to make new ones."""
    run = config(
        data,
        out,
        tokens_per_step=1024,
        warmup_steps=0,
        min_lr_ratio=0.0,
        num_steps=709,
        optimizer=optimizer,
    )
    plan = run.plan(runtime.num_devices)
    loader = ShardLoader(data, "train", run.seq_len, plan.sequences_per_step, seed=run.seed)
    torch.manual_seed(0)
    step = TrainStep(ng.GPT(run.model), run, plan, runtime)
    counts = {}
    for number in (1, 2, 3, 320, 321, 324, 325, 326, 327, 704, 705, 706, 707, 708, 709):
        if number in (320, 704):  # as if all the steps before had been made
            for state in step.optimizer.state.values():
                if "step" in state:
                    state["step"].copy_(runtime.scalar(number - 1.0))
            runtime.cut(wait=True)
        reads = runtime.num_host_reads
        step.run(number, *loader(number - 1))
        counts[number] = runtime.num_programs()
        assert runtime.num_host_reads == reads
    return counts


def measure_programs(runtime, data, out):
    """Programs compiled after each of three steps that are all logged."""
    run = config(data, out, precision=runtime.precision, optimizer="muon")
    plan = run.plan(runtime.num_devices)
    loader = ShardLoader(data, "train", run.seq_len, plan.sequences_per_step, seed=run.seed)
    step = TrainStep(ng.GPT(run.model), run, plan, runtime)
    counts = []
    for number in (1, 2, 3):
        step.run(number, *loader(number - 1))
        step.measure()
        counts.append(runtime.num_programs())
    return counts


def shapes_seen(run_dir, runtime):
    """Shapes that reach the model while it writes 12 tokens, and programs made after the first."""
    model, tokenizer, _ = load_checkpoint(run_dir)
    runtime.prepare(model)
    shapes, counts = set(), []
    original = model.embed

    def embed(idx, *rest):
        shapes.add(tuple(idx.shape))
        counts.append(runtime.num_programs())
        return original(idx, *rest)

    model.embed = embed
    drawn, _ = sample(
        model, tokenizer, "ab", max_new_tokens=40, top_k=None, stop_at_eot=False, runtime=runtime
    )
    return {
        "shapes": sorted(shapes),
        "new_programs": counts[-1] - counts[2],
        "num_tokens": len(drawn[0].tokens),
        "max_id": max(drawn[0].tokens),
    }


def main(data, work):
    work = Path(work)
    facts = {}
    result = train(config(data, work / "ten", num_steps=10, checkpoint_every=None))
    facts["next_cell"] = next_cell(result, data)
    facts["tied"] = ties_after(train(config(data, work / "tied", num_steps=2), model=Tied()).model)
    lines = [r for r in read_metrics(work / "ten") if "loss" in r]
    facts["max_logits"] = [r["max_attention_logit"] for r in lines]
    facts["ten_losses"] = losses(work / "ten")
    facts["ten_val_losses"] = [r["val_loss"] for r in read_metrics(work / "ten") if "val_loss" in r]
    runtime = Runtime("xla-cpu:8", "fp32")
    facts["placement"] = placement(runtime, data)
    narrow = Runtime("xla-cpu:8", "bf16")
    facts["measure_programs"] = measure_programs(narrow, data, work / "unused")
    for optimizer in ("adamw", "muon"):
        counts = program_counts(runtime, data, work / "unused", optimizer)
        facts[f"programs_{optimizer}"] = counts
    train(config(data, work / "muon", num_steps=10, optimizer="muon"))
    facts["muon_losses"] = losses(work / "muon")
    facts["sampling"] = shapes_seen(work / "ten", runtime)

    dropout = {"num_steps": 20, "dropout": 0.1, "tokens_per_step": 1024, "eval_every": None}
    train(config(data, work / "straight", **dropout))
    train(config(data, work / "parts", **dropout, stop_after_step=7))
    facts["first_part_steps"] = [r["step"] for r in read_metrics(work / "parts")]
    train(config(data, work / "parts", **dropout))
    facts["steps"] = [(r["session"], r["step"]) for r in read_metrics(work / "parts")]
    facts["resume_exact"] = same(work / "straight", work / "parts")
    facts["resume_losses"] = losses(work / "straight") == losses(work / "parts")

    five = {"num_steps": 5, "eval_every": None, "n_layer": 2}
    for share in (0.0, 0.2):
        for on in (False, True):
            out = work / f"recompute_{share}_{on}"
            train(config(data, out, **five, dropout=share, gradient_checkpointing=on))
        facts[f"recompute_{share}"] = [
            losses(work / f"recompute_{share}_{on}") for on in (False, True)
        ]
    for name, precision in (("bf16", "bf16"), ("bf16_exact", "fp32")):
        train(config(data, work / name, num_steps=10, precision=precision, qk_norm=True))
        facts[f"{name}_losses"] = losses(work / name)
    state = weights(work / "bf16")
    facts["bf16_state_dtypes"] = sorted({str(t.dtype) for part in state for t in part.values()})
    print("FACTS " + json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
