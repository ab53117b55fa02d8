"""Streaming from a hub that drops connections; files fetched from it. All on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, make_documents, write_shard
from hub_server import HubServer

from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.shardfile import read_shard

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("datasets")
DOCUMENTS = [f"{number} {text}" for number, text in enumerate(make_documents(1200, 40))]
# Waits between tries cost nothing here; what is patched is the clock, not the retrying.
CODE = """
import sys, time
from nanogpt_tpu import cli, prepare  # the function; its module:
sys.modules[prepare.__module__].BATCH_CHARS = 5000
time.sleep = lambda s: None
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Path:
    """A dataset of three parquet files in small row groups."""
    folder = tmp_path_factory.mktemp("hub") / "repo"
    folder.mkdir()
    for number in range(3):
        texts = DOCUMENTS[number * 400 : (number + 1) * 400]
        table = pyarrow.table({"id": list(range(400)), "text": texts})
        name = f"train-{number:05d}-of-00003.parquet"
        pyarrow.parquet.write_table(table, folder / name, row_group_size=50)
    return folder


def prepare(server: HubServer, out: Path, *options: str, source: str = "hf:someone/songs"):
    environ = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(out.parent / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(REPO),
    }
    command = [sys.executable, "-c", CODE, "prepare", source, "--out", str(out), *options]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def documents(folder: Path) -> list[str]:
    splits = Manifest.load(folder).splits
    shards = [read_shard(folder / s.file) for name in ("val", "train") for s in splits[name]]
    tokens = np.concatenate(shards)
    starts = np.flatnonzero(tokens == 256)
    return [bytes(part[1:].astype(np.uint8)).decode() for part in np.split(tokens, starts[1:])]


BYTES = ("--tokenizer", "bytes", "--workers", "1")


@pytest.mark.slow
def test_dropped_connections_lose_and_double_nothing(repo, tmp_path):
    server = HubServer(repo, "someone/songs", num_drops=25)
    done = prepare(server, tmp_path / "data", *BYTES)
    assert done.returncode == 0, done.stderr
    assert server.num_dropped == 25
    assert "again in" in done.stderr  # our own retries came after the library's
    assert documents(tmp_path / "data") == DOCUMENTS


@pytest.mark.slow
def test_a_hub_that_stays_away_is_one_line_and_work_goes_on_later(repo, tmp_path):
    server = HubServer(repo, "someone/songs", num_drops=0)
    server.lost = "train-00001"
    options = (*BYTES, "--shard-tokens", "5000", "--val-tokens", "100")
    done = prepare(server, tmp_path / "data", *options)
    assert done.returncode == 2
    assert "error: hf:someone/songs cannot be reached" in done.stderr.splitlines()[-1]
    journal = json.loads((tmp_path / "data" / ".partial" / "journal.json").read_text("utf-8"))
    assert journal["num_tokens"] > 0
    server.lost = "nothing"
    again = prepare(server, tmp_path / "data", *options)
    assert again.returncode == 0, again.stderr
    assert f"Going on after {journal['num_tokens']:,} tokens" in again.stderr
    assert documents(tmp_path / "data") == DOCUMENTS


@pytest.mark.slow
def test_parts_hold_every_document_once(repo, tmp_path):
    server = HubServer(repo, "someone/songs", num_drops=0)
    for count in (2, 4):  # by file; by record where files are fewer
        found: list[str] = []
        for index in range(1, count + 1):
            out = tmp_path / f"{index}of{count}"
            done = prepare(server, out, *BYTES, "--part", f"{index}/{count}")
            assert done.returncode == 0, done.stderr
            found += documents(out)
        assert sorted(found) == sorted(DOCUMENTS)


@pytest.mark.slow
def test_what_is_not_there(repo, tmp_path):
    server = HubServer(repo, "someone/songs", num_drops=0)
    for source, options, what in (
        ("hf:someone/else", (), "'hf:someone/else'"),
        ("hf:someone/songs:other", (), "other"),
        ("hf:someone/songs", ("--text-field", "lyrics"), "has no 'lyrics', only id, text"),
    ):
        done = prepare(server, tmp_path / "data", *BYTES, *options, source=source)
        assert done.returncode == 2, done.stderr
        assert what in done.stderr.splitlines()[-1], done.stderr
        assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_ready_made_shards_are_fetched_and_verified(gpt2_files, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for split, number in (("val", 0), ("train", 1), ("train", 2)):
        tokens = rng.integers(0, 50257, 20_000).astype(np.uint16)
        tokens[::100] = 50256
        write_shard(folder / f"fineweb_{split}_{number:06d}.bin", tokens)
    server = HubServer(folder, "kjj0/fineweb10B-gpt2", num_drops=3)
    done = prepare(server, tmp_path / "data", source="fineweb-shards:2")
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "data")
    assert (manifest.num_tokens("train"), manifest.num_tokens("val")) == (40_000, 20_000)
    assert server.num_dropped == 3
    assert "nothing to do" in prepare(server, tmp_path / "data", source="fineweb-shards:2").stderr
    wrong = np.full(20_000, 60_000, dtype=np.uint16)
    write_shard(folder / "fineweb_train_000001.bin", wrong)
    done = prepare(server, tmp_path / "bad", source="fineweb-shards:1")
    assert done.returncode == 2 and "outside GPT-2" in done.stderr
