"""Documents to tokens to shards, on all cores, so that a kill at any moment loses seconds.

    prepare("book.txt", "data", train_tokenizer=4096)
    prepare("demo", "data", tokenizer="bytes")        # text that every Python carries, no network

The rules, the same for every source: text is ordinary text (`encode.clean_text` says how it is
cleaned), and each document is preceded by one end-of-text id. The first tenth of the tokens, at
most `val_tokens`, is the validation split, cut between documents where it can be.

Work lies in the folder `.partial` until all is done. Its journal holds where the reader and the
writer stood together; the same call goes on there, whatever the number of workers.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanogpt_tpu.encode import Encoder, encode_all
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.files import Piece
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.merge import READY, download_ready
from nanogpt_tpu.shardfile import Writer
from nanogpt_tpu.sources import Reader, fingerprint
from nanogpt_tpu.staging import Settings, Staging, locked
from nanogpt_tpu.tokenizer import FILE_NAME, Tokenizer, load_tokenizer
from nanogpt_tpu.tokenizer import train_tokenizer as learn_tokenizer

BATCH_CHARS, BATCH_DOCUMENTS = 400_000, 4096
LEARN_CHARS = 500_000_000  # of a larger corpus, every n-th document trains the tokenizer
PathLike = str | os.PathLike[str]
Documents = Callable[[], Iterable[str]] | Iterator[str]
State = dict[str, Any] | None


def prepare(
    source: PathLike | Documents | Sequence[PathLike | Documents],
    out: PathLike,
    tokenizer: PathLike = "gpt2",
    *,
    train_tokenizer: int | None = None,
    val_tokens: int = 1_048_576,
    shard_tokens: int = 100_000_000,
    max_tokens: int | None = None,
    max_output_bytes: int | None = None,
    part: str | None = None,
    text_field: str | None = None,
    workers: int | None = None,
    strip_html: bool = False,
    collapse_blank: bool = False,
    min_chars: int | None = None,
    script: str | None = None,
    drop_duplicates: str | None = None,
) -> Manifest:
    """Turn documents into token shards in folder `out`; nothing appears there before all is done.

    Stopped in any way and called again, it goes on, to the same bytes; `workers` changes none.

    Args:
        source: "demo", "poems", "fineweb-edu", "fineweb", "fineweb-shards[:N]" (ready-made),
            "hf:owner/name[:config]"; files, folders
            and globs of .txt, .md (one document each), .jsonl, .parquet, also .gz and .zst; an
            iterator of strings, or a function that returns one; or several of these.
        out: the data folder; made if missing, refused if it holds other data.
        tokenizer: "gpt2", "bytes", or a tokenizer.json; not used when train_tokenizer is given.
        train_tokenizer: size of a byte-level BPE to train on the source itself.
        val_tokens: the most tokens of the validation split; 0 for none.
        shard_tokens: tokens in a full shard.
        max_tokens: stop after so many.
        max_output_bytes: stop before the folder grows larger.
        part: "i/n" prepares the i-th of n parts, by file or else by record; 1/n is the first.
        text_field: field or column that holds the text; "text", or guessed where there is none.
        workers: encoding processes; one a core unless given.
        strip_html: see `clean.Cleaning`, as for those that follow.
        collapse_blank: at most one empty line and one space in a row.
        min_chars: drop shorter documents.
        script: drop documents mostly not in it, such as Han.
        drop_duplicates: "exact" or "near".

    Raises:
        UserError: missing, empty or undecodable source; bad sizes; folder not writable or taken.
        PausedError: disk full or hub out of reach; the same call goes on later.
    """
    given: dict[str, Any] = locals()
    sources = list(source) if isinstance(source, list | tuple) else [source]
    workers = (os.cpu_count() or 1) if workers is None else workers
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers is {workers!r}: it must be a whole number above 0")
    _check_names(out=out, tokenizer=tokenizer)
    parsed = _parse_part(part)
    if train_tokenizer is not None and part is not None:
        raise UserError(
            f"train_tokenizer {train_tokenizer} with part {part}: each part would get other ids; "
            "train once (prepare a sample without part), then give every part that folder's "
            f"{FILE_NAME} as tokenizer"
        )
    origins = tuple(map(_origin, sources))
    if len(origins) == 1 and str(origins[0]).partition(":")[0] == READY:
        with locked(Path(out)):
            return download_ready(str(origins[0]).partition(":")[2] or "8", out)
    reader = Reader(origins, text_field, parsed)
    if train_tokenizer is not None and any(isinstance(one, Iterator) for one in sources):
        raise UserError("an iterator gives its texts once, a tokenizer must be trained first: "
                        "give a function that returns an iterator")  # fmt: skip
    file = _tokenizer_file(tokenizer) if train_tokenizer is None else Path()
    given |= {
        "tokenizer": _as_text(tokenizer) if train_tokenizer is None else None,
        "tokenizer_sample": fingerprint(file).hex() if file.is_file() else None,
        "source_bytes": reader.num_bytes,
        "source_sample": reader.sample,
    }
    settings = Settings(**{name: given[name] for name in Settings.__dataclass_fields__})
    staging = Staging(Path(out), " ".join(map(_as_text, origins)), settings)
    with locked(Path(out)):
        return staging.existing() or _Job(staging, reader, settings, workers).make(tokenizer)


def _check_names(**names: Any) -> None:
    """Refuse what names no file or folder; "" would be the current folder."""
    for name, value in names.items():
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise UserError(f"{name} is {value!r}: it must be a name or a path")


def _tokenizer_file(tokenizer: str | os.PathLike[str]) -> Path:
    path = Path(tokenizer)
    if path.is_dir() and not (path / FILE_NAME).is_file():
        raise UserError(f"no tokenizer at {path / FILE_NAME}: give gpt2, bytes or a {FILE_NAME}")
    return path / FILE_NAME if path.is_dir() else path


def _origin(source: Any) -> str | Callable[[], Iterable[str]]:
    if isinstance(source, Iterator):
        return lambda: source
    if callable(source):
        return source
    _check_names(source=source)
    return os.fspath(source)


def _parse_part(part: str | None) -> tuple[int, int]:
    if part is None:
        return 0, 1
    index, _, count = str(part).partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise UserError(f"part is {part!r}: it must be i/n with i from 1 to n, such as 1/4")
    return int(index) - 1, int(count)


def _as_text(path: Any) -> str:
    """A path for people to read and for JSON to hold, the same in every locale."""
    if isinstance(path, str | os.PathLike):
        return os.fsencode(path).decode("utf-8", "replace")
    return f"python:{getattr(path, '__qualname__', type(path).__name__)}"


class _Job:
    """One call of `prepare` that has something to do."""

    def __init__(self, staging: Staging, reader: Reader, settings: Settings, workers: int) -> None:
        self._staging, self._reader = staging, reader
        self._settings, self._workers = settings, workers

    def make(self, tokenizer: PathLike) -> Manifest:
        """Do the work, or what is left of it."""
        self._staging.check_space()
        with self._staging.opened():
            manifest = self._write(self._choose(tokenizer))
            manifest.save(self._staging.folder)
            self._staging.publish()
        for line in self._reader.warnings:
            print(f"warning: {line}", file=sys.stderr)
        return manifest

    def _choose(self, tokenizer: PathLike) -> Tokenizer:
        """The tokenizer: named, or trained now or by an earlier call."""
        size, folder = self._settings.train_tokenizer, self._staging.folder
        if size is not None and (folder / FILE_NAME).exists():
            return load_tokenizer(folder)
        chosen = learn_tokenizer(self._sample(), size) if size else load_tokenizer(tokenizer)
        chosen.save(folder)
        return chosen

    def _sample(self) -> Iterator[str]:
        """Documents to learn a vocabulary from: all, or every n-th of a large corpus."""
        stride, num_left = 1 + self._reader.num_bytes // LEARN_CHARS, LEARN_CHARS
        for text in islice(self._texts(None), 0, None, stride):
            if num_left <= 0:
                return
            num_left -= len(text)
            yield text

    def _texts(self, state: State) -> Iterator[str]:
        """Cleaned documents after `state`; what remembers documents sees the earlier ones again."""
        reader, settings = self._reader, self._settings
        if state and settings.remembers:
            return reader.skip(settings.clean(iter(reader), reader.num_skipped), state)
        texts = reader.read_from(state, self._staging.is_mended)
        return settings.clean(texts, reader.num_skipped)

    def _batches(self, state: State) -> Iterator[tuple[list[str], bool, Any]]:
        """(texts, whether they go on with a document, the reader's state after them)."""
        texts: list[str] = []
        num_chars = 0
        for text in self._texts(state):
            goes_on = isinstance(text, Piece) and not text.begins
            if goes_on and texts:
                yield texts, False, None  # the reader is past them already
                texts = []
            texts.append(text)
            num_chars += len(text)
            if goes_on or num_chars >= BATCH_CHARS or len(texts) == BATCH_DOCUMENTS:
                yield texts, goes_on, self._reader.state()
                texts, num_chars = [], 0
        if texts:
            yield texts, False, self._reader.state()

    def _write(self, tokenizer: Tokenizer) -> Manifest:
        """Encode every document and write both splits into the staging folder."""
        encoder, settings, journal = tokenizer.encoder, self._settings, self._staging.journal
        file = self._staging.folder / FILE_NAME
        limit = settings.token_limit(np.dtype(encoder.dtype).itemsize, file.stat().st_size)
        writer = Writer(
            self._staging.folder, settings.val_tokens, settings.shard_tokens, encoder.dtype,
            encoder.eot_id, journal["writer"],
        )  # fmt: skip
        try:
            self._fill(writer, encoder, journal, limit)
            writer.close()
        finally:
            writer.abandon()
        return Manifest(
            tokenizer=tokenizer.describe(),
            splits=writer.shards,
            num_documents=journal["num_documents"],
            num_skipped=journal["reader"]["skipped"] if journal["reader"] else {},
            source=journal["call"]["source"],
            settings=asdict(settings),
        )

    def _fill(
        self, writer: Writer, encoder: Encoder, journal: dict[str, Any], limit: int | None
    ) -> None:
        """Send all ids that are left into the writer; the journal learns of them."""
        reader = self._reader
        batches = encode_all(encoder, self._batches(journal["reader"]), self._workers)
        with (
            tqdm(desc="tokens", unit="tok", unit_scale=True, disable=None) as progress,
            closing(batches),
        ):
            num_tokens, num_documents = journal["num_tokens"], journal["num_documents"]
            progress.update(num_tokens)
            for ids, state in batches:
                if limit is not None:
                    ids = ids[: limit - num_tokens]
                writer.add(ids)
                num_documents += int(np.count_nonzero(ids == encoder.eot_id))
                num_tokens += ids.size
                progress.update(ids.size)
                if state is not None or num_tokens == limit:
                    is_due = writer.is_due  # state() takes it for saved
                    journal.update(  # what came before is known to be the same now
                        call=self._staging.call,
                        num_tokens=num_tokens, num_documents=num_documents,
                        reader=state or journal["reader"], writer=writer.state(),
                    )  # fmt: skip
                    if is_due:
                        self._staging.save()
                        self._staging.check_disk()
                if num_tokens == limit:
                    break
        if journal["num_documents"] == 0:
            skipped = ", ".join(f"{n} {why}" for why, n in reader.num_skipped.items())
            raise UserError(
                f"source {journal['call']['source']!r} has no text: {skipped or 'no document'}"
                f"{reader.known_fields()}"
            )
        if journal["num_tokens"] != limit:
            journal["reader"] = reader.state()  # with what was skipped after the last document
