"""metrics.jsonl: one JSON object a line, appended as the run goes and readable while it does.

`MetricsLog` writes it; `read_metrics` gives it back as records, `to_table` those as columns.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_tpu.errors import UserError

METRICS, SAMPLES = "metrics.jsonl", "samples"
COLUMNS = (
    "step", "tokens", "time", "session", "loss", "lr", "grad_norm", "max_attention_logit",
    "tokens_per_s", "mfu", "val_loss", "bits_per_byte",
)  # fmt: skip
_MUST_BE_FINITE = ("loss", "val_loss", "grad_norm")
Table = dict[str, np.ndarray]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a torn last line (the process was killed) is left out.

    Raises:
        UserError: no metrics, or a line before the last that is no JSON object.
    """
    path = run_dir / METRICS
    if not path.is_file():
        raise UserError(f"{run_dir} holds no {METRICS}: not a run folder, or nothing was logged")
    lines = path.read_text("utf-8", "replace").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{path}:{number} is not JSON ({error}): remove it") from error
        else:
            records.append(record)
    return records


class MetricsLog:
    """Appends lines to a run's metrics. Lines past `step` are dropped: they will be run again."""

    def __init__(self, run_dir: Path, step: int) -> None:
        """Open the log of a run that stands at `step` (0: a new run, whose log starts empty)."""
        self._run_dir = run_dir
        path = run_dir / METRICS
        kept = []
        if step > 0 and path.is_file():
            kept = [record for record in read_metrics(run_dir) if record.get("step", 0) <= step]
        self.session = 1 + max((record.get("session", 0) for record in kept), default=0)
        partial = path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), "utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> dict[str, Any]:
        """Append one line and return it as written: `session` added, non-finite numbers null."""
        record = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in {**values, "session": self.session}.items()
        }
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self._file.name} cannot be written ({error}): make room") from error
        return record

    def write_samples(self, step: int, tokens: int, samples: list[dict[str, str]]) -> None:
        """Keep what the model wrote at a step: [{"prompt", "text"}]."""
        path = self._run_dir / SAMPLES / f"step_{step:08d}.json"
        path.parent.mkdir(exist_ok=True)
        record = {"step": step, "tokens": tokens, "samples": samples}
        path.write_text(json.dumps(record, ensure_ascii=False, indent=1), "utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def to_table(records: list[dict[str, Any]], source: object = METRICS) -> Table:
    """Records as columns: float64 (n,) by name, NaN where absent, null or not finite.

    Two columns are ours: `is_bad`, whether a logged loss or norm is not finite, and `wall_s`,
    seconds of training so far, the gaps between sessions left out.

    Raises:
        UserError: a record of `source` has no step or tokens, or a value that is no number.
    """
    rows = []
    for number, record in enumerate(records, start=1):
        try:
            known = {k: float("nan" if v is None else v) for k, v in record.items() if k in COLUMNS}
            row = [known.get(key, math.nan) for key in COLUMNS]
            if not math.isfinite(row[0] + row[1]):
                raise ValueError("step or tokens is missing")
            is_good = all(math.isfinite(known.get(key, 0)) for key in _MUST_BE_FINITE)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{source}:{number} is no line of ours ({error}): remove it") from error
        rows.append([*row, not is_good])
    values = np.array(rows, dtype=float).reshape(-1, len(COLUMNS) + 1)
    values[~np.isfinite(values)] = math.nan
    table = dict(zip((*COLUMNS, "is_bad"), values.T, strict=True))
    table["is_bad"] = table["is_bad"] > 0
    table["session"] = np.nan_to_num(table["session"], nan=1)
    seconds = np.diff(table["time"], prepend=math.nan)
    is_start = (np.diff(table["session"], prepend=-1) != 0) & np.isfinite(table["time"])
    # The first line of a session comes when its first tokens are done, at the speed it names.
    lead_s = np.diff(table["tokens"], prepend=0) / table["tokens_per_s"]
    seconds[is_start] = np.nan_to_num(lead_s[is_start], posinf=0)
    table["wall_s"] = np.cumsum(np.maximum(seconds, 0))
    return table


def finite(values: np.ndarray) -> np.ndarray:
    """The values that are finite."""
    return values[np.isfinite(values)]
