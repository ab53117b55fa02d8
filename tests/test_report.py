"""The run card: from any run that logged a loss, whole, escaped and without network."""

import base64
import json
import math
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nanogpt_tpu.config import preset
from nanogpt_tpu.curves import LiveCurve, _points, draw
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.findings import find_problems
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.metrics import read_metrics, to_table
from nanogpt_tpu.model import GPT
from nanogpt_tpu.report import report

EVIL = "<script>alert('x')</script><img src=http://evil.example/a.png>"
PNG = b"\x89PNG\r\n"


def line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "tokens": step * 100, "time": 1e9 + step, "session": 1, **values}


def healthy(last: int, **more: Any) -> list[dict[str, Any]]:
    """A run at 100 tokens/s: the loss falls, the norm is below the clip."""
    values = {"lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 100.0, **more}
    return [line(n, loss=4 + 4 * math.exp(-n / 20), **values) for n in range(1, last + 1)]


def sick(last: int, **values: Any) -> list[dict[str, Any]]:
    return [*healthy(40)[:-last], *({**x, **values} for x in healthy(40)[-last:])]


def write_run(folder: Path, lines: list[Any], config: Any = None, state: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(values) + "\n" for values in lines)
    (folder / "metrics.jsonl").write_text(text, "utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if state is not None:
        checkpoint = folder / "checkpoints" / f"step_{state['step']:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(
            json.dumps({"format_version": 1, "sha256": {}, **state}), "utf-8"
        )
    return folder


def write_samples(folder: Path, step: int, *pairs: tuple[str, str]) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    values = {"step": step, "samples": [{"prompt": prompt, "text": text} for prompt, text in pairs]}
    (folder / "samples" / f"step_{step:08d}.json").write_text(json.dumps(values), "utf-8")


class Page(HTMLParser):
    """The parsed card. Its nesting is checked, and that it loads and runs nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.pictures, self._open = "", {}, []
        html = path.read_text("utf-8")
        assert "default-src 'none';" in html and "url(" not in html and "@import" not in html
        self.feed(html)
        self.close()
        assert self._open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        assert not [name for name in values if name.startswith("on") or name in ("href", "srcset")]
        if "src" in values:
            kind, _, data = str(values["src"]).partition(",")
            assert (tag, kind) == ("img", "data:image/png;base64")
            self.pictures[values["alt"]] = base64.b64decode(data)
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if "style" in self._open else f" {data}"


@pytest.fixture
def finished(tmp_path: Path, data_dir: Path) -> Path:
    """A whole run: two sessions, a day between them, evaluations, samples, checkpoint, data."""
    manifest, run = Manifest.load(data_dir), tmp_path / "my run"
    config = preset("tiny", data=str(data_dir), num_steps=80).to_dict()
    later = [*healthy(80, mfu=0.25, session=2)[40:], line(80, val_loss=4.125, session=2)]
    lines = [line(0, val_loss=8.25), *healthy(40), line(40, val_loss=4.75, bits_per_byte=1.65)]
    lines += [{**values, "time": values["time"] + 86_400} for values in later]
    data = {"identity": manifest.identity, "source": manifest.source, "num_tokens": 4000}
    state = {"step": 80, "num_params": 123_456, "git_commit": "f00d" * 10, "data": data}
    write_run(run, lines, config, {**state, "versions": {"torch": "2.8.0", "torch_xla": None}})
    for step, text in ((0, "zzqq"), (40, "the the"), (80, "a sentence.")):
        write_samples(run, step, ("Once", f"Once {text}"))
    return run


def test_card_tells_everything(finished: Path, data_dir: Path) -> None:
    path, manifest = report(finished), Manifest.load(data_dir)
    assert path == finished / "run_card.html" and path.stat().st_size < 700_000
    page = Page(path)
    for wanted in (
        "my run", "Finished: validation loss 4.125 after 8k tokens", "No warnings.",
        "from 8.250", "61.9", "1.650 bits per byte", "epochs", "80 of 80", "MFU 25%",
        "1.3 min 2 sessions", "123k 123,456", "Step 0 validation loss 8.250 Once zzqq", "the the",
        "a sentence.", "learning_rate 0.003", "n_embd 32", "gradient_checkpointing False",
        manifest.source, str(manifest), manifest.identity, "tokenizer kind bytes", "torch 2.8.0",
        f"git_commit {'f00d' * 10}", f"config '{finished}/config.json' --resume never "
        f"--out '{finished}-again'",
    ):  # fmt: skip
        assert wanted in page.text, wanted
    assert len(page.pictures) == 8 and "gradient norm over training time" in page.pictures
    assert all(png.startswith(PNG) for png in page.pictures.values())
    for_posting = (finished / "loss.png").read_bytes()
    assert struct.unpack(">II", for_posting[16:24]) == (1200, 675)


def test_text_of_strangers_is_shown_not_run(tmp_path: Path) -> None:
    config = {"preset": EVIL, "data": f"</style>{EVIL}", EVIL: EVIL, "model": {EVIL: EVIL}}
    state = {"step": 3, "versions": {EVIL: EVIL}, "data": {"source": EVIL}, "git_commit": EVIL}
    run = write_run(tmp_path / "<_title>$x^$ 歌词", healthy(5), config, state)
    write_samples(run, 1, (EVIL, f"{EVIL} \ud83d\x00</blockquote>{EVIL}"), ("", "人工智能的未来"))
    page = Page(report(run))
    assert page.text.count("<script>alert('x')</script>") >= 10
    assert "<_title>$x^$ 歌词" in page.text and "人工智能的未来" in page.text


def test_run_that_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    config = preset("tiny", num_steps=1000, stop_after_step=500)
    run = write_run(tmp_path / "run", healthy(30), config.to_dict())
    text = Page(report(run)).text
    command = f"nanogpt-tpu train --config {run}/config.json --stop-after-step none --resume auto"
    assert f"step 30 of 1,000 and has no checkpoint: it starts anew with: {command}" in text
    assert "Unfinished: training loss" in text and f"{GPT(config.model).num_params():,}" in text
    write_run(run, healthy(30), state={"step": 20})
    assert "goes on from the checkpoint of step 20 with:" in Page(report(run)).text


def test_log_alone_is_enough(tmp_path: Path) -> None:
    """No config.json, and lines as the design promises them: no time, no session."""
    lines = [{"step": n, "tokens": n, "loss": 9.0 - n} for n in range(1, 6)]
    page = Page(report(write_run(tmp_path / "run", lines)))
    assert list(page.pictures) == ["loss (nats per token) over tokens"]
    assert "4.000" in page.text and "nanogpt-tpu train" not in page.text
    for lines in (healthy(1), [line(0, val_loss=8.0)]):
        text = Page(report(write_run(tmp_path / "run", lines))).text
        assert "Fewer than two steps are logged, too few for a curve: train on." in text


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (None, "holds no metrics.jsonl"),
        ("", "holds no finite loss: train at least one logged step"),
        ('{"step": 1, "tokens": 1, "loss": null}\n', "with --resume never and a lower --learning"),
        ('{"step": 1, "tokens": 1, "lo\n{"step": 2, "tokens": 2, "loss": 1}\n', ":1 is not JSON"),
        ('{"step": 1, "tokens": 1, "loss": "low"}\n', ":1 is no line of ours"),
    ],
)
def test_bad_log_is_refused_in_one_line(tmp_path: Path, log: str | None, said: str) -> None:
    if log is not None:
        (tmp_path / "metrics.jsonl").write_text(log, "utf-8")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as caught:
        report(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_what_else_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, healthy(3))
    (run / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config\.json is no JSON object"):
        report(run)
    (run / "config.json").unlink()
    (run / "run_card.html").mkdir()
    with pytest.raises(UserError, match=r"run_card\.html cannot be written"):
        report(run)


def test_marks_gaps_and_means(finished: Path) -> None:
    lines = read_metrics(finished)
    table = to_table(lines)
    for marks in ({"session": table["step"] > 20}, {"is_bad": table["step"] == 9}):
        assert draw(table | marks, "loss") != draw(table, "loss")
    lines[9] |= {"loss": None, "grad_norm": float("nan")}  # null, and what json.dumps makes of NaN
    text = Page(report(write_run(finished, lines))).text
    assert "Loss or gradient is not finite, first at step 9. Unchanged" in text
    x, y = _points(np.arange(5999.0), np.where(np.arange(5999) < 3000, 1.0, np.nan))
    assert x.size == 1000 and x[-1] == 2998 and (y == 1).all()


def test_data_elsewhere_or_of_another_run(finished: Path) -> None:
    state = {"step": 81, "data": {"identity": "0" * 64, "num_tokens": 16_000}}
    text = Page(report(write_run(finished, read_metrics(finished), state=state))).text
    assert "0" * 64 in text and "0.5 epochs" in text and "documents" not in text


def test_samples_first_last_and_some_between(tmp_path: Path) -> None:
    run = write_run(tmp_path, healthy(100))
    for step in range(0, 101, 5):
        write_samples(run, step, ("The", f"The text of step {step}."), ("", "y" * 5000))
    write_samples(run, 200, ("", "left by an earlier, longer run"))
    (run / "samples" / "step_00000007.json").write_text('{"step": 7')
    text = Page(report(run)).text
    assert [int(x.split(".")[0]) for x in text.split("text of step ")[1:]] == [0, 25, 50, 75, 100]
    assert "y" * 590 in text and "y" * 601 not in text and "longer run" not in text
    assert "step_00000007.json in samples/ cannot be read" in text


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([*healthy(100), line(100, val_loss=4.1)], None),
        ([*healthy(400), line(400, val_loss=4 + math.log(1.4))], None),
        ([*healthy(400), line(400, val_loss=4 + math.log(2))], "is 2 times the training perplex"),
        ([line(0, val_loss=9.0), *healthy(400)], None),
        (sick(4, grad_norm=5.0), None),
        (sick(8, grad_norm=5.0), "clipped (norm above 1) on 80% of the last logged steps"),
        (sick(40, loss=5.0), "The loss is not lower than at the start (5, now 5)"),
        (sick(8, tokens_per_s=49.0), "Speed fell from 100 to 49 tokens/s"),
        (sick(8, tokens_per_s=51.0), None),
    ],
)
def test_warnings(lines: list[dict[str, Any]], said: str | None) -> None:
    found = find_problems(to_table(lines), {"grad_clip": 1.0, "warmup_steps": 5})
    assert len(found) == (said is not None) and (said or "") in "".join(found)
    for config in ({"grad_clip": 1.0, "warmup_steps": 400}, {}):
        assert "clipped" not in "".join(find_problems(to_table(lines), config))


def test_live_curve_updates_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.display.display", display := Mock())
    handle, curve = display.return_value, LiveCurve(every_s=1000)
    curve({**line(1), "loss": None})
    curve(line(2, loss=5.0))  # too soon after the first
    assert display.call_count == 1 and not handle.update.called
    curve(line(2, val_loss=5.5))  # an evaluation is always drawn
    assert display.call_count == handle.update.call_count == 1
    assert handle.update.call_args.args[0].data.startswith(PNG)
