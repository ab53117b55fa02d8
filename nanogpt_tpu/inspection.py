"""Look at a data folder before training on it: every hash, every length, every id.

A wrong id must be found here, on the host: XLA clamps it silently inside the embedding.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.shards import Manifest, ShardInfo, hash_file, read_shard
from nanogpt_tpu.tokenizer import load_tokenizer


def inspect(data: str | os.PathLike[str]) -> dict[str, Any]:
    """Verify a data folder.

    Returns the manifest's fields, `num_tokens` per split, `num_eot` (end-of-text ids found) and
    `problems`, one line each: empty when all is well.

    Raises:
        UserError: no data there at all.
    """
    folder = Path(data)
    manifest = Manifest.load(folder)
    problems = _check_tokenizer(folder, manifest.tokenizer)
    num_eot = 0
    for shards in manifest.splits.values():
        for shard in shards:
            found, shard_eot = _check_shard(folder / shard.file, shard, manifest.tokenizer)
            problems += found
            num_eot += shard_eot
    return {
        **manifest.to_dict(),
        "num_tokens": {split: manifest.num_tokens(split) for split in manifest.splits},
        "num_eot": num_eot,
        "problems": problems,
    }


def _check_shard(path: Path, shard: ShardInfo, tokenizer: dict[str, Any]) -> tuple[list[str], int]:
    """What is wrong with one shard, and how many end-of-text ids it holds."""
    try:
        tokens = read_shard(path)
    except UserError as error:
        return [str(error)], 0
    if tokens.size != shard.num_tokens:
        return [f"{path} holds {tokens.size} tokens, the manifest says {shard.num_tokens}"], 0
    problems = []
    if hash_file(path) != shard.sha256:
        problems.append(f"{path} differs from its sha256 in the manifest: its bytes were changed")
    vocab_size = tokenizer["vocab_size"]
    if tokens.size and int(tokens.max()) >= vocab_size:
        place = int(np.argmax(tokens >= vocab_size))
        problems.append(
            f"{path} has id {tokens[place]} at position {place}, outside the vocabulary of "
            f"{vocab_size}"
        )
    return problems, int(np.count_nonzero(tokens == tokenizer["eot_id"]))


def _check_tokenizer(folder: Path, described: dict[str, Any]) -> list[str]:
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:
        return [str(error)]
    found = tokenizer.describe()
    differing = [key for key in ("sha256", "vocab_size", "eot_id") if found[key] != described[key]]
    if differing:
        return [
            f"{folder / found['file']} is not the tokenizer that made these shards: "
            f"{', '.join(differing)} differ from the manifest"
        ]
    return []


def draw_lengths(data: str | os.PathLike[str]) -> Path:
    """Draw how long the documents are, in tokens, on a logarithmic axis; mean and median marked.

    Returns the path of lengths.png in the data folder.

    Raises:
        UserError: no data there.
    """
    folder = Path(data)
    manifest = Manifest.load(folder)
    eot_id = manifest.tokenizer["eot_id"]
    starts, offset = [], 0
    for shards in manifest.splits.values():
        for shard in shards:
            tokens = read_shard(folder / shard.file)
            starts.append(np.flatnonzero(tokens == eot_id) + offset)
            offset += tokens.size
    lengths = np.diff(np.append(np.concatenate(starts), offset)) - 1  # without end-of-text
    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.hist(
        lengths, bins=list(np.geomspace(1, max(2, lengths.max()), 40)), color="#3563c9", alpha=0.8
    )
    for value, name, style in ((lengths.mean(), "mean", "-"), (np.median(lengths), "median", "--")):
        axes.axvline(value, color="#d2600f", linestyle=style, label=f"{name} {value:,.0f}")
    axes.set(xscale="log", xlabel="tokens in a document", ylabel="documents")
    axes.set_title(f"{lengths.size:,} documents, {offset:,} tokens")
    axes.legend(frameon=False)
    path = folder / "lengths.png"
    figure.savefig(path)
    return path
