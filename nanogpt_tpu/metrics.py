"""metrics.jsonl: one JSON object a line, appended as the run goes and readable while it does."""

import json
import math
from pathlib import Path
from typing import Any

from nanogpt_tpu.errors import UserError

METRICS = "metrics.jsonl"


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
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        return record

    def close(self) -> None:
        """Close the file."""
        self._file.close()
