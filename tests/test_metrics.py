"""The log of a run: readable while it is written, and true after a resume."""

import json
import math
from pathlib import Path

import pytest

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.metrics import METRICS, MetricsLog, read_metrics


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
