"""The log of a run: readable while it is written, and true after a resume."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.metrics import METRICS, MetricsLog, read_metrics, to_table


def write_session(run_dir: Path, resumed_at: int, *steps: int) -> None:
    log = MetricsLog(run_dir, resumed_at)
    for step in steps:
        log.write(step=step, loss=1.5)
    log.close()


def lines(run_dir: Path) -> list[tuple[int, int]]:
    return [(record["step"], record["session"]) for record in read_metrics(run_dir)]


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path, 0)
    assert read_metrics(tmp_path) == []
    written = log.write(step=1, loss=2.5, lr=1e-3)
    assert written == {"step": 1, "loss": 2.5, "lr": 1e-3, "session": 1}
    assert read_metrics(tmp_path) == [written]
    assert (tmp_path / METRICS).read_text("utf-8") == json.dumps(written) + "\n"
    log.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(tmp_path, value):
    log = MetricsLog(tmp_path, 0)
    assert log.write(step=1, loss=value)["loss"] is None
    log.close()
    assert '"loss": null' in (tmp_path / METRICS).read_text("utf-8")
    assert read_metrics(tmp_path)[0]["loss"] is None


def test_resuming_drops_what_will_be_run_again_and_counts_sessions(tmp_path):
    write_session(tmp_path, 0, 1, 2, 3)
    write_session(tmp_path, 2, 3, 4)
    assert lines(tmp_path) == [(1, 1), (2, 1), (3, 2), (4, 2)]
    write_session(tmp_path, 4, 5)
    assert lines(tmp_path) == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    write_session(tmp_path, 0, 1)
    assert lines(tmp_path) == [(1, 1)]


def test_a_torn_last_line_is_left_out_and_overwritten(tmp_path):
    write_session(tmp_path, 0, 1, 2)
    with (tmp_path / METRICS).open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')
    assert lines(tmp_path) == [(1, 1), (2, 1)]
    write_session(tmp_path, 2, 3)
    assert lines(tmp_path) == [(1, 1), (2, 1), (3, 2)]


@pytest.mark.parametrize("bad", ['{"step": 2, "lo', "[2]", "", "null"])
def test_a_bad_line_before_the_last_is_named(tmp_path, bad):
    write_session(tmp_path, 0, 1)
    with (tmp_path / METRICS).open("a", encoding="utf-8") as file:
        file.write(bad + '\n{"step": 3}\n')
    for use in (lambda: read_metrics(tmp_path), lambda: MetricsLog(tmp_path, 3)):
        with pytest.raises(UserError) as caught:
            use()
        assert str(caught.value).startswith(f"{tmp_path / METRICS}:2 is not JSON")


def test_a_folder_without_metrics(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        read_metrics(tmp_path)
    write_session(tmp_path, 5, 6)  # resumed from elsewhere: the log begins here
    assert lines(tmp_path) == [(6, 1)]


def test_records_become_columns():
    nan = float("nan")
    table = to_table(
        [
            {"step": 0, "tokens": 0, "val_loss": 8.0, "mfu": None, "prompt": "not a column"},
            {"step": 5, "tokens": 50, "loss": 7, "grad_norm": 1.0},
            {"step": 6, "tokens": 60, "loss": None, "grad_norm": 1.0},
            {"step": 7, "tokens": 70, "loss": 6.0, "grad_norm": math.inf},
        ]
    )
    np.testing.assert_equal(table["loss"], [nan, 7.0, nan, 6.0])
    np.testing.assert_equal(table["grad_norm"], [nan, 1.0, 1.0, nan])
    np.testing.assert_equal(table["val_loss"], [8.0, nan, nan, nan])
    assert table["is_bad"].tolist() == [False, False, True, True]
    assert table["session"].tolist() == [1, 1, 1, 1]
    assert np.isnan(table["wall_s"]).all()


def test_wall_time_leaves_out_the_gap_between_sessions():
    speed = {"loss": 1.0, "tokens_per_s": 10.0}
    table = to_table(
        [
            {"step": 0, "tokens": 0, "val_loss": 8.0, "time": 1000, "session": 1},
            {"step": 5, "tokens": 50, **speed, "time": 1005, "session": 1},
            {"step": 10, "tokens": 100, **speed, "time": 1012, "session": 1},
            {"step": 15, "tokens": 150, **speed, "time": 90_000, "session": 2},
            {"step": 20, "tokens": 200, **speed, "time": 90_006, "session": 2},
        ]
    )
    assert table["wall_s"].tolist() == [0, 5, 12, 17, 23]


@pytest.mark.parametrize(
    "bad",
    [
        {"loss": 1.0},
        {"step": 2, "tokens": None, "loss": 1.0},
        {"step": 2, "tokens": math.inf, "loss": 1.0},
        {"step": 2, "tokens": 2, "loss": "low"},
        {"step": 2, "tokens": 2, "lr": [1e-3]},
        {"step": 2, "tokens": 2, "loss": 10**400},
    ],
)
def test_a_record_that_is_not_of_a_run_is_named(bad):
    with pytest.raises(UserError, match=r"^run/metrics\.jsonl:2 is no line of ours") as caught:
        to_table([{"step": 1, "tokens": 1, "loss": 1.0}, bad], "run/metrics.jsonl")
    assert "\n" not in str(caught.value)
