"""The run card: what a run was, how it went and how to do it again, in one file without network.

Reads metrics.jsonl, which must be there, and config.json, the newest checkpoint's state.json,
samples/ and the data's manifest where they are: a run that died early has a card too. All text of
the run folder is untrusted: the template escapes it.
"""

import base64
import json
import math
import os
import shlex
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from nanogpt_tpu.checkpoint import find_checkpoints
from nanogpt_tpu.config import ModelConfig
from nanogpt_tpu.curves import LABELS, draw, short_number
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.findings import find_problems, number
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.metrics import METRICS, SAMPLES, Table, finite, read_metrics, to_table
from nanogpt_tpu.model import GPT

_SAMPLE_STEPS, _SAMPLES_A_STEP = 5, 3


def report(run_dir: str | os.PathLike[str]) -> Path:
    """Write loss.png and run_card.html into the run folder; returns the path of the card.

    Raises:
        UserError: no metrics, no finite loss among them, a damaged line or config.json, or a
            folder that cannot be written; what to do.
    """
    folder = Path(run_dir)
    table = to_table(read_metrics(folder), folder / METRICS)
    if not np.isfinite([table["loss"], table["val_loss"]]).any():
        raise UserError(
            f"{folder}: {METRICS} holds no finite loss: train at least one logged step; if all "
            "are null, with --resume never and a lower --learning-rate"
        )
    contents = _contents(folder, table)
    loader = PackageLoader("nanogpt_tpu", "")
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    templates.filters |= {"show": _show, "quote": shlex.quote}
    page = templates.get_template("run_card.html.j2").render(contents)
    path = folder / "run_card.html"
    try:
        picture = draw(table, "loss", title=contents["title"], size=(8, 4.5))
        path.with_name("loss.png").write_bytes(picture)
        path.write_text(page, "utf-8", "replace")  # a sample may hold half a surrogate
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error})") from error
    return path


def _contents(folder: Path, table: Table) -> dict[str, Any]:
    """What the template shows."""
    config = _read_config(folder)
    checkpoints = find_checkpoints(folder)
    state = checkpoints[0].state if checkpoints else {}
    data = _describe_data(config, state)
    samples, unread = _read_samples(folder, table)
    last = {key: _last(column) for key, column in table.items()}
    kind, loss = ("training", "loss") if np.isnan(last["val_loss"]) else ("validation", "val_loss")
    return {
        "folder": os.fspath(folder),
        "name": folder.resolve().name,
        "title": f"{kind} loss {last[loss]:.3f} after {short_number(last['tokens'])} tokens",
        "now": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "warnings": [*find_problems(table, config), *unread],
        "config": config,
        "state": state,
        "data": data,
        "last": last,
        "num_steps": number(config, "num_steps", math.inf),
        "num_sessions": np.unique(table["session"]).size,
        "num_params": _num_params(config, state),
        "epochs": last["tokens"] / number(data, "num_tokens", math.nan),
        "first_val_loss": _last(table["val_loss"][::-1]),
        "perplexity": math.exp(min(last["val_loss"], 700)),
        "tokens_per_s": np.median(finite(table["tokens_per_s"]).tolist() or math.nan),
        "panels": _draw_panels(table, config),
        "samples": samples,
    }


def _draw_panels(table: Table, config: dict[str, Any]) -> dict[str, str]:
    """Pictures as data addresses, by what they show."""
    panels = {}
    for key, label in LABELS.items():
        clip = number(config, "grad_clip", math.nan) if key == "grad_norm" else math.nan
        for over, name in (("tokens", "tokens"), ("wall_s", "training time")):
            if finite(table[over]).size and (key == "loss" or finite(table[key]).size):
                png = base64.b64encode(draw(table, key, over, clip=clip)).decode()
                panels[f"{label} over {name}"] = f"data:image/png;base64,{png}"
    return panels


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no JSON object ({error}): restore or remove it") from error


def _describe_data(config: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Data and tokenizer as the newest checkpoint names them, or as the data itself does."""
    data, tokenizer = state.get("data", {}), state.get("tokenizer", {})
    with suppress(UserError):  # the data may lie on another machine
        manifest = Manifest.load(str(config.get("data")))
        if data.get("identity", manifest.identity) == manifest.identity:
            tokenizer = manifest.tokenizer
            data = {
                "source": manifest.source,
                "identity": manifest.identity,
                "num_tokens": manifest.num_tokens("train"),
                "content": str(manifest),
                "prepared with": ", ".join(f"{k}={v}" for k, v in manifest.settings.items()),
            }
    return data | {f"tokenizer {key}": value for key, value in tokenizer.items()}


def _num_params(config: dict[str, Any], state: dict[str, Any]) -> float:
    """Parameters: counted in the checkpoint, else those of the model in config.json."""
    with suppress(UserError, TypeError, KeyError), torch.device("meta"):
        return state.get("num_params") or GPT(ModelConfig(**config["model"])).num_params()
    return math.nan


def _read_samples(folder: Path, table: Table) -> tuple[list[dict[str, Any]], list[str]]:
    """What it wrote at the first, the last and some steps between; a line for each bad file."""
    found, unread = [], []
    for path in sorted((folder / SAMPLES).glob("step_*.json")):
        try:
            values = json.loads(path.read_text("utf-8"))
            step, texts = int(values["step"]), values["samples"][:_SAMPLES_A_STEP]
            pairs = [(str(sample["prompt"]), str(sample["text"])) for sample in texts]
        except (OSError, ValueError, KeyError, TypeError) as error:
            unread.append(f"{path.name} in {SAMPLES}/ cannot be read ({error!r}): remove it.")
            continue
        if step <= table["step"][-1]:  # else left by a run before this one
            val_loss = _last(table["val_loss"][table["step"] == step])
            found.append({"step": step, "val_loss": val_loss, "pairs": pairs})
    chosen = np.linspace(0, len(found) - 1, min(len(found), _SAMPLE_STEPS)).round().astype(int)
    return [found[index] for index in chosen], unread


def _last(values: np.ndarray) -> float:
    """The last finite value; NaN if there is none."""
    return float(np.append(math.nan, finite(values))[-1])


def _show(value: float, form: str = "") -> str:
    """A number in a format, else short; "-" if it is not known."""
    if not math.isfinite(value):
        return "-"
    return f"{value:{form}}" if form else short_number(value)
