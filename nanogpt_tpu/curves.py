"""The curves of a run, drawn.

    history = History.read(Path("run"))
    draw_loss(history, "my first run", Path("loss.png"))
    pictures = draw_panels(history, grad_clip=1.0)          # name -> inline SVG

Pictures are matplotlib Figures without pyplot: no global state, fit for a notebook's own process.
Says nothing about what the curves mean (report.py does).
"""

import io
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from nanogpt_tpu.metrics import History

_MAX_POINTS = 300  # a curve of more is binned: a phone shows no more, and the file stays small

_TIMES = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))

# Drawn in these; in an SVG each becomes the CSS variable of that name, so pages can have dark ones.
_COLORS = {
    "ink": "#1c2430", "muted": "#6b7686", "line": "#dde2ea",
    "train": "#3563c9", "val": "#d2600f", "alert": "#c5283d",
}  # fmt: skip
_STYLE: dict[Any, Any] = {  # newer matplotlib types every key
    "font.size": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.edgecolor": _COLORS["line"], "axes.linewidth": 1.0,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": _COLORS["line"], "grid.linewidth": 1.0,
    "axes.axisbelow": True, "text.color": _COLORS["ink"], "axes.labelcolor": _COLORS["muted"],
    "xtick.color": _COLORS["muted"], "ytick.color": _COLORS["muted"],
    "xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0,
    "legend.frameon": False, "lines.linewidth": 1.6, "lines.solid_capstyle": "round",
}  # fmt: skip


@rc_context(_STYLE)
def draw_loss(history: History, title: str, path: Path) -> None:
    """Draw the loss over tokens as a PNG of 1200 x 675 pixels, for posting."""
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout=layout)
    axes = figure.subplots()
    _draw(axes, history, "loss", "tokens", num_labels=6)
    axes.set_ylabel("loss (nats per token)")
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    if not all(font.get_char_index(ord(letter)) for letter in title):
        title = title.encode("ascii", "ignore").decode().strip(" :")  # no boxes for letters
    title = "\n".join(textwrap.wrap(title, 62))
    figure.suptitle(title, x=0.02, ha="left", fontsize=14, fontweight="bold", parse_math=False)
    figure.savefig(path, format="png")


@rc_context(_STYLE | {"svg.fonttype": "none"})
def draw_panels(history: History, grad_clip: float | None) -> dict[str, str]:
    """Draw every curve over tokens and over wall time, for a page.

    Args:
        history: the run.
        grad_clip: marked in the picture of the gradient norm.

    Returns:
        Inline SVG by "{key}-{tokens|wall_s}", key one of loss (1000 units wide), loss-small, lr,
        grad_norm, tokens_per_s (360 units wide, so that text keeps its size on a phone). What the
        log does not hold is left out.
    """
    sizes = {"loss": (1000, 340), "loss-small": (360, 280)}
    pictures = {}
    for over in ("tokens", "wall_s"):
        if over == "wall_s" and np.isnan(history.wall_s):
            continue
        for name in ("loss", "loss-small", "lr", "grad_norm", "tokens_per_s"):
            key = name.removesuffix("-small")
            if key != "loss" and not np.isfinite(history.training[key]).any():
                continue
            width, height = sizes.get(name, (360, 230))
            figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
            axes = figure.subplots()
            _draw(axes, history, key, over, num_labels=6 if width == 1000 else 3)
            if key == "grad_norm" and grad_clip is not None:
                axes.axhline(grad_clip, color=_COLORS["val"], linestyle=(0, (5, 3)), linewidth=1.2)
            pictures[f"{name}-{over}"] = _to_svg(figure, f"{name}-{over}")
    return pictures


def _draw(axes: Axes, history: History, key: str, over: str, num_labels: int) -> None:
    """One curve with its session starts, evaluations (of the loss) and non-finite values."""
    unit, name = 1.0, "tokens"
    if over == "wall_s":
        unit, name = next((u, n) for u, n in _TIMES if history.wall_s >= 2 * u or u == 1)
    axes.set_xlabel(name)
    training = history.training
    is_bad = np.isin(training["step"], [step for step, k in history.non_finite if k == key])
    _draw_curve(axes, training[over] / unit, training[key], is_bad)
    if key == "loss":
        x, y = history.evaluations[over] / unit, history.evaluations["val_loss"]
        if x.size:
            axes.plot(x, y, "o-", color=_COLORS["val"], markersize=4.5, label="validation")
    for session in history.sessions[1:]:
        start = (session.start_tokens if over == "tokens" else session.start_wall_s) / unit
        axes.axvline(start, color=_COLORS["muted"], linestyle=(0, (2, 3)), linewidth=1.1)
        if key == "loss" and len(history.sessions) <= num_labels:
            axes.annotate(
                f"session {session.number}", (start, 1), xycoords=axes.get_xaxis_transform(),
                xytext=(4, -2), textcoords="offset points", va="top", fontsize=10.5,
                color=_COLORS["muted"],
            )  # fmt: skip
    _set_scales(axes, key)
    if key == "loss":
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
        _cut_start(axes, history)


def _draw_curve(axes: Axes, x: np.ndarray, y: np.ndarray, is_bad: np.ndarray) -> None:
    """The line of a training column, the spread it hides, and crosses for what is not finite."""
    middle, mean, low, high = _thin(x, y)
    marker = "o" if np.isfinite(mean).sum() <= 60 else None  # few points, maybe a lone one
    axes.plot(middle, mean, color=_COLORS["train"], marker=marker, markersize=2.8, label="training")
    if x.size > _MAX_POINTS:
        axes.fill_between(middle, low, high, color=_COLORS["train"], alpha=0.22, linewidth=0)
    if is_bad.any():
        axes.plot(
            x[is_bad][-_MAX_POINTS:], np.full(min(is_bad.sum(), _MAX_POINTS), 0.04), "x",
            color=_COLORS["alert"], transform=axes.get_xaxis_transform(), label="not finite",
        )  # fmt: skip


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """At most _MAX_POINTS bins: middle of x; mean, least and greatest finite y, NaN if none."""
    if x.size <= _MAX_POINTS:
        return x, y, y, y
    starts = np.linspace(0, x.size, _MAX_POINTS, endpoint=False).astype(int)
    finite = np.isfinite(y)
    counts = np.add.reduceat(finite.astype(float), starts)
    sums = np.add.reduceat(np.where(finite, y, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    middles = np.add.reduceat(x, starts) / np.diff([*starts, x.size])
    return middles, means, np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)


def _set_scales(axes: Axes, key: str) -> None:
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if key == "grad_norm":
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if key in ("lr", "tokens_per_s"):
        axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _cut_start(axes: Axes, history: History) -> None:
    """Let the first tenth of the run leave the picture at the top where it would flatten the rest.

    A model starts at ln(vocab_size), far above all that follows in a long run.
    """
    tables = ((history.training, "loss"), (history.evaluations, "val_loss"))
    tokens = np.concatenate([table["tokens"] for table, _ in tables])
    losses = np.concatenate([table[key] for table, key in tables])
    later = losses[np.isfinite(losses) & (tokens > tokens.max() / 10)]
    if later.size > 100:
        top = later.min() + 3 * np.ptp(later)
        if top < np.nanmax(losses):
            axes.set_ylim(later.min() - 0.1 * np.ptp(later), top)


def short_number(value: float) -> str:
    """A number for people, to three digits: 0.5, 819k, 4.2M, 10B."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _to_svg(figure: Figure, name: str) -> str:
    """The figure as SVG to stand inside a page: no addresses, ids of its own, colours of CSS."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": name}):  # ids are hashes: the salt tells pictures apart
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"|<defs>\s*<style.*?</style>\s*</defs>', "", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    for color, code in _COLORS.items():
        svg = svg.replace(code, f"var(--{color})")
    return re.sub(r"\n\s*", " ", svg)
