"""Pictures of a run, drawn from its metrics.jsonl."""

import os
from pathlib import Path

from matplotlib.figure import Figure

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.metrics import METRICS, read_metrics

LOSS_PICTURE = "loss.png"


def report(run_dir: str | os.PathLike[str]) -> Path:
    """Draw loss.png into the run folder: training and validation loss over tokens.

    Returns its path.

    Raises:
        UserError: no metrics there, or no loss among them.
    """
    folder = Path(run_dir)
    records = [record for record in read_metrics(folder) if "tokens" in record]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # no pyplot: no global state
    axes = figure.subplots()
    drawn = False
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o--")):
        points = [(r["tokens"], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.4, markersize=4)
            drawn = True
    if not drawn:
        raise UserError(f"{folder}: {METRICS} holds no loss yet; train at least one logged step")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(folder.resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / LOSS_PICTURE
    figure.savefig(path)
    return path
