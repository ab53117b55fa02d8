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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanogpt_tpu.errors import UserError, between, positive, well_typed
from nanogpt_tpu.shards import MANIFEST, Manifest, ShardInfo, read_shard, shard_name, write_shard
from nanogpt_tpu.sources import Reader
from nanogpt_tpu.tokenizer import Tokenizer, load_tokenizer
from nanogpt_tpu.tokenizer import train_tokenizer as learn_tokenizer

BATCH_DOCUMENTS = 256
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Settings:
    """How a data folder was made; the manifest keeps it, to know the same call again."""

    source_bytes: int
    tokenizer: str | None
    train_tokenizer: int | None
    val_tokens: int
    shard_tokens: int
    max_tokens: int | None
    text_field: str

    def __post_init__(self) -> None:
        well_typed(self)
        positive(self, "train_tokenizer", "max_tokens")
        between(self, 0, 2**40, "val_tokens")
        between(self, 1, 2**31 - 1, "shard_tokens")  # its header counts in int32


def prepare(
    source: PathLike | Sequence[PathLike],
    out: PathLike,
    tokenizer: PathLike = "gpt2",
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
        max_tokens: stop after so many.
        text_field: the field of a JSON line that holds its text.

    Raises:
        UserError: missing, empty or undecodable source; bad sizes; folder not writable or taken.
    """
    names = (source,) if isinstance(source, str | os.PathLike) else tuple(source)
    reader = Reader(tuple(os.fspath(name) for name in names), text_field)
    name = None if train_tokenizer is not None else _as_text(tokenizer)
    settings = Settings(
        reader.num_bytes, name, train_tokenizer, val_tokens, shard_tokens, max_tokens, text_field
    )
    folder = Path(out)
    return _existing(folder, reader, settings) or _make(folder, reader, tokenizer, settings)


def _as_text(path: PathLike) -> str:
    """A path for people to read and for JSON to hold, the same in every locale."""
    return os.fsencode(path).decode("utf-8", "replace")


def _source(reader: Reader) -> str:
    return " ".join(map(_as_text, reader.sources))


def _existing(folder: Path, reader: Reader, settings: Settings) -> Manifest | None:
    """The manifest already in `folder` if it was made from the same source in the same way."""
    if not (folder / MANIFEST).exists():
        if any(folder.glob("*.bin")):
            raise UserError(f"{folder} holds shards of something else: choose another --out")
        return None
    manifest = Manifest.load(folder)
    then = {"source": manifest.source, **manifest.settings}
    now = {"source": _source(reader), **asdict(settings)}
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            raise UserError(
                f"{folder} already holds data made with {name} {then.get(name)!r}, now it is "
                f"{now.get(name)!r}: choose another --out, or delete that one"
            )
    for shards in manifest.splits.values():
        for shard in shards:
            read_shard(folder / shard.file)
    print(f"{folder} already holds this data: nothing to do", file=sys.stderr)
    return manifest


def _make(folder: Path, reader: Reader, tokenizer: PathLike, settings: Settings) -> Manifest:
    with _staging(folder) as staging:
        if settings.train_tokenizer is not None:
            chosen = learn_tokenizer(reader, settings.train_tokenizer)
        else:
            chosen = load_tokenizer(tokenizer)
        manifest = _write_all(reader, chosen, staging, settings)
        chosen.save(staging)
        for path in sorted(staging.iterdir()):
            path.replace(folder / path.name)
        manifest.save(folder)
    for line in reader.warnings:
        print(f"warning: {line}", file=sys.stderr)
    return manifest


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder inside `folder` to write into; a failure leaves nothing of what was made here."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    staging = folder / ".partial"
    try:
        shutil.rmtree(staging, ignore_errors=True)  # left by a killed run
        staging.mkdir(parents=True)
        yield staging
    except OSError as error:
        raise UserError(f"data folder {folder} cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for path in missing:
            with suppress(OSError):  # not empty: all went well
                path.rmdir()


def _write_all(reader: Reader, tokenizer: Tokenizer, folder: Path, settings: Settings) -> Manifest:
    """Encode every document and write both splits into `folder`."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    splitter = Splitter(folder, settings.val_tokens, settings.shard_tokens, dtype)
    num_documents = num_tokens = 0
    with tqdm(desc="tokens", unit="tok", unit_scale=True, disable=None) as progress:
        for document in _encode(reader, tokenizer, dtype):
            if settings.max_tokens is not None:
                document = document[: settings.max_tokens - num_tokens]
            splitter.add(document)
            num_documents += 1
            num_tokens += document.size
            progress.update(document.size)
            if num_tokens == settings.max_tokens:
                break
    if num_documents == 0:
        skipped = ", ".join(f"{n} {why}" for why, n in reader.num_skipped.items()) or "no document"
        raise UserError(f"source {_source(reader)!r} has no text: {skipped}")
    return Manifest(
        tokenizer=tokenizer.describe(),
        splits=splitter.close(),
        num_documents=num_documents,
        num_skipped=dict(reader.num_skipped),
        source=_source(reader),
        settings=asdict(settings),
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


class Splitter:
    """Sends the first documents to validation and the others to training."""

    def __init__(self, folder: Path, val_tokens: int, shard_tokens: int, dtype: Any) -> None:
        self._val_tokens = val_tokens
        self._train = ShardWriter(folder, "train", shard_tokens, dtype)
        self._val = ShardWriter(folder, "val", shard_tokens, dtype)
        self._head: list[np.ndarray] | None = []  # held back until the validation cut is known
        self._head_tokens = 0

    def add(self, document: np.ndarray) -> None:
        """Take the next document."""
        if self._head is None:
            self._train.add(document)
            return
        self._head.append(document)
        self._head_tokens += document.size
        if self._head_tokens >= 10 * self._val_tokens:
            self._cut(self._head)
            self._head = None

    def close(self) -> dict[str, list[ShardInfo]]:
        """Write what is left; the shards of each split."""
        if self._head:
            self._cut(self._head)
        self._train.close()
        self._val.close()
        return {"train": self._train.shards, "val": self._val.shards}

    def _cut(self, head: list[np.ndarray]) -> None:
        """Send a tenth of `head`, at most val_tokens, to validation and the rest to training.

        The documents that fit whole, if they fill half of that; else the next is cut inside.
        """
        wanted = min(self._val_tokens, self._head_tokens // 10)
        ends = np.cumsum([document.size for document in head])
        num_whole = int(ends[ends <= wanted].max(initial=0))
        num_val = num_whole if num_whole >= wanted / 2 else wanted
        tokens = np.concatenate(head)
        self._val.add(tokens[:num_val])
        self._train.add(tokens[num_val:])
