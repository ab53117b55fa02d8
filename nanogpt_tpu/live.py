"""A loss curve that moves while a notebook cell trains: `train(config, on_log=LiveCurve())`."""

import io
import time
from typing import Any

from matplotlib.figure import Figure

from nanogpt_tpu.errors import UserError


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
        self._points: dict[str, list[tuple[int, float]]] = {"loss": [], "val_loss": []}

    def __call__(self, record: dict[str, Any]) -> None:
        """Take one line; draw if it is time, and always after an evaluation."""
        for key, points in self._points.items():
            if record.get(key) is not None:
                points.append((record["tokens"], record[key]))
        is_evaluation = record.get("val_loss") is not None
        if is_evaluation or time.monotonic() - self._drawn_s >= self._every_s:
            picture = self._image(data=self._draw(), format="png")
            if self._handle is None:
                self._handle = self._display(picture, display_id=True)
            else:
                self._handle.update(picture)
            self._drawn_s = time.monotonic()

    def _draw(self) -> bytes:
        figure = Figure(figsize=(8, 3.6), dpi=100, layout="constrained")
        axes = figure.subplots()
        for key, style, label in (("loss", "-", "training"), ("val_loss", "o--", "validation")):
            if self._points[key]:
                tokens, losses = zip(*self._points[key], strict=True)
                axes.plot(tokens, losses, style, label=label, linewidth=1.4, markersize=5)
        axes.set(xlabel="tokens", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()
