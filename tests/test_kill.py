"""A preparation that is killed at any moment and started again gives the same bytes."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, make_documents

from nanogpt_tpu.inspection import inspect

NUM_KILLS = 20


def command(source: Path, out: Path, workers: int) -> list[str]:
    options = ["--train-tokenizer", "400", "--val-tokens", "20000", "--shard-tokens", "30000"]
    code = (
        "import sys; from nanogpt_tpu import cli, prepare; "
        "sys.modules[prepare.__module__].BATCH_CHARS = 20_000; sys.exit(cli.main(sys.argv[1:]))"
    )
    where = [str(source), "--out", str(out), "--workers", str(workers)]
    return [sys.executable, "-c", code, "prepare", *where, *options]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Several files of several kinds, one of them larger than a batch; about 2 MB."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, texts in enumerate([make_documents(2000), make_documents(2000, 60)]):
        records = [json.dumps({"text": text}) for text in texts]
        (folder / f"{number}.jsonl").write_text("\n".join(records), "utf-8")
    (folder / "book.txt").write_text("\n".join(make_documents(400)), "utf-8")
    return folder


@pytest.mark.slow
def test_killed_at_any_moment(source, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    start = time.monotonic()
    whole = command(source, tmp_path / "whole", 1)
    subprocess.run(whole, env=environ, check=True, capture_output=True)
    whole_s = time.monotonic() - start
    expected = contents(tmp_path / "whole")
    assert len(expected) > 10 and inspect(tmp_path / "whole")["problems"] == []
    rng, num_kills, num_rounds, went_on = random.Random(11), 0, 0, 0
    while num_kills < NUM_KILLS:
        num_rounds += 1
        out = tmp_path / f"killed{num_rounds}"
        while True:
            process = subprocess.Popen(
                command(source, out, rng.choice([1, 2, 3])),
                env=environ, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                _, stderr = process.communicate(timeout=rng.uniform(0.3, 1.1) * whole_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                num_kills += 1
                names = {path.name for path in out.glob("*")}
                assert "manifest.json" not in names or names >= expected.keys()
                continue
            went_on += b"Going on after" in stderr
            assert process.returncode == 0, stderr
            break
        assert contents(out) == expected
    assert went_on > 0
