"""The run card: from any run that logged a loss, whole, escaped and without network."""

import json
import math
import shutil
import struct
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanogpt_tpu.config import preset
from nanogpt_tpu.curves import _thin, draw_panels, short_number
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.findings import find_problems
from nanogpt_tpu.metrics import History
from nanogpt_tpu.report import report
from nanogpt_tpu.shards import Manifest, ShardInfo

TOKENS_PER_STEP = 100
EVIL = "<script>alert('x')</script><img src=http://evil.example/a.png>"


def line(step: int, session: int = 1, time: float = 1e9, **values: Any) -> dict[str, Any]:
    tokens = step * TOKENS_PER_STEP
    return {"step": step, "tokens": tokens, **values, "time": time, "session": session}


def training_lines(
    last: int, every: int = 1, session: int = 1, start: float = 1e9
) -> list[dict[str, Any]]:
    """A healthy run at 100 tokens/s: the loss falls, the norm is below the clip."""
    return [
        line(
            step, session, start + step,
            loss=4 + 4 * math.exp(-step / 20), lr=1e-3, grad_norm=0.5, tokens_per_s=100.0,
        )
        for step in range(every, last + 1, every)
    ]  # fmt: skip


def write_run(
    folder: Path,
    lines: list[dict[str, Any]],
    config: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(values) + "\n" for values in lines)
    (folder / "metrics.jsonl").write_text(text, "utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if state is not None:
        checkpoint = folder / "checkpoints" / f"step_{state['step']:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"format_version": 1, **state}), "utf-8")
    return folder


def write_samples(folder: Path, step: int, *pairs: tuple[str, str]) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    samples = [{"prompt": prompt, "text": text} for prompt, text in pairs]
    values = {"step": step, "tokens": step * TOKENS_PER_STEP, "samples": samples}
    (folder / "samples" / f"step_{step:08d}.json").write_text(json.dumps(values), "utf-8")


class Page(HTMLParser):
    """The parsed card: its text, its tags with attributes, and the nesting checked."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text("utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(self.html)
        self.close()
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def assert_self_contained(self) -> None:
        """No script, nothing loaded from anywhere, and the browser told so."""
        names = {tag for tag, _ in self.tags}
        assert names.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base"})
        for _, attrs in self.tags:
            for name, value in attrs.items():
                assert not name.startswith("on")
                if name in ("href", "xlink:href", "src", "srcset", "action", "data"):
                    assert value is not None and value.startswith("#")
        for style in self.html.split("url(")[1:]:
            assert style.startswith("#")
        policies = [a for t, a in self.tags if a.get("http-equiv") == "Content-Security-Policy"]
        assert len(policies) == 1
        assert (policies[0]["content"] or "").startswith("default-src 'none'")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Two sessions with a day between them, evaluations, samples, a checkpoint, the data."""
    data = tmp_path / "data"
    data.mkdir()
    manifest = Manifest(
        tokenizer={"kind": "bpe", "vocab_size": 512, "sha256": "c0ffee" * 10, "eot_id": 0},
        splits={
            "train": [ShardInfo("train_000000.bin", 4000, "a" * 64)],
            "val": [ShardInfo("val_000000.bin", 777, "b" * 64)],
        },
        num_documents=1234, num_skipped={}, source="hf:some/text", settings={"val_tokens": 777},
    )  # fmt: skip
    manifest.save(data)
    run = tmp_path / "my run"
    config = preset("tiny", data=str(data), out=str(run), num_steps=80, warmup_steps=5).to_dict()
    later = 1e9 + 86_400
    lines = [
        line(0, time=1e9, val_loss=8.25, bits_per_byte=3.3, eval_s=2.0),
        *training_lines(40),
        line(40, time=1e9 + 43, val_loss=4.75, bits_per_byte=1.9, eval_s=3.0),
        *(
            {**values, "time": later + values["step"] - 40, "mfu": 0.25}
            for values in training_lines(80, session=2)[40:]
        ),
        line(80, 2, later + 42, val_loss=4.125, bits_per_byte=1.65, eval_s=2.0),
    ]
    state = {
        "step": 80, "num_params": 123_456, "config": config, "git_commit": "f00d" * 10,
        "tokenizer": manifest.tokenizer, "versions": {"torch": "2.8.0", "torch_xla": None},
        "data": {"identity": manifest.identity, "source": manifest.source, "folder": str(data)},
    }  # fmt: skip
    write_run(run, lines, config, state)
    for step, text in ((0, "zzqq"), (40, "the the"), (80, "a sentence.")):
        write_samples(run, step, ("Once", f"Once {text}"))
    return run


def test_card_is_whole_and_loads_nothing(finished: Path) -> None:
    path = report(finished)
    assert path == finished / "run_card.html"
    page = Page(path)
    page.assert_self_contained()
    assert path.stat().st_size < 500_000
    assert sum(tag == "svg" for tag, _ in page.tags) == 10  # 4 curves x 2 axes, loss in 2 sizes
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))  # pictures must not share clip paths
    assert not list(finished.glob("*.tmp")) and not list(finished.glob(".*.tmp"))


def test_card_tells_everything(finished: Path) -> None:
    text = Page(report(finished)).text
    for wanted in (
        "my run", "finished", "No warnings.",
        "4.125", "from 8.250", "61.9", "1.650 bits per byte",  # loss, exp(4.125), bits
        "8k", "2 epochs", "80", "of 80", "MFU 25%", "123k", "123,456",
        "1 min 27 s", "2 sessions",  # 2 + 43 s and 42 s; the day between is no training
        "session 2", "1 to 40", "41 to 80", "4.7500", "115.6",  # the tables
        "zzqq", "the the", "a sentence.",
        "learning_rate", "0.003", "n_embd", "gradient_checkpointing", "false",
        "hf:some/text", "1,234", "4,000", "777", "bpe", "512", "c0ffee" * 10,
        "2.8.0", "f00d" * 10,
        f"nanogpt-tpu train --config '{finished}/config.json' --out '{finished}-again' "
        "--resume never",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "unfinished" not in text


def test_loss_picture_is_a_png_for_posting(finished: Path) -> None:
    report(finished)
    data = (finished / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", data[16:24]) == (1200, 675)


def test_text_of_strangers_is_shown_not_run(tmp_path: Path) -> None:
    config = {"preset": EVIL, "data": f"</style>{EVIL}", EVIL: EVIL, "model": {EVIL: EVIL}}
    state = {"step": 3, "versions": {EVIL: EVIL}, "data": {"source": EVIL}, "git_commit": EVIL}
    run = write_run(tmp_path / "</title>$x^$".replace("/", "_"), training_lines(5), config, state)
    write_samples(run, 1, (EVIL, f"{EVIL} \ud83d\x00</blockquote>{EVIL}"), ("", "人工智能的未来"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a title that the font or mathtext cannot set
        page = Page(report(run))
    page.assert_self_contained()
    assert page.text.count("<script>alert('x')</script>") >= 10
    assert "人工智能的未来" in page.text


def test_run_name_without_latin_letters(tmp_path: Path) -> None:
    run = write_run(tmp_path / "歌词", training_lines(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of every glyph its font lacks
        assert "歌词" in Page(report(run)).text


def test_run_that_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = preset("tiny", out=str(run), num_steps=1000).to_dict()
    write_run(run, training_lines(30), config)
    text = Page(report(run)).text
    assert "unfinished" in text
    assert "stands at step 30 of 1,000. There is no checkpoint: it starts anew, with:" in text
    assert f"nanogpt-tpu train --config {run}/config.json" in text
    assert "not measured" in text and "not recorded" in text  # evaluation, parameters
    assert "Versions software known from the first checkpoint on" in text


def test_log_alone_is_enough(tmp_path: Path) -> None:
    """No config.json, and lines as the design promises them: no time, no session."""
    lines = [{"step": n, "tokens": n, "loss": 9.0 - n} for n in range(1, 6)]
    page = Page(report(write_run(tmp_path / "run", lines)))
    page.assert_self_contained()
    assert sum(tag == "svg" for tag, _ in page.tags) == 2  # the loss over tokens, in two sizes
    assert "Over wall time" not in page.text and "4.000" in page.text
    assert "nanogpt-tpu train" not in page.text


def test_killed_before_the_first_logged_step(tmp_path: Path) -> None:
    lines = [line(0, val_loss=8.0, bits_per_byte=3.0, eval_s=1.0)]
    text = Page(report(write_run(tmp_path / "run", lines))).text
    assert "No training step is logged" in text and "8.000" in text


def test_one_logged_step_says_what_to_do(tmp_path: Path) -> None:
    text = Page(report(write_run(tmp_path / "run", training_lines(1)))).text
    assert "Only one step is logged: there are no curves yet; train on" in text


def test_continue_names_what_must_change(tmp_path: Path) -> None:
    run = tmp_path / "moved"
    config = preset("tiny", out="/kaggle/working/run", num_steps=1000, stop_after_step=20).to_dict()
    lines = [*training_lines(20), line(21, loss=None, lr=1e-3, grad_norm=None)]
    write_run(run, lines, config, {"step": 20})
    text = Page(report(run)).text
    assert "goes on from the checkpoint of step 20, with:" in text
    assert (
        f"train --config {run}/config.json --stop-after-step none --out {run} "
        "--learning-rate 0.0015" in text
    )


# What is wrong with the input is said in one line, and nothing is written.


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (None, "holds no metrics.jsonl"),
        ("", "holds no loss yet; train at least one logged step"),
        ('{"step": 1, "tok', "holds no loss yet"),
        ('{"step": 1, "tokens": 1, "lo\n{"step": 2, "tokens": 2, "loss": 1}\n', ":1 is not JSON"),
        ('{"loss": 1}\n', ":1: step is missing; remove the line"),
        ('{"step": 1, "tokens": null, "loss": 1}\n', ":1: tokens is missing; remove the line"),
        ('{"step": 1, "tokens": 1e999, "loss": 1}\n', ":1: tokens is inf; remove the line"),
        ('{"step": 1, "tokens": 1, "loss": "low"}\n', ":1: loss is 'low', not a number"),
        ('{"step": 1, "tokens": 1, "loss": 1, "lr": [2]}\n', ":1: lr is '[2]', not a number"),
        ('{"step": 1, "tokens": 1, "loss": null}\n', "no loss in metrics.jsonl is finite"),
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


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path, training_lines(3))
    (run / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json is no JSON object"):
        report(run)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    run = write_run(tmp_path, training_lines(3))
    (run / "run_card.html").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        report(run)
    assert not list(run.glob(".*.tmp"))


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, training_lines(5))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tok')
    assert History.read(run).training["step"].tolist() == [1, 2, 3, 4, 5]
    assert report(run).is_file()


def test_nan_is_a_gap_and_a_warning(tmp_path: Path) -> None:
    lines = training_lines(20)
    lines[9] |= {"loss": None, "grad_norm": float("nan")}  # null, and what json.dumps makes of NaN
    run = write_run(tmp_path, lines)
    history = History.read(run)
    assert history.non_finite == [(10, "loss"), (10, "grad_norm")]
    assert np.flatnonzero(np.isnan(history.training["loss"])).tolist() == [9]
    text = Page(report(run)).text
    assert "2 logged values are not finite, the first loss at step 10" in text
    assert "not finite" in draw_panels(history, None)["loss-tokens"]  # in the legend


# Time and sessions


def test_wall_time_leaves_out_the_gap_between_sessions(finished: Path) -> None:
    history = History.read(finished)
    first, second = history.sessions
    assert first.started == pytest.approx(1e9 - 2)  # its first line came after an evaluation
    assert first.wall_s == pytest.approx(45)
    assert second.started == pytest.approx(1e9 + 86_400)
    assert (second.start_wall_s, second.start_tokens) == (pytest.approx(45), 4000)
    assert history.wall_s == pytest.approx(87)
    assert (np.diff(history.training["wall_s"]) > 0).all()


def test_sessions_are_marked_in_the_pictures(finished: Path) -> None:
    pictures = draw_panels(History.read(finished), grad_clip=1.0)
    assert "session 2" in pictures["loss-tokens"] and "session 2" in pictures["loss-wall_s"]
    assert "session 1" not in pictures["loss-tokens"]


def test_long_run_stays_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    lines = training_lines(6000)
    lines[4321]["loss"] = 77.0
    assert report(write_run(tmp_path, lines)).stat().st_size < 500_000
    x = np.arange(6000.0)
    y = np.ones(6000)
    y[4321], y[100], y[3000:3100] = 77.0, np.nan, np.nan
    middle, mean, low, high = _thin(x, y)
    assert middle.size <= 300 and (np.diff(middle) > 0).all()
    assert np.nanmax(high) == 77 and np.nanmin(low) == 1
    assert np.isfinite(mean[5]) and np.isnan(mean[152])  # one of a bin missing; all of it


def test_manifest_of_other_data_is_not_believed(finished: Path) -> None:
    state = next(finished.rglob("state.json"))
    values = json.loads(state.read_text("utf-8"))
    values["data"]["identity"] = "0" * 64
    state.write_text(json.dumps(values), "utf-8")
    text = Page(report(finished)).text
    assert "0" * 64 in text and "4,000" not in text and "epochs" not in text


def test_epochs_where_the_data_is_not(finished: Path) -> None:
    shutil.rmtree(finished.parent / "data")
    state = next(finished.rglob("state.json"))
    values = json.loads(state.read_text("utf-8"))
    values["data"]["num_tokens"] = 16_000
    state.write_text(json.dumps(values), "utf-8")
    assert "0.5 epochs" in Page(report(finished)).text


# Samples


def test_samples_first_last_and_some_between(tmp_path: Path) -> None:
    run = write_run(tmp_path, training_lines(100))
    for step in range(0, 101, 5):
        write_samples(run, step, ("The", f"The text of step {step}."), ("", "y" * 5000))
    write_samples(run, 200, ("", "left by an earlier, longer run"))
    (run / "samples" / "step_00000007.json").write_text('{"step": 7')
    page = Page(report(run))
    shown = [int(part.split(".")[0]) for part in page.text.split("text of step ")[1:]]
    assert shown == [0, 25, 50, 75, 100]
    assert "y" * 590 in page.text and "y" * 601 not in page.text
    assert "step_00000007.json in samples/ cannot be read" in page.text
    assert "longer run" not in page.text


# Warnings


def problems(tmp_path: Path, lines: list[dict[str, Any]], **settings: Any) -> list[str]:
    epochs = settings.pop("epochs", None)
    return find_problems(History.read(write_run(tmp_path, lines)), settings, epochs)


def test_healthy_run_has_no_warnings(tmp_path: Path) -> None:
    lines = [*training_lines(100), line(100, val_loss=4.1)]
    assert problems(tmp_path, lines, grad_clip=1.0, epochs=0.5) == []


@pytest.mark.parametrize(
    ("val_loss", "epochs", "said"),
    [
        (4.0 + math.log(1.4), 3.0, None),
        (
            4.0 + math.log(2.0),
            3.0,
            "is 2 times the training perplexity, overfitting after 3 epochs",
        ),
        (4.0 + math.log(2.0), None, "overfitting: more text"),
        (4.0 + math.log(2.0), 0.9, "no text was seen twice"),
        (4e9, 3.0, "overfitting"),
        (None, 3.0, None),
    ],
)
def test_overfitting(
    tmp_path: Path, val_loss: float | None, epochs: float | None, said: str | None
) -> None:
    lines = [*training_lines(400), line(400, val_loss=val_loss)]
    found = [p for p in problems(tmp_path, lines, epochs=epochs) if "Validation" in p]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_clipping_counts_only_late_and_after_warmup(tmp_path: Path) -> None:
    lines = training_lines(40)
    for values in lines[:20]:
        values["grad_norm"] = 5.0
    assert problems(tmp_path, lines, grad_clip=1.0) == []
    for values in lines[32:]:
        values["grad_norm"] = 5.0
    (said,) = problems(tmp_path, lines, grad_clip=1.0, warmup_steps=10)
    assert "clipped (norm above 1) on 80% of the last logged steps" in said
    assert problems(tmp_path, lines, grad_clip=1.0, warmup_steps=100) == []
    assert problems(tmp_path, lines, grad_clip=None) == []


def test_loss_that_does_not_fall(tmp_path: Path) -> None:
    lines = [line(step, loss=5.0, lr=1e-3, grad_norm=0.1) for step in range(1, 30)]
    (said,) = problems(tmp_path, lines)
    assert "not lower than at the start (5, now 5)" in said


def test_speed_that_fell_by_half(tmp_path: Path) -> None:
    lines = training_lines(40)
    for values in lines[-4:]:
        values["tokens_per_s"] = 49.0
    (said,) = problems(tmp_path, lines)
    assert "Speed fell from 100 to 49 tokens/s" in said


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.0006, "0.0006"), (999.4, "999"), (999.9, "1k"), (819_200, "819k"),
     (124_439_808, "124M"), (1e10, "10B"), (2.5e12, "2.5T")],
)  # fmt: skip
def test_short_number(value: float, shown: str) -> None:
    assert short_number(value) == shown
