"""The shard format, the manifest, and which batch belongs to which step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_shard

from nanogpt_tpu.config import BatchPlan
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.manifest import Manifest, find_data, list_shards
from nanogpt_tpu.shardfile import ShardInfo, hash_file, read_shard, shard_name
from nanogpt_tpu.shards import ShardLoader, permute

B, T = 2, 8


def make_shards(folder: Path, *sizes: int, manifest: bool = False, split: str = "train") -> Path:
    """Shards that count on from one to the next: every token says where it stands."""
    start, infos = 0, []
    for index, size in enumerate(sizes):
        tokens = np.arange(start, start + size, dtype=np.uint16)
        infos.append(write_shard(folder / shard_name(split, index), tokens))
        start += size
    if manifest:
        tokenizer = {"sha256": "0", "vocab_size": start, "eot_id": 0}
        Manifest(tokenizer, {split: infos}, 1, {}, "test").save(folder)
    return folder


def load(folder: Path, *, n: int = B, seq_len: int = T, seed: int = 3, **options) -> ShardLoader:
    return ShardLoader(folder, "train", seq_len, n, seed, **options)


# The file


@pytest.mark.parametrize(
    ("dtype", "magic", "version"), [(np.uint16, 20240520, 1), (np.uint32, 20240801, 7)]
)
def test_header_and_tokens(tmp_path, dtype, magic, version):
    tokens = np.array([0, 1, 65535, 7], dtype=dtype)
    info = write_shard(tmp_path / "train_000000.bin", tokens)
    content = (tmp_path / "train_000000.bin").read_bytes()
    header = np.frombuffer(content, dtype="<i4", count=256)
    assert header[:3].tolist() == [magic, version, 4] and not header[3:].any()
    assert np.frombuffer(
        content, dtype=np.dtype(dtype).newbyteorder("<"), offset=1024
    ).tolist() == (tokens.tolist())
    assert info == ShardInfo("train_000000.bin", 4, hash_file(tmp_path / info.file))
    again = read_shard(tmp_path / info.file)
    assert again.dtype == dtype and again.tolist() == tokens.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["train_000000.bin"]


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "magic":
        content[0] ^= 1
    elif kind == "version":
        content[4] ^= 1
    elif kind == "count":
        content[8:12] = np.int32(-1).tobytes()
    elif kind == "shortened":
        del content[-1:]
    elif kind == "lengthened":
        content += b"\0\0"
    elif kind == "header only":
        del content[1000:]
    elif kind == "empty":
        content.clear()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("magic", ["is no token shard", "magic 20240521, version 1"]),
        ("version", ["is no token shard", "magic 20240520, version 0"]),
        ("count", ["holds 1064 bytes, its header promises 1022"]),
        ("shortened", ["holds 1063 bytes, its header promises 1064"]),
        ("lengthened", ["holds 1066 bytes, its header promises 1064"]),
        ("header only", ["holds 1000 bytes, less than its header"]),
        ("empty", ["holds 0 bytes, less than its header"]),
    ],
)
def test_damaged_shards_are_refused(tmp_path, kind, parts):
    path = make_shards(tmp_path, 20) / "train_000000.bin"
    damage(path, kind)
    for use in (lambda: read_shard(path), lambda: load(tmp_path)):
        with pytest.raises(UserError) as caught:
            use()
        assert str(path) in str(caught.value)
        assert all(part in str(caught.value) for part in parts), str(caught.value)


# The manifest


def test_manifest_round_trips_and_sums(tmp_path):
    folder = make_shards(tmp_path, 20, 30, manifest=True)
    manifest = Manifest.load(folder)
    assert [shard.num_tokens for shard in manifest.splits["train"]] == [20, 30]
    assert (manifest.num_tokens("train"), manifest.num_tokens("val")) == (50, 0)
    assert [path.name for path in list_shards(folder, "train")] == [
        "train_000000.bin",
        "train_000001.bin",
    ]
    assert json.loads((folder / "manifest.json").read_text("utf-8")) == manifest.to_dict()


def test_identity_says_whether_two_folders_hold_the_same_tokens(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, sizes in zip(folders, [(20,), (20,), (21,)], strict=True):
        folder.mkdir()
        make_shards(folder, *sizes, manifest=True)
    same, again, other = (Manifest.load(folder).identity for folder in folders)
    assert same == again != other


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "not a manifest of ours"),
        ("[]", "not a manifest of ours"),
        ('{"format_version": 1}', "not a manifest of ours"),
        ('{"format_version": 2, "something": "new"}', "has format_version 2, this program reads 1"),
        (
            '{"format_version": 1, "tokenizer": {"eot_id": 0}, "splits": {}, "num_documents": 1, '
            '"num_skipped": {}, "source": ""}',
            "tokenizer has no sha256 and no vocab_size",
        ),
        (
            '{"format_version": 1, "tokenizer": {"eot_id": 0, "sha256": "0", "vocab_size": 9}, '
            '"splits": {"train": [{"file": "a", "num_tokens": "5", "sha256": ""}]}, '
            '"num_documents": 1, "num_skipped": {}, "source": ""}',
            "not a manifest of ours (num_tokens is '5'",
        ),
    ],
)
def test_manifests_that_cannot_be_read(tmp_path, content, what):
    (tmp_path / "manifest.json").write_text(content, "utf-8")
    with pytest.raises(UserError) as caught:
        Manifest.load(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value) and what in str(caught.value)


def test_no_data(tmp_path):
    for folder, what in ((tmp_path / "none", "no such folder"), (tmp_path, "no shards")):
        with pytest.raises(UserError, match=what) as caught:
            Manifest.load(folder)
        assert "nanogpt-tpu prepare" in str(caught.value)
    with pytest.raises(UserError, match="no val shards"):
        list_shards(make_shards(tmp_path, 20), "val")


def test_find_data(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOGPT_TPU_INPUT", str(tmp_path))
    with pytest.raises(UserError, match="no data under"):
        find_data()
    folders = [tmp_path / "one" / "data", tmp_path / "two"]
    for folder in folders:
        folder.mkdir(parents=True)
    make_shards(folders[0], 20, manifest=True)
    assert find_data() == find_data(tmp_path / "one") == find_data(folders[0]) == folders[0]
    make_shards(folders[1], 20, manifest=True)
    with pytest.raises(UserError) as caught:
        find_data()
    assert all(str(folder) in str(caught.value) for folder in folders)
    assert find_data(tmp_path / "two") == folders[1]


# Batches


def test_a_step_below_0(tmp_path):
    with pytest.raises(UserError, match="step is -1"):
        load(make_shards(tmp_path, 40))(-1)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_targets_are_the_inputs_shifted_by_one(tmp_path, n, shuffle):
    loader = load(make_shards(tmp_path, 40, 33, 17), n=n, shuffle=shuffle)
    for step in range(12):
        idx, targets = loader(step)
        assert idx.shape == targets.shape == (n, T)
        assert idx.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, idx + 1)
        assert int(idx.min()) >= 0 and int(targets.max()) < 40 + 33 + 17


@pytest.mark.parametrize(
    ("sizes", "windows", "dropped"),
    [
        ((17,), 2, 0),
        ((18,), 2, 1),
        ((32,), 3, 7),
        ((33,), 4, 0),
        ((16, 40), 5, 7 + 7),
        ((40, 16), 5, 7 + 7),
        ((8, 17, 0, 9), 3, 8),
        ((1, 2, 8, 17), 2, 1 + 2 + 8),
    ],
)
@pytest.mark.parametrize("manifest", [True, False])
def test_windows_of_short_and_mixed_shards(tmp_path, sizes, windows, dropped, manifest):
    """Every shard gives what whole windows it has; a batch of 17 tokens is the least."""
    loader = load(make_shards(tmp_path, *sizes, manifest=manifest), n=1, shuffle=False)
    assert loader.num_windows == windows
    assert loader.num_dropped_tokens == dropped
    ends = np.cumsum(sizes)
    starts = [
        start + T * k
        for start, size in zip(ends - sizes, sizes, strict=True)
        for k in range((size - 1) // T)
    ]
    assert [int(loader(step)[0][0, 0]) for step in range(windows)] == starts
    seen = {int(token) for step in range(windows) for part in loader(step) for token in part[0]}
    assert sum(sizes) - len(seen) == dropped


def test_batches_at_the_edge_of_a_shard(tmp_path):
    idx, targets = load(make_shards(tmp_path, 17), shuffle=False)(0)
    assert idx.flatten().tolist() == list(range(16))
    assert targets.flatten().tolist() == list(range(1, 17))
    loader = load(make_shards(tmp_path, 33), shuffle=False)
    assert [loader(step)[0].flatten().tolist() for step in (0, 1)] == [
        list(range(16)),
        list(range(16, 32)),
    ]


@pytest.mark.parametrize("size", [0, 1, 8, 16])
@pytest.mark.parametrize("manifest", [True, False])
def test_too_little_for_a_batch(tmp_path, size, manifest):
    folder = make_shards(tmp_path, 0, size, manifest=manifest)
    with pytest.raises(UserError) as caught:
        load(folder)
    message = str(caught.value)
    longest = shard_name("train", 1 if size else 0)
    assert f"{folder / longest} holds {size} tokens" in message
    assert f"one step needs {B} sequences ({B * T + 1} tokens)" in message
    assert "lower tokens_per_step or seq_len" in message


def starts(loader: ShardLoader, steps: range) -> list[int]:
    return [int(first) for step in steps for first in loader(step)[0][:, 0]]


@pytest.mark.parametrize("n", [1, 3, 5, 10])
def test_an_epoch_visits_every_window_once_in_an_order_of_its_own(tmp_path, n):
    loader = load(make_shards(tmp_path, 8 * 12 + 1, 8 * 18 + 4), n=n)
    assert loader.num_windows == 30
    epochs = np.reshape(starts(loader, range(90 // n)), (3, 30)).tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len(set(epochs[0])) == 30
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])


def test_a_batch_is_a_function_of_seed_and_step(tmp_path):
    folder = make_shards(tmp_path, 8 * 50 + 1)
    forwards, backwards = load(folder), load(folder)
    batches = [forwards(step) for step in range(60)]
    for step in reversed(range(60)):
        assert all(map(torch.equal, backwards(step), batches[step]))
    orders = {tuple(starts(load(folder, seed=seed), range(25))) for seed in (0, 1, 2, 2**31 - 1)}
    assert len(orders) == 4


def test_the_same_batch_on_any_number_of_devices(tmp_path):
    folder = make_shards(tmp_path, 8 * 100 + 1)
    plans = [BatchPlan(B, T, devices, 8 * B * T) for devices in (1, 2, 4, 8)]
    batches = []
    for plan in plans:
        idx, _ = load(folder, n=plan.sequences_per_step)(7)
        micro_steps = idx.split(plan.sequences_per_micro_step)
        assert len(micro_steps) == plan.num_micro_steps
        on_device = [part for micro in micro_steps for part in micro.chunk(plan.num_devices)]
        assert all(part.shape == (B, T) for part in on_device)
        firsts = [int(first) for part in on_device for first in part[:, 0]]
        assert len(set(firsts)) == len(firsts)
        batches.append(firsts)
    assert all(batch == batches[0] for batch in batches)


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4097, 99_991])
def test_permute_is_a_permutation(size):
    places = np.arange(size)
    order = permute(places, size, seed=5, epoch=0)
    assert np.array_equal(np.sort(order), places)
    assert np.array_equal(permute(places[size // 2 :], size, 5, 0), order[size // 2 :])
    if size > 30:
        assert not np.array_equal(order, places)
        assert not np.array_equal(order, permute(places, size, seed=5, epoch=1))
        assert not np.array_equal(order, permute(places, size, seed=6, epoch=0))


def test_permute_scatters_neighbours():
    """Windows that stand together must not stay together: about half fall in either half."""
    order = permute(np.arange(10_000), 10_000, seed=1, epoch=0)
    assert 4600 < int((order[:5000] < 5000).sum()) * 2 < 5400
    assert np.median(np.abs(np.diff(order))) > 1500


def test_data_order_stays_what_it_was():
    """A resumed run must meet the same windows under every later version."""
    order = permute(np.arange(10), 10, seed=1337, epoch=0)
    assert order.tolist() == [2, 4, 1, 8, 7, 0, 3, 6, 9, 5]
    order = permute(np.arange(4), 10**9, seed=1337, epoch=2)
    assert order.tolist() == [851939081, 189250175, 686736288, 722331234]
