"""Documents to tokens to shards.

    prepare("book.txt", "data", train_tokenizer=4096)
    prepare("demo", "data", tokenizer="bytes")        # text that every Python carries, no network

The rules, the same for every source: text is ordinary text (`tokenizer.clean_text` says how it is
cleaned), and each document is preceded by one end-of-text id. The first tenth of the tokens, at
most `val_tokens`, is the validation split, cut between documents where it can be.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.shards import MANIFEST, SPLITS, Manifest, ShardInfo, shard_name, write_shard
from nanogpt_tpu.sources import Reader
from nanogpt_tpu.tokenizer import Tokenizer, load_tokenizer
from nanogpt_tpu.tokenizer import train_tokenizer as learn_tokenizer

BATCH_DOCUMENTS = 256


class ShardWriter:
    """Takes token arrays, cuts them into shards of a split; keeps at most one shard in memory."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, dtype: Any) -> None:
        self._folder, self._split = folder, split
        self._buffer = np.empty(shard_tokens, dtype=dtype)
        self._used = 0
        self.shards: list[ShardInfo] = []

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens, writing each shard that fills up."""
        while tokens.size:
            taken = min(tokens.size, self._buffer.size - self._used)
            self._buffer[self._used : self._used + taken] = tokens[:taken]
            self._used += taken
            tokens = tokens[taken:]
            if self._used == self._buffer.size:
                self.close()

    def close(self) -> None:
        """Write what is left, if anything."""
        if self._used:
            path = self._folder / shard_name(self._split, len(self.shards))
            self.shards.append(write_shard(path, self._buffer[: self._used]))
            self._used = 0


def prepare(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] = "gpt2",
    *,
    train_tokenizer: int | None = None,
    val_tokens: int = 1_048_576,
    shard_tokens: int = 100_000_000,
    max_tokens: int | None = None,
    text_field: str = "text",
) -> Manifest:
    """Turn documents into token shards in folder `out`; nothing appears there before all is done.

    Args:
        source: "demo", or files, folders and globs of .txt, .md (one document each) and .jsonl.
        out: the data folder; made if missing, refused if it holds other data.
        tokenizer: "gpt2", "bytes", or a tokenizer.json; not used when train_tokenizer is given.
        train_tokenizer: size of a byte-level BPE to train on the source itself.
        val_tokens: the most tokens of the validation split; 0 for none.
        shard_tokens: tokens in a full shard.
        max_tokens: stop reading after about this many.
        text_field: the field of a JSON line that holds its text.

    Raises:
        UserError: missing, empty or undecodable source; bad sizes; folder not writable or taken.
    """
    names = (source,) if isinstance(source, str | os.PathLike) else tuple(source)
    _check_sizes(val_tokens=val_tokens + 1, shard_tokens=shard_tokens, max_tokens=max_tokens)
    reader = Reader(tuple(os.fspath(name) for name in names), text_field)
    settings = {
        "tokenizer": f"train {train_tokenizer}" if train_tokenizer else os.fspath(tokenizer),
        "val_tokens": val_tokens,
        "shard_tokens": shard_tokens,
        "max_tokens": max_tokens,
        "text_field": text_field,
    }
    folder = Path(out)
    existing = _existing(folder, " ".join(reader.sources), settings)
    if existing is not None:
        return existing
    chosen = (
        learn_tokenizer(reader, train_tokenizer) if train_tokenizer else load_tokenizer(tokenizer)
    )
    made_folder = not folder.exists()
    staging = folder / ".partial"
    try:
        staging.mkdir(parents=True)
        manifest = _write_all(reader, chosen, staging, settings)
        chosen.save(staging)
        for path in sorted(staging.iterdir()):
            path.replace(folder / path.name)
        manifest.save(folder)
    except OSError as error:
        raise UserError(f"data folder {folder} cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if made_folder and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    for line in reader.warnings:
        print(f"warning: {line}", file=sys.stderr)
    return manifest


def _check_sizes(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is too small: it must be at least 1 (val_tokens at least 0)")


def _existing(folder: Path, source: str, settings: dict[str, Any]) -> Manifest | None:
    """The manifest already in `folder` if it was made from the same source in the same way."""
    if not (folder / MANIFEST).exists():
        shutil.rmtree(folder / ".partial", ignore_errors=True)  # left by a killed run
        return None
    manifest = Manifest.load(folder)
    if (manifest.source, manifest.settings) != (source, settings):
        raise UserError(
            f"{folder} already holds data made from {manifest.source!r} with other settings: "
            "choose another --out, or delete it"
        )
    return manifest


def _write_all(
    reader: Reader, tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]
) -> Manifest:
    """Encode every document and write both splits into `folder`."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    val_tokens, max_tokens = settings["val_tokens"], settings["max_tokens"]
    splits = {
        split: ShardWriter(folder, split, size, dtype)
        for split, size in (("val", max(1, val_tokens)), ("train", settings["shard_tokens"]))
    }
    head: list[np.ndarray] | None = []  # documents held back until the validation cut is known
    num_documents = num_tokens = head_tokens = 0
    progress = tqdm(desc="tokens", unit="tok", unit_scale=True, disable=None)
    for document in _encode(reader, tokenizer, dtype):
        num_documents += 1
        num_tokens += document.size
        progress.update(document.size)
        if head is None:
            splits["train"].add(document)
        else:
            head.append(document)
            head_tokens += document.size
            if head_tokens >= 10 * val_tokens:
                _cut_head(head, head_tokens, splits, val_tokens)
                head = None
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    progress.close()
    if head is not None:
        _cut_head(head, head_tokens, splits, val_tokens)
    if num_documents == 0:
        skipped = ", ".join(f"{n} {why}" for why, n in reader.num_skipped.items()) or "no document"
        raise UserError(f"source {' '.join(reader.sources)!r} has no text: {skipped}")
    for writer in splits.values():
        writer.close()
    return Manifest(
        tokenizer=tokenizer.describe(),
        splits={split: splits[split].shards for split in SPLITS},
        num_documents=num_documents,
        num_skipped=dict(reader.num_skipped),
        source=" ".join(reader.sources),
        settings=settings,
    )


def _encode(reader: Reader, tokenizer: Tokenizer, dtype: Any) -> Iterator[np.ndarray]:
    """Each document's ids, preceded by end-of-text."""
    batch: list[str] = []

    def flush() -> Iterator[np.ndarray]:
        for ids in tokenizer.encode_batch(batch):
            yield np.array([tokenizer.eot_id, *ids], dtype=dtype)
        batch.clear()

    for text in reader:
        batch.append(text)
        if len(batch) == BATCH_DOCUMENTS:
            yield from flush()
    yield from flush()


def _cut_head(
    head: list[np.ndarray], head_tokens: int, splits: dict[str, ShardWriter], val_tokens: int
) -> None:
    """Send the first documents to validation: a tenth of `head`, at most `val_tokens`.

    Whole documents, unless the one at the cut is so long that keeping it whole would more than
    double the split: then it is cut inside.
    """
    wanted = min(val_tokens, head_tokens // 10)
    taken = 0
    for document in head:
        if taken >= wanted:
            splits["train"].add(document)
            continue
        room = document.size if taken + document.size <= 2 * wanted else wanted - taken
        splits["val"].add(document[:room])
        splits["train"].add(document[room:])
        taken += room
