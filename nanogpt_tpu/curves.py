"""Pictures of a run, as PNG, and one that moves while a notebook cell trains.

    train(config, on_log=LiveCurve())

Figures are made without pyplot: no global state in the notebook's own process.
"""

import io
import math
import time
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.metrics import Table, to_table

LABELS = {
    "loss": "loss (nats per token)", "lr": "learning rate", "grad_norm": "gradient norm",
    "tokens_per_s": "tokens per second",
}  # fmt: skip
_STYLE: dict[Any, Any] = {  # newer matplotlib types every key
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#98a1ae",
    "axes.grid": True, "grid.color": "#e6e9ee", "xtick.color": "#5d6878", "ytick.color": "#5d6878",
    "axes.labelcolor": "#5d6878", "axes.titlelocation": "left", "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.1,
}  # fmt: skip


@rc_context(_STYLE)
def draw(
    table: Table,
    key: str,
    over: str = "tokens",
    title: str = "",
    clip: float = math.nan,
    size: tuple[float, float] = (5.4, 3.0),
) -> bytes:
    """Draw a column of a run, one of LABELS, over "tokens" or "wall_s"; a PNG.

    Dotted lines mark where sessions ended, a red one the first value that is not finite, a dashed
    one the norm `clip`. `size` is in units of 150 pixels.
    """
    figure = Figure(size, dpi=150, layout="constrained")
    axes = figure.subplots()
    x, name = table[over], "tokens"
    if over == "wall_s":
        unit_s, unit = (3600, "hours") if x[-1] > 7200 else (60, "minutes")
        x, name = x / unit_s, f"training time ({unit})"
    axes.set(title=title, xlabel=name, ylabel=LABELS[key])
    curves = [(key, "C0.-", "training"), ("val_loss", "C1o-", "validation")]
    for column, style, label in curves if key == "loss" else curves[:1]:
        x_shown, y = _points(x, table[column])
        if y.size:
            axes.plot(x_shown, y, style, markersize=4 if y.size < 150 else 0, label=label)
    if math.isfinite(clip):
        axes.axhline(clip, color="C1", linestyle="--", label=f"clipped above {clip:g}")
    if key != "loss":
        axes.set_ylim(bottom=0)
    if axes.lines[1:]:
        axes.legend()
    is_end = np.diff(table["session"], append=table["session"][-1]) != 0
    for at in x[is_end]:
        axes.axvline(at, color="#5d6878", linestyle=":")
    for at in x[table["is_bad"]][:1]:
        axes.axvline(at, color="C3")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(lambda value, _: short_number(value))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _points(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The finite points, averaged in groups if they are more than a picture can show."""
    is_finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    group = x.size // 1000 or 1
    first = x.size % group
    return x[first:].reshape(-1, group).mean(1), y[first:].reshape(-1, group).mean(1)


def short_number(value: float) -> str:
    """A number for people, to three digits: 0.5, 819k, 4.2M, 10B."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


class LiveCurve:
    """Called with each line of metrics; redraws one picture under the cell, at most so often."""

    def __init__(self, every_s: float = 5.0) -> None:
        """Wait `every_s` seconds between pictures, so that drawing never slows training.

        Raises:
            UserError: IPython is not installed, so there is no notebook to draw in.
        """
        try:
            from IPython.display import Image, display
        except ImportError as error:
            raise UserError("LiveCurve draws in a notebook; elsewhere leave on_log out") from error
        self._image, self._display = Image, display
        self._every_s, self._drawn_s = every_s, -float("inf")
        self._handle: Any = None
        self._records: list[dict[str, Any]] = []

    def __call__(self, record: dict[str, Any]) -> None:
        """Take one line; draw if it is time, and always after an evaluation."""
        self._records.append(record)
        is_evaluation = record.get("val_loss") is not None
        if is_evaluation or time.monotonic() - self._drawn_s >= self._every_s:
            picture = self._image(draw(to_table(self._records), "loss", size=(6, 2.7)))
            if self._handle is None:
                self._handle = self._display(picture, display_id=True)
            else:
                self._handle.update(picture)
            self._drawn_s = time.monotonic()
