"""A data folder in the making: what was asked for, the journal of what is done, the last move.

All lies in the folder `.partial` until it is whole. A mistake of the user's leaves nothing there;
what a kill, a full disk or a lost connection stops stays, and the same call goes on from it.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanogpt_tpu.clean import Cleaning
from nanogpt_tpu.errors import PausedError, UserError, between, positive, well_typed
from nanogpt_tpu.manifest import MANIFEST, Manifest
from nanogpt_tpu.shardfile import HEADER_BYTES, read_shard
from nanogpt_tpu.tokenizer import FILE_NAME

MIN_FREE_BYTES = 64 * 2**20
_JOURNAL = "journal.json"


@dataclass(frozen=True)
class Settings:
    """How a data folder was made; the manifest keeps it, to know the same call again."""

    source_bytes: int
    source_sample: str
    """Fingerprint of the source's files and of a tokenizer file: other text is other data."""
    tokenizer: str | None
    train_tokenizer: int | None
    val_tokens: int
    shard_tokens: int
    max_tokens: int | None
    text_field: str | None
    max_output_bytes: int | None = None
    part: str | None = None
    strip_html: bool = False
    collapse_blank: bool = False
    min_chars: int | None = None
    script: str | None = None
    drop_duplicates: str | None = None

    def __post_init__(self) -> None:
        well_typed(self)
        positive(self, "train_tokenizer", "max_tokens")
        between(self, 0, 2**40, "val_tokens")
        between(self, 1, 2**31 - 1, "shard_tokens")  # its header counts in int32
        if self.max_output_bytes is not None:
            between(self, 2**20, 2**50, "max_output_bytes")
        if self.text_field == "":
            raise UserError("text_field is '': name a field or column, or leave it out")

    @property
    def cleaning(self) -> Cleaning:
        """The part of the settings that is about cleaning."""
        return Cleaning(**{name: getattr(self, name) for name in Cleaning.__dataclass_fields__})

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


class Staging:
    """The unfinished state of one data folder, for one call of `prepare`."""

    def __init__(self, target: Path, source: str, settings: Settings) -> None:
        self.target, self.folder = target, target / ".partial"
        self._call = {"source": source, **asdict(settings)}
        self._settings = settings
        self.journal: dict[str, Any] = {}

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
        for shards in manifest.splits.values():
            for shard in shards:
                read_shard(folder / shard.file)
        shutil.rmtree(self.folder, ignore_errors=True)  # a kill after the last move left it
        print(f"{folder} already holds this data: nothing to do", file=sys.stderr)
        return manifest

    def _refuse_other(self, then: dict[str, Any], what: str) -> None:
        for name in sorted(then.keys() | self._call.keys()):
            if (then.get(name) or None) != (self._call.get(name) or None):
                raise UserError(
                    f"{self.target} {what} made with {name} {then.get(name)!r}, now it is "
                    f"{self._call.get(name)!r}: choose another --out, or delete that one"
                )

    def check_space(self) -> None:
        """Refuse a corpus that will surely not fit; the size of packed ones is not known."""
        above = (self.target, *self.target.absolute().parents)
        home = next(path for path in above if path.exists())
        free_bytes = shutil.disk_usage(home).free
        limit = self._settings.token_limit(2, 0)
        least_bytes = (
            self._settings.source_bytes // (1 if self._settings.tokenizer == "bytes" else 6) * 2
        )
        least_bytes = least_bytes if limit is None else min(least_bytes, 2 * limit)
        if free_bytes < least_bytes + MIN_FREE_BYTES and not self.folder.exists():
            raise UserError(
                f"{home} has {free_bytes / 1e9:.2f} GB free, the shards will take about "
                f"{least_bytes / 1e9:.2f} GB or more: free some, choose another --out, or limit it "
                "with --max-output-bytes, --max-tokens or --part"
            )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder with its journal read; a mistake of the user's leaves nothing behind."""
        missing = [path for path in (self.target, *self.target.parents) if not path.exists()]
        is_kept = (self.folder / _JOURNAL).exists()  # until it is known to be this call's
        try:
            self._read()
            is_kept = False
            yield
        except (OSError, KeyboardInterrupt, PausedError) as error:
            is_kept = self._has_work()
            if not isinstance(error, OSError):
                raise
            kept = "; what is done is kept, the same command goes on" if is_kept else ""
            raise UserError(
                f"data folder {self.target} cannot be written ({error.strerror}){kept}"
            ) from error
        finally:
            if not is_kept:
                shutil.rmtree(self.folder, ignore_errors=True)
            for path in missing:
                with suppress(OSError):  # not empty: all went well
                    path.rmdir()

    def _read(self) -> None:
        """What an earlier call left, if it was for the same; else an empty one is begun."""
        path = self.folder / _JOURNAL
        if path.exists():
            self.journal = json.loads(path.read_text("utf-8"))
            self._refuse_other(self.journal["call"], "holds unfinished work")
            print(f"Going on after {self.journal['num_tokens']:,} tokens", file=sys.stderr)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        done = {"reader": None, "writer": None, "num_documents": 0, "num_tokens": 0}
        self.journal = {"call": self._call, **done}
        self.save()

    def save(self) -> None:
        """Write the journal, at once or not at all; what it tells of must lie on disk."""
        partial = self.folder / f"{_JOURNAL}.tmp"
        partial.write_text(json.dumps(self.journal), "utf-8")
        partial.replace(self.folder / _JOURNAL)

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
            return journal["num_tokens"] > 0 or (self.folder / FILE_NAME).exists()
        return False

    def publish(self) -> None:
        """Move what is finished to where it belongs, the manifest last."""
        names = (path.name for path in sorted(self.folder.iterdir()))
        for name in names:
            if name == FILE_NAME or name.endswith(".bin"):
                (self.folder / name).replace(self.target / name)
        (self.folder / MANIFEST).replace(self.target / MANIFEST)
        shutil.rmtree(self.folder)
