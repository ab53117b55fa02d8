"""A data folder in the making: what was asked for, the journal of what is done, the last move.

All lies in the folder `.partial` until it is whole. Whatever stops the work, what is done stays
there and the same call goes on from it, also with a source that was mended behind that place.
"""

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanogpt_tpu.clean import Cleaning
from nanogpt_tpu.errors import PausedError, StaleError, UserError, between, positive
from nanogpt_tpu.manifest import MANIFEST, Manifest
from nanogpt_tpu.shardfile import HEADER_BYTES, write_text
from nanogpt_tpu.tokenizer import FILE_NAME, verify

MIN_FREE_BYTES = 64 * 2**20
_JOURNAL = "journal.json"
_SOURCE_FIELDS = {"source_bytes", "source_sample"}


@dataclass(frozen=True, kw_only=True)
class Settings(Cleaning):
    """How a data folder was made; the manifest keeps it, to know the same call again."""

    source_bytes: int
    source_sample: str
    """Fingerprint of the source's files: other text is other data."""
    tokenizer: str | None
    train_tokenizer: int | None
    val_tokens: int
    shard_tokens: int
    max_tokens: int | None
    text_field: str | None
    max_output_bytes: int | None = None
    part: str | None = None
    tokenizer_sample: str | None = None
    """Fingerprint of a tokenizer file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "train_tokenizer", "max_tokens")
        between(self, 0, 2**40, "val_tokens")
        between(self, 1, 2**31 - 1, "shard_tokens")  # its header counts in int32
        if self.max_output_bytes is not None:
            between(self, 2**20, 2**50, "max_output_bytes")
        if self.text_field == "":
            raise UserError("text_field is '': name a field or column, or leave it out")

    def token_limit(self, itemsize: int, tokenizer_bytes: int) -> int | None:
        """The most tokens of `itemsize` bytes that may be written; None: no limit.

        Raises:
            UserError: there is no room for any beside tokenizer.json and the manifest.
        """
        if self.max_output_bytes is None:
            return self.max_tokens
        beside = tokenizer_bytes + 2**19  # manifest and headers are under half a MiB here
        num_bytes = self.max_output_bytes - beside
        num_bytes -= num_bytes // (self.shard_tokens * itemsize + HEADER_BYTES) * HEADER_BYTES
        limit = num_bytes // itemsize
        if limit < 1:
            raise UserError(
                f"max_output_bytes is {self.max_output_bytes}: {FILE_NAME} and the manifest take "
                f"up to {beside} of them; allow more"
            )
        return limit if self.max_tokens is None else min(limit, self.max_tokens)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if it is missing, for this process alone; left empty it goes again.

    Raises:
        UserError: it cannot be made, or another process is at work in it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _lock(folder)
    except BlockingIOError as error:
        raise UserError(
            f"another process is at work in {folder}: wait for it, or choose another --out"
        ) from error
    except OSError as error:
        raise UserError(f"data folder {folder} cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # not empty: all went well
                path.rmdir()
        os.close(handle)


def _lock(folder: Path) -> int:
    """A lock that ends with this process, however it ends; closing the handle gives it up."""
    if sys.platform == "win32":
        import msvcrt

        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_TEMPORARY)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            os.close(handle)
            raise BlockingIOError from error
        return handle
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), folder.stat()):
            raise BlockingIOError  # whoever had it has removed the folder meanwhile
    except OSError:
        os.close(handle)
        raise
    return handle


class Staging:
    """The unfinished state of one data folder, for one call of `prepare`."""

    def __init__(self, target: Path, source: str, settings: Settings) -> None:
        self.target, self.folder = target, target / ".partial"
        self.call = {"source": source, **asdict(settings)}
        self._settings = settings
        self.journal: dict[str, Any] = {}
        self.is_mended = False
        """Whether the source is not as it was when the work was left."""

    def existing(self) -> Manifest | None:
        """The manifest already in the folder, if the same call made it."""
        folder = self.target
        if (self.folder / MANIFEST).exists():
            self.publish()  # killed in the last moment
        if not (folder / MANIFEST).exists():
            if any(folder.glob("*.bin")):
                raise UserError(f"{folder} holds shards of something else: choose another --out")
            return None
        manifest = Manifest.load(folder)
        self._refuse_other({"source": manifest.source, **manifest.settings}, "already holds data")
        verify(folder, manifest)
        shutil.rmtree(self.folder, ignore_errors=True)  # a kill after the last move left it
        print(f"{folder} already holds this data: nothing to do", file=sys.stderr)
        return manifest

    def _refuse_other(self, then: dict[str, Any], what: str, passed: Collection[str] = ()) -> None:
        for name in sorted((then.keys() | self.call.keys()) - set(passed)):
            if (then.get(name) or None) != (self.call.get(name) or None):
                raise UserError(
                    f"{self.target} {what} made with {name} {then.get(name)!r}, now it is "
                    f"{self.call.get(name)!r}: choose another --out, or delete that one"
                )

    def check_space(self) -> None:
        """Refuse a corpus that will surely not fit; the size of packed ones is not known."""
        free_bytes = shutil.disk_usage(self.target).free
        limit = self._settings.token_limit(2, 0)
        bytes_per_token = 1 if self._settings.tokenizer == "bytes" else 6
        least_bytes = self._settings.source_bytes // bytes_per_token * 2
        least_bytes = least_bytes if limit is None else min(least_bytes, 2 * limit)
        if free_bytes < least_bytes + MIN_FREE_BYTES and not self.folder.exists():
            raise UserError(
                f"{self.target} has {free_bytes / 1e9:.2f} GB free, the shards will take about "
                f"{least_bytes / 1e9:.2f} GB or more: free some, choose another --out, or limit it "
                "with --max-output-bytes, --max-tokens or --part"
            )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder with its journal read; whatever stops the work, what is done stays.

        Raises:
            UserError: unfinished work of another call lies there, or it cannot be written.
            PausedError: a mistake of the user's that stopped work of which a part is done.
        """
        self._resume()
        try:
            if not self.journal:
                self._begin()
            yield
        except BaseException as error:
            if self.journal.get("writer"):
                with suppress(OSError):  # full: then an earlier one stands there
                    self.save()
            kept = "; what is done is kept, the same command goes on"
            if isinstance(error, StaleError) or not self._has_work():
                shutil.rmtree(self.folder, ignore_errors=True)
                kept = ""
            if isinstance(error, OSError):
                raise UserError(
                    f"data folder {self.target} cannot be written ({error.strerror}){kept}"
                ) from error
            if kept and isinstance(error, UserError) and not isinstance(error, PausedError):
                raise PausedError(f"{error}{kept}") from error
            raise

    def _resume(self) -> None:
        """Read what an earlier call left, if it was for the same."""
        path = self.folder / _JOURNAL
        if not path.exists():
            return
        try:
            journal = json.loads(path.read_text("utf-8"))
            then, num_tokens = journal["call"], journal["num_tokens"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is damaged: delete {self.folder} to begin again") from error
        # A mended source is compared text by text; but a tokenizer learned from the old one.
        mended = set() if self._settings.train_tokenizer else _SOURCE_FIELDS
        self._refuse_other(then, "holds unfinished work", mended)
        self.is_mended = any(then.get(name) != self.call[name] for name in _SOURCE_FIELDS)
        self.journal = journal
        print(f"Going on after {num_tokens:,} tokens", file=sys.stderr)

    def _begin(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        done = {"reader": None, "writer": None, "num_documents": 0, "num_tokens": 0}
        self.journal = {"call": self.call, **done}
        self.save()

    def save(self) -> None:
        """Write the journal, at once or not at all; what it tells of must lie on disk."""
        write_text(self.folder / _JOURNAL, json.dumps(self.journal))

    def check_disk(self) -> None:
        """Stop while there is still room to write what is needed to go on.

        Raises:
            PausedError: the disk is nearly full.
        """
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < MIN_FREE_BYTES:
            raise PausedError(
                f"the disk of {self.target} is full ({free_bytes / 1e6:.0f} MB free) after "
                f"{self.journal['num_tokens']:,} tokens: they are kept; free some space and start "
                "the same command again"
            )

    def _has_work(self) -> bool:
        with suppress(OSError, ValueError):
            journal = json.loads((self.folder / _JOURNAL).read_text("utf-8"))
            is_trained = bool(self._settings.train_tokenizer) and (self.folder / FILE_NAME).exists()
            return journal["num_tokens"] > 0 or is_trained
        return False

    def publish(self) -> None:
        """Move what is finished to where it belongs, the manifest last."""
        names = (path.name for path in sorted(self.folder.iterdir()))
        for name in names:
            if name == FILE_NAME or name.endswith(".bin"):
                (self.folder / name).replace(self.target / name)
        (self.folder / MANIFEST).replace(self.target / MANIFEST)
        shutil.rmtree(self.folder)
