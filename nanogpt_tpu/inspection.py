"""Look at a data folder before training on it: every hash, every id, every length.

A wrong id must be found here, on the host: XLA clamps it silently inside the embedding. Shards are
read a slice at a time, and lengths are kept as counts: memory does not grow with the corpus.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nanogpt_tpu import env
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.manifest import Manifest, folder_of, parse_data
from nanogpt_tpu.shardfile import HEADERLESS, ShardInfo, read_shard, verify_shard
from nanogpt_tpu.tokenizer import Tokenizer, tokenizer_of

_SLICE = 2**23  # tokens looked at together
_PRINT_TOKENS = 32  # as many of its first tokens, and its length, tell documents apart
_PRIMES = np.cumprod(np.full(_PRINT_TOKENS, 6364136223846793005, dtype=np.uint64))


class _Look:
    """What one pass over all shards finds."""

    def __init__(self, manifest: Manifest, vocab_size: int) -> None:
        self.problems: list[str] = []
        self._lengths: Counter[int] = Counter()  # end-of-text not counted
        self.num_eot = self.num_overlaps = 0
        self.id_counts = np.zeros(vocab_size, dtype=np.int64)
        self._eot_id = manifest.tokenizer["eot_id"]
        self._val_prints = np.zeros(0, dtype=np.uint64)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """(lengths, number of documents of each), int64, ascending."""
        table = np.array(sorted(self._lengths.items()), dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def shard(self, path: Path, shard: ShardInfo, data: str, split: str) -> None:
        """Check one shard and count what is in it; a document cut by its end counts as two."""
        try:
            verify_shard(path, shard, data)
        except UserError as error:
            self.problems.append(str(error))
        try:
            tokens = read_shard(path, data)
        except UserError:
            return
        begin, bad = 0, None
        for start in range(0, tokens.size, _SLICE):
            part = np.asarray(tokens[start : start + _SLICE])
            counts = np.bincount(part, minlength=self.id_counts.size)
            if bad is None and counts.size > self.id_counts.size:
                bad = start + int(np.argmax(part >= self.id_counts.size))
            self.id_counts += counts[: self.id_counts.size]
            found = np.flatnonzero(part == self._eot_id) + start
            self.num_eot += found.size
            ends = np.append(found, tokens.size) if start + _SLICE >= tokens.size else found
            if ends.size:
                self._documents(tokens, np.append(begin, ends[:-1]), ends, split)
                begin = int(ends[-1])
        if bad is not None:
            self.problems.append(
                f"{path} has id {tokens[bad]} at position {bad}, outside the vocabulary of "
                f"{self.id_counts.size}"
            )

    def _documents(
        self, tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray, split: str
    ) -> None:
        begins, ends = begins[ends > begins], ends[ends > begins]
        starts = begins + (tokens[begins] == self._eot_id)  # what follows end-of-text
        lengths = ends - starts
        values, counts = np.unique(lengths, return_counts=True)
        self._lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        is_whole = (lengths >= _PRINT_TOKENS) & (starts > begins)
        places = starts[is_whole][:, None] + np.arange(_PRINT_TOKENS)
        prints = (tokens[places].astype(np.uint64) + 1) @ _PRIMES
        prints ^= lengths[is_whole].astype(np.uint64) << np.uint64(40)
        if split == "val":
            self._val_prints = np.append(self._val_prints, prints)
        else:
            self.num_overlaps += int(np.isin(prints, self._val_prints).sum())


def inspect(
    data: str | os.PathLike[str], block_size: int = 1024, draw: bool = False
) -> dict[str, Any]:
    """Verify a data folder or a mixture, and count its documents.

    Args:
        data: what `--data` takes.
        block_size: the context, in tokens, that documents are compared with.
        draw: also draw the lengths; the path is under "picture".

    Returns:
        The manifest's fields, `num_tokens` per split, `num_eot` (end-of-text ids found), `lengths`
        (see `_statistics`), and `problems`, one line each: empty when all is well.

    Raises:
        UserError: no data there at all, or a block_size below 1.
    """
    if block_size < 1:
        raise UserError(f"block_size is {block_size}: it must be at least 1")
    manifest, folder = Manifest.load(data), folder_of(data)
    problems: list[str] = []
    try:
        tokenizer = tokenizer_of(data, manifest)
    except UserError as error:
        problems, tokenizer = [str(error)], None
    look = _Look(manifest, manifest.tokenizer["vocab_size"])
    base = folder if len(parse_data(data)) == 1 else Path()
    headerless = HEADERLESS if os.fspath(data).startswith(HEADERLESS) else ""
    for split in ("val", "train"):
        for shard in manifest.splits.get(split, []):
            look.shard(base / shard.file, shard, headerless, split)
    found = {
        **manifest.to_dict(),
        "num_tokens": {split: manifest.num_tokens(split) for split in manifest.splits},
        "num_eot": look.num_eot,
        "lengths": _statistics(look, tokenizer, block_size),
        "problems": problems + look.problems + _check_whole(manifest, look, tokenizer is not None),
    }
    if draw:
        found["picture"] = os.fspath(_draw(folder, found, *look.lengths()))
    return found


def _check_whole(manifest: Manifest, look: _Look, knows_eot: bool) -> list[str]:
    """What no shard shows by itself."""
    problems = []
    files: dict[str, str] = {}
    for shards in manifest.splits.values():
        for shard in shards:
            if shard.sha256 and shard.sha256 in files:
                problems.append(f"{shard.file} holds the same tokens as {files[shard.sha256]}")
            files[shard.sha256] = shard.file
    num_tokens = int(look.id_counts.sum())
    if knows_eot and num_tokens and not look.num_eot:
        problems.append("no end-of-text id in any shard: the model cannot learn where texts end")
    elif look.num_eot > num_tokens / 3:
        problems.append(f"{look.num_eot:,} of {num_tokens:,} tokens are end-of-text: empty texts?")
    if look.num_overlaps:
        problems.append(
            f"{look.num_overlaps:,} training documents begin as one of validation does and are as "
            "long: drop duplicates (--drop-duplicates exact) to have an honest validation loss"
        )
    return problems


def _statistics(look: _Look, tokenizer: Tokenizer | None, block_size: int) -> dict[str, Any]:
    """Documents, mean, median, longest; bytes per token; what one document a row would cost.

    `tokens_lost`: share of all tokens if each document were cut to block_size. `padding`: share of
    all places if each were also padded to it. Packing, as here, loses and pads nothing.
    """
    lengths, counts = look.lengths()
    num_documents, num_tokens = int(counts.sum()), int(lengths @ counts)
    if not num_tokens:
        return {"num_documents": num_documents}
    kept = int(np.minimum(lengths, block_size) @ counts)
    median = lengths[np.searchsorted(np.cumsum(counts), (num_documents + 1) // 2)]
    num_bytes = int(look.id_counts @ tokenizer.token_num_bytes()) if tokenizer else None
    return {
        "num_documents": num_documents,
        "mean": num_tokens / num_documents,
        "median": int(median),
        "longest": int(lengths[-1]),
        "bytes_per_token": num_bytes / num_tokens if num_bytes else None,
        "block_size": block_size,
        "share_over_block": int(counts[lengths > block_size].sum()) / num_documents,
        "tokens_lost": 1 - kept / num_tokens,
        "padding": 1 - kept / (num_documents * block_size),
    }


def draw_lengths(data: str | os.PathLike[str]) -> Path:
    """Draw how long the documents are, in tokens, on a logarithmic axis; mean and median marked.

    Returns the path of lengths.png: in the data folder, or in the working folder where that is
    read-only.

    Raises:
        UserError: no data there.
    """
    return Path(inspect(data, draw=True)["picture"])


def _draw(folder: Path, found: dict[str, Any], lengths: np.ndarray, counts: np.ndarray) -> Path:
    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    bins = list(np.geomspace(1, max(2, lengths.max(initial=2)), 40))
    axes.hist(lengths, bins=bins, weights=counts, color="#3563c9", alpha=0.8)
    for name, style in (("mean", "-"), ("median", "--")):
        value = found["lengths"].get(name, 0)
        axes.axvline(value, color="#d2600f", linestyle=style, label=f"{name} {value:,.0f}")
    axes.set(xscale="log", xlabel="tokens in a document", ylabel="documents")
    num_tokens = sum(found["num_tokens"].values())
    axes.set_title(f"{counts.sum():,} documents, {num_tokens:,} tokens")
    axes.legend(frameon=False)
    home = folder if os.access(folder, os.W_OK) else env.working_dir()
    path = home / "lengths.png"
    figure.savefig(path)
    return path


def describe(found: dict[str, Any]) -> list[str]:
    """What `inspect` found, for people."""
    lines = []
    for split, count in found["num_tokens"].items():
        lines.append(f"{split}: {count:,} tokens in {len(found['splits'][split])} shard(s)")
    lines.append(f"{found['num_documents']:,} documents, {found['num_eot']:,} end-of-text ids")
    if (lengths := found["lengths"])["num_documents"]:
        lines.append(
            "mean {mean:,.0f}, median {median:,}, longest {longest:,} tokens".format(**lengths)
        )
        if lengths["bytes_per_token"]:
            lines.append(f"{lengths['bytes_per_token']:.2f} bytes per token")
        lines.append(
            "{share_over_block:.1%} of documents over {block_size:,} tokens; one a row would lose "
            "{tokens_lost:.1%} of the tokens and pad {padding:.1%}; packed: 0%".format(**lengths)
        )
    lines.append(f"Lengths: {found['picture']}")
    for problem in found["problems"]:
        lines.append(f"problem: {problem}")
    if not found["problems"]:
        lines.append("Every hash, length and id is right.")
    return lines
