"""Does the TPU's form of the model (bf16, lean backward passes) learn what plain fp32 learns?

    python benchmarks/lean_path.py    # ten minutes: 300 steps of each on eight virtual devices

The same small model, seed and batches; the loss of the last 30 steps is compared.
"""

import statistics
import tempfile
from pathlib import Path

import nanogpt_tpu as ng

ng.patch_tpu_env("xla-cpu:8")

from nanogpt_tpu.metrics import read_metrics

SHAPE = {"n_layer": 4, "n_head": 2, "n_embd": 128, "block_size": 128, "vocab_size": 2048}
RUN = {
    "num_steps": 300, "micro_batch_size": 1, "tokens_per_step": 2048, "warmup_steps": 20,
    "log_every": 1, "eval_every": None, "sample_every": None, "checkpoint_every": None,
    "learning_rate": 4e-3, "device": "xla-cpu:8",
}  # fmt: skip


def last_loss(data: Path, out: Path, preset: str, precision: str) -> float:
    """Mean training loss of the last 30 steps."""
    config = ng.preset(preset, **SHAPE, **RUN, precision=precision, data=data, out=out)
    ng.train(config)
    losses = [record["loss"] for record in read_metrics(out) if "loss" in record]
    assert len(losses) == RUN["num_steps"]
    return statistics.mean(losses[-30:])


def main() -> None:
    """Train all, print a row for each preset."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        ng.prepare("demo", work / "data", train_tokenizer=2048, max_tokens=800_000)
        for preset in ("tpu-fast", "gpt2"):
            plain, lean = (
                last_loss(work / "data", work / f"{preset}_{precision}", preset, precision)
                for precision in ("fp32", "bf16")
            )
            print(
                f"{preset}: plain fp32 {plain:.4f}, lean bf16 {lean:.4f}: {lean / plain - 1:+.2%}"
            )


if __name__ == "__main__":
    main()
