"""metrics.jsonl: one JSON object a line, appended as the run goes and readable while it does.

`MetricsLog` writes it; `History.read` gives it back as columns with a wall clock.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_tpu.errors import UserError

METRICS, SAMPLES = "metrics.jsonl", "samples"
Columns = dict[str, np.ndarray]
_KEYS = (
    "step", "tokens", "loss", "val_loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s",
    "mfu", "eval_s", "time", "session",
)  # fmt: skip
_MUST_BE_FINITE = ("loss", "val_loss", "lr", "grad_norm")


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
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
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


@dataclass(frozen=True)
class Session:
    """One process's part of a run."""

    number: int
    started: float
    """Unix time in s; NaN if the log has no times."""
    start_step: int
    start_tokens: float
    start_wall_s: float
    """Training time of the sessions before it; gaps between sessions do not count."""
    wall_s: float
    last_step: int


@dataclass(frozen=True)
class History:
    """metrics.jsonl as columns: float64 (n,) by key, NaN where absent, null or not finite.

    Both tables also have "wall_s", seconds of training time so far, all NaN in a log without times.
    """

    training: Columns
    evaluations: Columns
    sessions: list[Session]
    non_finite: list[tuple[int, str]]
    """(step, key) of every loss, rate or norm that was logged but is no finite number."""

    @property
    def wall_s(self) -> float:
        """Training time of all sessions, the gaps between them left out; NaN without times."""
        return self.sessions[-1].start_wall_s + self.sessions[-1].wall_s

    @staticmethod
    def read(run_dir: Path) -> "History":
        """Read a run folder.

        Raises:
            UserError: no metrics, a line that is none of ours, or no finite loss; what to do.
        """
        lines = [
            (f"{run_dir / METRICS}:{number}", record)
            for number, record in enumerate(read_metrics(run_dir), start=1)
            if "loss" in record or "val_loss" in record
        ]
        if not lines:
            raise UserError(
                f"{run_dir}: {METRICS} holds no loss yet; train at least one logged step"
            )
        rows = [[_number(record, key, where) for key in _KEYS] for where, record in lines]
        table = dict(zip(_KEYS, np.array(rows).T, strict=True))
        if not (np.isfinite(table["loss"]) | np.isfinite(table["val_loss"])).any():
            raise UserError(
                f"{run_dir}: no loss in {METRICS} is finite, nothing was learned; train again with "
                "--resume never and a lower learning_rate or more warmup_steps"
            )
        sessions = _add_wall_time(table)
        is_training = np.array(["loss" in record for _, record in lines])
        is_evaluation = np.array(["val_loss" in record for _, record in lines])
        return History(
            training={key: column[is_training] for key, column in table.items()},
            evaluations={key: column[is_evaluation] for key, column in table.items()},
            sessions=sessions,
            non_finite=[
                (int(record["step"]), key)
                for row, (_, record) in enumerate(lines)
                for key in _MUST_BE_FINITE
                if key in record and not np.isfinite(table[key][row])
            ],
        )


def _number(record: dict[str, Any], key: str, where: str) -> float:
    """A value of one line as float; NaN for absent, null and not finite."""
    value = record.get(key)
    if value is None and key not in ("step", "tokens"):
        return math.nan
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        shown = "missing" if value is None else f"{str(value)[:40]!r}, not a number"
        raise UserError(f"{where}: {key} is {shown}; remove the line") from error
    if key in ("step", "tokens") and not math.isfinite(number):
        raise UserError(f"{where}: {key} is {number}; remove the line")
    return number if math.isfinite(number) else math.nan


def _add_wall_time(table: Columns) -> list[Session]:
    """Add the column "wall_s" and return the sessions, in the order of the log."""
    numbers = table["session"] = np.nan_to_num(table["session"], nan=1.0)
    table["wall_s"] = np.full(numbers.shape, np.nan)
    has_times = bool(np.isfinite(table["time"]).all())
    sessions: list[Session] = []
    step, tokens, wall_s = 0, 0.0, 0.0
    for number in dict.fromkeys(numbers):
        rows = np.flatnonzero(numbers == number)
        first, last = rows[0], rows[-1]
        # The first line is written some time after the start: by so much work, or one evaluation.
        lead_s = table["eval_s"][first]
        if math.isfinite(table["loss"][first]) and table["tokens_per_s"][first] > 0:
            lead_s = (table["tokens"][first] - tokens) / table["tokens_per_s"][first]
        started = float(table["time"][first] - max(0.0, np.nan_to_num(lead_s)))
        length_s = float(table["time"][last]) - started if has_times else math.nan
        if has_times:
            table["wall_s"][rows] = wall_s + table["time"][rows] - started
        last_step = int(table["step"][last])
        sessions.append(Session(int(number), started, step, tokens, wall_s, length_s, last_step))
        step, tokens, wall_s = last_step, float(table["tokens"][last]), wall_s + length_s
    return sessions
