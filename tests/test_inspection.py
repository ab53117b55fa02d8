"""`inspect` finds whatever was changed in a data folder since it was made."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.inspection import inspect
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.shardfile import HEADER_BYTES, hash_file, read_shard
from nanogpt_tpu.tokenizer import train_tokenizer


@pytest.fixture
def folder(data_dir, tmp_path) -> Path:
    """A copy of the data folder, to be damaged."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def problem(folder: Path) -> str:
    """The one problem of a folder."""
    (line,) = inspect(folder)["problems"]
    assert str(folder) in line
    return line


def change_token(folder: Path, place: int, token: int) -> Path:
    path = folder / "train_000000.bin"
    tokens = np.memmap(path, dtype=np.uint16, mode="r+", offset=HEADER_BYTES)
    tokens[place] = token
    tokens.flush()
    return path


def change_manifest(folder: Path, change) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text("utf-8"))
    change(values)
    path.write_text(json.dumps(values), "utf-8")


def test_clean_data(data_dir):
    found = inspect(data_dir)
    manifest = Manifest.load(data_dir)
    assert found["problems"] == []
    assert found["num_eot"] == manifest.num_documents == 80
    assert manifest.to_dict().items() <= found.items()
    assert found["num_tokens"] == {
        split: read_shard(data_dir / f"{split}_000000.bin").size for split in ("train", "val")
    }


def test_a_flipped_byte(folder):
    path = folder / "val_000000.bin"
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 100] ^= 1
    path.write_bytes(content)
    line = problem(folder)
    assert str(path) in line and "sha256" in line


def test_an_id_outside_the_vocabulary(folder):
    """Found by its own check, also where the hash was made to match."""
    path = change_token(folder, 1234, 257)
    assert "sha256" in inspect(folder)["problems"][0]
    assert (
        "id 257 at position 1234, outside the vocabulary of 257" in inspect(folder)["problems"][1]
    )
    change_manifest(
        folder, lambda values: values["splits"]["train"][0].update(sha256=hash_file(path))
    )
    assert problem(folder) == f"{path} has id 257 at position 1234, outside the vocabulary of 257"


def test_a_missing_shard(folder):
    (folder / "train_000000.bin").unlink()
    assert "train_000000.bin is missing" in problem(folder)


def test_a_shortened_shard(folder):
    path = folder / "train_000000.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    assert f"holds {size - 10} bytes, its header promises {size}" in problem(folder)


def test_a_shard_of_another_length_than_the_manifest_says(folder):
    change_manifest(folder, lambda values: values["splits"]["val"][0].update(num_tokens=5))
    num_tokens = read_shard(folder / "val_000000.bin").size
    assert f"holds {num_tokens} tokens, the manifest says 5" in problem(folder)


def test_every_problem_is_told(folder):
    (folder / "train_000000.bin").unlink()
    (folder / "val_000000.bin").write_bytes(b"")
    (folder / "tokenizer.json").unlink()
    assert len(inspect(folder)["problems"]) == 3


def test_another_tokenizer(folder):
    train_tokenizer(["low lower lowest"], 260).save(folder)
    line = problem(folder)
    assert "tokenizer.json is not the tokenizer that made these shards" in line
    assert "sha256, vocab_size, eot_id" in line


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 300), ("eot_id", 0)])
def test_a_manifest_that_says_other_ids_than_the_tokenizer(folder, key, value):
    change_manifest(folder, lambda values: values["tokenizer"].update({key: value}))
    assert f": {key} differ from the manifest; " in problem(folder)


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer at" in problem(folder)


def test_no_data(tmp_path):
    with pytest.raises(UserError, match="nanogpt-tpu prepare"):
        inspect(tmp_path)
