"""How many tokens a recipe needs: GPT-2's, the first Kaggle recipe's and ours, at small scale.

    python benchmarks/recipes.py run       # a learning-rate sweep, the headline, the ablations
    python benchmarks/recipes.py table     # what the results say, and recipes.png

All models have 4 layers, width 192, 256 tokens and the same data, tokens, batch and seeds; each
recipe has its best learning rate of a sweep, which goes on until the best is not at its edge. The
text is the docstrings of the scientific packages in the environment: 19 MB, so that no run sees a
token twice. A recipe is given a full schedule of its own for each
budget of tokens: it counts as reaching a loss only with a run that ends there. Results are appended
to recipes.jsonl, and a run that is in it is not made again, so that this may take several sittings.
"""

import argparse
import ast
import json
import statistics
import sysconfig
import tempfile
from hashlib import sha256
from pathlib import Path

import nanogpt_tpu as ng

ng.patch_tpu_env("cpu")

from matplotlib.figure import Figure

from nanogpt_tpu.metrics import read_metrics

HERE = Path(__file__).parent
RESULTS = HERE / "recipes.jsonl"
FULL_STEPS = 300
SMALL = {
    "n_layer": 4, "n_embd": 192, "block_size": 256, "micro_batch_size": 4,
    "tokens_per_step": 4096, "precision": "fp32", "device": "cpu", "gradient_checkpointing": False,
    "log_every": 5, "eval_every": 25, "eval_tokens": 49_152, "checkpoint_every": None,
    "checkpoint_minutes": None, "sample_every": None, "resume": "never",
}  # fmt: skip
RECIPES = {
    "gpt2": {"preset": "gpt2", "n_head": 4},
    "blog": {"preset": "blog", "n_head": 4},
    "tpu-fast": {"preset": "tpu-fast", "n_head": 2},
}
FIRST_RATES = (2e-3, 4e-3)  # the sweep goes on by factors of 2
PACKAGES = ("scipy", "sympy", "torch", "pandas", "networkx", "numpy", "jax", "matplotlib")
SEEDS = (1, 2, 3)
SHARES = (0.35, 0.5)  # of the full tokens, for ours
ABLATIONS = {  # one part of tpu-fast back to GPT-2's
    "AdamW instead of Muon": {"optimizer": "adamw"},
    "cosine to 10 % instead of WSD to 0": {"schedule": "cosine", "min_lr_ratio": 0.1},
    "learned positions instead of RoPE": {"position": "learned"},
    "no QK-norm": {"qk_norm": False},
    "GELU instead of squared ReLU": {"mlp": "gelu"},
    "LayerNorm instead of RMSNorm": {"norm": "layernorm"},
    "small random instead of zero projections": {"zero_init_residual": False},
    "biases": {"bias": True},
    "4 heads of 48 instead of 2 of 96": {"n_head": 4},
    "attention in fp32 under bf16": {"precision": "bf16", "attention_fp32": True},
    "attention in bf16 under bf16": {"precision": "bf16"},
}


def done_runs():
    """Results so far, by name."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def run(data, name, settings, learning_rate, seed, num_steps):
    """Train once, unless the results have it; its result."""
    name = f"{name}, rate {learning_rate:g}, seed {seed}, {num_steps} steps"
    results = done_runs()
    if name in results:
        return results[name]
    settings = {**settings, **SMALL, **{k: v for k, v in settings.items() if k == "precision"}}
    preset = settings.pop("preset")
    with tempfile.TemporaryDirectory() as folder:
        config = ng.preset(
            preset, **settings, data=str(data), out=f"{folder}/run", seed=seed,
            num_steps=num_steps, learning_rate=learning_rate, warmup_steps=num_steps // 15,
        )  # fmt: skip
        if ng.train(config).stopped_because != "done":
            raise SystemExit("interrupted: run the same command again to go on")
        curve = [
            (r["tokens"], r["val_loss"]) for r in read_metrics(Path(folder) / "run")
            if "val_loss" in r
        ]  # fmt: skip
    result = {"name": name, "val_loss": curve[-1][1], "curve": curve}
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return result


def docstrings():
    """Long docstrings of the packages, each once, in an order that mixes them."""
    library = Path(sysconfig.get_paths()["purelib"])
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = set()
    for package in PACKAGES:
        for path in (library / package).rglob("*.py"):
            tree = ast.parse(path.read_bytes())
            docs = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
            found.update(doc for doc in docs if doc and len(doc) > 500)
    return sorted(found, key=lambda text: sha256(text.encode()).digest())


def best_rate(data, recipe):
    """The learning rate that ends lowest, with a worse one on either side of it."""
    losses = {}

    def loss(rate):
        if rate not in losses:
            losses[rate] = run(data, recipe, RECIPES[recipe], rate, 1, FULL_STEPS)["val_loss"]
        return losses[rate]

    best = min(FIRST_RATES, key=loss)
    while better := [rate for rate in (best / 2, best * 2) if loss(rate) < losses[best]]:
        best = min(better, key=loss)
    return best


def run_all(data):
    """Every run of the table, the most telling first."""
    rates = {recipe: best_rate(data, recipe) for recipe in ("gpt2", "tpu-fast", "blog")}
    ours = RECIPES["tpu-fast"]
    for seed in SEEDS:
        run(data, "gpt2", RECIPES["gpt2"], rates["gpt2"], seed, FULL_STEPS)
        for share in SHARES:
            steps = round(FULL_STEPS * share)
            run(data, "tpu-fast", ours, rates["tpu-fast"], seed, steps)
    for name, changes in ABLATIONS.items():
        run(data, f"tpu-fast, {name}", {**ours, **changes}, rates["tpu-fast"], 1, FULL_STEPS // 2)


def table():
    """Print the results and draw the curves."""
    results = done_runs()
    width = max(map(len, results))
    for name, result in results.items():
        print(f"{name:{width}}  {result['val_loss']:.4f}")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    ends = {}
    for name, result in results.items():
        recipe, rest = name.split(", rate ")
        if recipe in RECIPES:
            ends.setdefault((recipe, rest.split(", ")[-1]), []).append(result)
    colors = dict(zip(RECIPES, ("#6b7686", "#3563c9", "#d2600f"), strict=True))
    for (recipe, steps), runs in sorted(ends.items()):
        best = min(runs, key=lambda one: one["val_loss"])
        mean = statistics.mean(one["val_loss"] for one in runs)
        tokens, losses = zip(*best["curve"], strict=True)
        label = f"{recipe}, {steps}: {best['val_loss']:.3f}"
        axes.plot(tokens, losses, color=colors[recipe], label=label, marker="o", markersize=3)
        print(f"{recipe}, {steps}: best {best['val_loss']:.4f}, mean {mean:.4f} of {len(runs)}")
    axes.set(xlabel="tokens", ylabel="validation loss (nats per token)", ylim=(None, 7))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(HERE / "recipes.png")


def main():
    """Run or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("run", "table"))
    if parser.parse_args().action == "table":
        table()
        return
    data = Path(tempfile.gettempdir()) / "nanogpt_tpu_recipes_data"
    ng.prepare(docstrings, data, train_tokenizer=2048)
    run_all(data)


if __name__ == "__main__":
    main()
