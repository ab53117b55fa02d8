"""Data folders out of shards that are there: parts merged, ready-made ones downloaded."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanogpt_tpu import hub
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.manifest import MANIFEST, Manifest, folder_of, mix
from nanogpt_tpu.shardfile import ShardInfo, hash_file, read_shard, shard_name
from nanogpt_tpu.tokenizer import load_tokenizer, verify

READY = "fineweb-shards"
_MAX_READY = 103


def merge(data: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Manifest:
    """One data folder for several, such as those of `prepare --part`; no token is copied.

    Shards become links: hard ones where the disk is the same, else symbolic.

    Raises:
        UserError: different tokenizers, a shard that is there twice, or `out` is taken.
    """
    target, parts = Path(out), {os.fspath(folder): Manifest.load(folder) for folder in data}
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} is not empty: choose another --out")
    mixed = mix(parts, dict.fromkeys(parts, 1 / len(parts)))
    every = [shard for shards in mixed.splits.values() for shard in shards]
    hashes = [shard.sha256 for shard in every if shard.sha256]
    if len(parts) < len(data) or len(set(hashes)) < len(hashes):
        raise UserError(f"{' '.join(map(str, data))}: folders share shards: name each part once")
    tokenizers = [verify(folder_of(folder), part) for folder, part in parts.items()]
    if foreign := [shard.file for shard in every if shard.file.endswith(".npy")]:
        raise UserError(f"{foreign[0]} has no header as ours: prepare its text instead")
    target.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list[ShardInfo]] = {split: [] for split in mixed.splits}
    for split, shards in mixed.splits.items():
        for number, shard in enumerate(shards):
            name = shard_name(split, number)
            _link(Path(shard.file).resolve(), target / name)
            splits[split].append(replace(shard, file=name))
    tokenizers[0].save(target)
    source = " + ".join(dict.fromkeys(part.source for part in parts.values()))
    settings = {"merged": [part.settings for part in parts.values()]}
    merged = replace(mixed, splits=splits, source=source, settings=settings)
    merged.save(target)
    return merged


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError:  # another disk, such as Kaggle's read-only inputs
        link.symlink_to(path)


def download_ready(number: str, out: str | os.PathLike[str]) -> Manifest:
    """The first `number` of the public FineWeb 10B shards of GPT-2 tokens, verified.

    100M tokens each, and one for validation. What is whole already is not fetched again.

    Raises:
        UserError: a shard is not what the hub's hash says, or has ids outside GPT-2's.
        PausedError: the hub stayed out of reach.
    """
    target = Path(out)
    count = int(number) if number.isdecimal() else 0
    if not 1 <= count <= _MAX_READY:
        raise UserError(f"{READY}:{number}: there are 1 to {_MAX_READY} shards of 100M tokens")
    wanted = {"val": [0], "train": list(range(1, count + 1))}
    if (target / MANIFEST).is_file():
        manifest = Manifest.load(target)
        if manifest.source == f"{READY}:{count}":
            verify(target, manifest)
            print(f"{target} already holds this data: nothing to do", file=sys.stderr)
            return manifest
        raise UserError(f"{target} holds {manifest.source}: choose another --out")
    tokenizer = load_tokenizer("gpt2")
    num_documents = 0
    splits: dict[str, list[ShardInfo]] = {}
    for split, indices in wanted.items():
        splits[split] = []
        for index in indices:
            name = f"fineweb_{split}_{index:06d}.bin"
            path, sha256 = hub.fetch(hub.READY_REPO, name, target)
            found = hash_file(path)
            if sha256 not in (None, found):
                path.unlink()
                raise UserError(f"{path} differs from the hub's sha256: start again to fetch it")
            tokens = read_shard(path)
            if tokens.size and int(tokens.max()) >= tokenizer.vocab_size:
                raise UserError(f"{path} has ids outside GPT-2's vocabulary")
            num_documents += int(np.count_nonzero(tokens == tokenizer.eot_id))
            splits[split].append(ShardInfo(name, int(tokens.size), found))
            print(f"{name}: {tokens.size:,} tokens", file=sys.stderr)
    shutil.rmtree(target / ".cache", ignore_errors=True)  # what the download library leaves
    tokenizer.save(target)
    manifest = Manifest(tokenizer.describe(), splits, num_documents, {}, f"{READY}:{count}")
    manifest.save(target)
    return manifest
