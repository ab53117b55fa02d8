"""The run card: what a run was, how it went and how to do it again, in one file without network.

    path = report("runs/mine")       # writes loss.png and run_card.html into the run folder

Reads metrics.jsonl, which must be there, and config.json, the newest checkpoint's state.json,
samples/ and the data's manifest where they are: a run that died before its first checkpoint has a
card too. All text from the run folder is untrusted: the template escapes it.
"""

import importlib.resources
import json
import math
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from nanogpt_tpu.checkpoint import find_checkpoints
from nanogpt_tpu.curves import draw_loss, draw_panels, short_number
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.findings import find_problems
from nanogpt_tpu.metrics import History
from nanogpt_tpu.shards import SPLITS, Manifest

LOSS_PICTURE, CARD = "loss.png", "run_card.html"
_NUM_EVALUATIONS, _NUM_SAMPLE_STEPS, _NUM_SAMPLES = 12, 5, 3


@dataclass(frozen=True)
class _Run:
    """All that is known about a run; what is not there is empty."""

    folder: Path
    history: History
    config: dict[str, Any]
    state: dict[str, Any]
    """state.json of the newest checkpoint."""
    manifest: Manifest | None

    @property
    def step(self) -> int:
        """The last step in the log."""
        return self.history.sessions[-1].last_step

    @property
    def is_finished(self) -> bool:
        """Whether it came to its last step."""
        num_steps = self.config.get("num_steps")
        return isinstance(num_steps, int) and self.step >= num_steps

    @property
    def epochs(self) -> float | None:
        """How often the training text was seen; None when its length is not known."""
        num_tokens = _section(self.state, "data").get("num_tokens")
        if self.manifest is not None:
            num_tokens = self.manifest.num_tokens("train")
        if not isinstance(num_tokens, int) or num_tokens <= 0:
            return None
        return (self.last("tokens") or 0.0) / num_tokens

    def last(self, key: str) -> float | None:
        """The last finite value of a column, None if there is none; "tokens" is in both tables."""
        tables = self.history.evaluations, self.history.training
        finite = [table[key][np.isfinite(table[key])] for table in tables]
        return max((float(column[-1]) for column in finite if column.size), default=None)


def report(run_dir: str | os.PathLike[str]) -> Path:
    """Write loss.png and run_card.html into the run folder; returns the path of the card.

    Raises:
        UserError: no metrics, no loss among them, a damaged line, or a folder that cannot be
            written; what to do.
    """
    run = _read_run(Path(run_dir))
    template = importlib.resources.files("nanogpt_tpu").joinpath("run_card.html.j2")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "show": _show, "perplexity": _perplexity, "duration": _duration, "date": _date,
    }  # fmt: skip
    page = environment.from_string(template.read_text("utf-8")).render(**_contents(run))
    path, partial = run.folder / CARD, run.folder / f".{CARD}.tmp"
    try:
        draw_loss(run.history, _headline(run), run.folder / LOSS_PICTURE)
        partial.write_bytes(page.encode("utf-8", "replace"))  # a sample may hold half a surrogate
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written ({error.strerror}): make room, or copy the run folder to "
            "where you may write and report there"
        ) from error
    return path


def _read_run(folder: Path) -> _Run:
    history = History.read(folder)
    checkpoints = find_checkpoints(folder)
    state = checkpoints[0].state if checkpoints else {}
    path, config = folder / "config.json", _section(state, "config")
    if path.is_file():
        try:
            config = dict(json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path} is no JSON object ({error}): restore it, or remove it"
            ) from error
    manifest = None
    with suppress(UserError):  # the data may lie on another machine: state.json still names it
        found = Manifest.load(str(config.get("data")))
        if _section(state, "data").get("identity", found.identity) == found.identity:
            manifest = found
    return _Run(folder, history, config, state, manifest)


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A dict inside a dict; empty if it is not there."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _contents(run: _Run) -> dict[str, Any]:
    """What the template shows."""
    clip = run.config.get("grad_clip")
    clip = clip if isinstance(clip, int | float) else None
    samples, unread = _samples(run)
    return {
        "run": run,
        "name": run.folder.resolve().name,
        "headline": _headline(run),
        "unfinished": _unfinished(run),
        "now": datetime.now(UTC).timestamp(),
        "warnings": [*find_problems(run.history, run.config, run.epochs), *unread],
        "pictures": draw_panels(run.history, clip),
        "clip": clip,
        "evaluations": _evaluations(run.history),
        "sessions": [(s, _speed(run.history, s.number)) for s in run.history.sessions],
        "speed": _speed(run.history),
        "samples": samples,
        "settings": {
            "Model": _section(run.config, "model"),
            "Training": {key: value for key, value in run.config.items() if key != "model"},
        },
        "origin": _origin(run),
        "config_json": json.dumps(run.config, indent=1, ensure_ascii=False),
        "commands": _commands(run),
    }


def _headline(run: _Run) -> str:
    """The run in one line."""
    name, tokens = run.folder.resolve().name, short_number(run.last("tokens") or 0.0)
    val_loss = run.last("val_loss")
    what, loss = ("training", run.last("loss")) if val_loss is None else ("validation", val_loss)
    return f"{name}: {what} loss {loss:.3f} after {tokens} tokens"


def _unfinished(run: _Run) -> str:
    """Where a run that is not finished stands, and from where it goes on."""
    step, where = run.state.get("step"), f"step {run.step:,}"
    if isinstance(num_steps := run.config.get("num_steps"), int):
        where += f" of {num_steps:,}"
    if step is None:
        return f"The run stands at {where}. There is no checkpoint: it starts anew"
    return f"The run stands at {where}. It goes on from the checkpoint of step {step:,}"


def _evaluations(history: History) -> list[dict[str, float]]:
    """Rows of the table: all evaluations, or some if there are many."""
    table = history.evaluations
    rows = _spread(table["step"].size, _NUM_EVALUATIONS)
    return [{key: float(column[row]) for key, column in table.items()} for row in rows]


def _speed(history: History, session: int | None = None) -> float | None:
    """Median of tokens/s, over all sessions or in one."""
    rates, sessions = history.training["tokens_per_s"], history.training["session"]
    is_counted = np.isfinite(rates) & ((session is None) | (sessions == session))
    return float(np.median(rates[is_counted])) if is_counted.any() else None


def _samples(run: _Run) -> tuple[list[dict[str, Any]], list[str]]:
    """What it wrote at the first, the last and some steps between; a line for each unread file."""
    found: list[dict[str, Any]] = []
    unread = []
    for path in sorted((run.folder / "samples").glob("step_*.json")):
        try:
            values = json.loads(path.read_text("utf-8"))
            texts = [
                (str(sample["prompt"]), str(sample["text"]).removeprefix(str(sample["prompt"])))
                for sample in values["samples"][:_NUM_SAMPLES]
            ]
            found.append({"step": int(values["step"]), "texts": texts})
        except (OSError, ValueError, KeyError, TypeError) as error:
            unread.append(f"{path.name} in samples/ cannot be read ({error!r}): remove it.")
    found = [entry for entry in found if entry["step"] <= run.step]  # else of a run before this one
    table = run.history.evaluations
    for entry in found:
        losses = table["val_loss"][table["step"] == entry["step"]]
        entry["val_loss"] = losses[-1] if losses.size else None
    return [found[index] for index in _spread(len(found), _NUM_SAMPLE_STEPS)], unread


def _origin(run: _Run) -> dict[str, dict[str, Any]]:
    """What the weights came from."""
    data, tokenizer = _section(run.state, "data"), _section(run.state, "tokenizer")
    facts: dict[str, Any] = {"folder": run.config.get("data", "-")}
    if run.manifest is not None:
        data = {"source": run.manifest.source, "identity": run.manifest.identity}
        tokenizer = run.manifest.tokenizer
        for split in SPLITS:
            facts[f"{split} tokens"] = f"{run.manifest.num_tokens(split):,}"
        facts["documents"] = f"{run.manifest.num_documents:,}"
        facts["prepared with"] = ", ".join(f"{k}={v}" for k, v in run.manifest.settings.items())
    facts |= {"source": data.get("source", "-"), "identity (sha256)": data.get("identity", "-")}
    for name in ("kind", "vocab_size", "sha256"):
        facts[f"tokenizer {name}"] = tokenizer.get(name, "-")
    versions = _section(run.state, "versions") or {"software": "known from the first checkpoint on"}
    versions = {**versions, "git commit": run.state.get("git_commit") or "-"}
    return {"Data and tokenizer": facts, "Versions": versions}


def _commands(run: _Run) -> dict[str, str]:
    """How to go on and how to do it again; nothing without config.json."""
    path = run.folder / "config.json"
    if not path.is_file():
        return {}
    train = f"nanogpt-tpu train --config {shlex.quote(os.fspath(path))}"
    if run.config.get("stop_after_step") is not None:
        train += " --stop-after-step none"
    losses, rate = run.history.training["loss"], run.config.get("learning_rate")
    go_on = train
    if Path(str(run.config.get("out"))).absolute() != run.folder.absolute():
        go_on += f" --out {shlex.quote(os.fspath(run.folder))}"
    if losses.size and np.isnan(losses[-1]) and isinstance(rate, float):
        go_on += f" --learning-rate {rate / 2:g}"  # a resume is exact: unchanged it fails again
    folder = run.folder.parent / f"{run.folder.resolve().name}-again"
    again = f"{train} --out {shlex.quote(os.fspath(folder))} --resume never"
    return {"continue": go_on, "again": again}


def _spread(size: int, most: int) -> list[int]:
    """At most `most` of the indices below `size`: the first, the last, evenly between."""
    return sorted({round(index) for index in np.linspace(0, size - 1, min(size, most))})


def _show(value: float | None, form: str = "") -> str:
    """A number in a format, "-" if it is not known."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:{form}}" if form else short_number(value)


def _perplexity(loss: float | None) -> str:
    return _show(None if loss is None or loss > 700 else math.exp(loss), ",.1f")


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def _date(unix_s: float) -> str:
    if not 0 <= unix_s < 2**35:  # no time in the log, or none of this millennium
        return "-"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")
