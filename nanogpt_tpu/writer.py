"""One token stream into the shards of both splits, in steps that a killed process does not lose.

`state()` is what a journal must hold; a `Writer` made from it cuts off what was written after it
and goes on to the same bytes. The first tenth of the tokens, at most val_tokens, is for validation;
until that cut is known they wait in a file of their own.
"""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_tpu.errors import StaleError
from nanogpt_tpu.shardfile import HEADER_BYTES, ShardInfo, hash_file, header_of, shard_name

_HEAD = "head"
COMMIT_TOKENS = 8_000_000


class Writer:
    """Appends ids to shards in a staging folder; holds none of them in memory."""

    def __init__(
        self,
        folder: Path,
        val_tokens: int,
        shard_tokens: int,
        dtype: Any,
        eot_id: int,
        state: dict[str, Any] | None,
    ) -> None:
        """Begin, or go on from the `state()` of a writer with the same settings.

        Raises:
            StaleError: what the state tells of is not what lies in the folder.
        """
        state = state or {"open": _HEAD, "num_tokens": 0, "sha256": None, "train": [], "val": []}
        self._folder, self._dtype, self._eot_id = folder, np.dtype(dtype), eot_id
        self._val_tokens, self._shard_tokens = val_tokens, shard_tokens
        self.shards = {
            split: [ShardInfo(**shard) for shard in state[split]] for split in ("train", "val")
        }
        self._num_added = 0
        self._committed = 0, self._num_shards
        self._open(state["open"], state["num_tokens"])
        whole = [shard for shards in self.shards.values() for shard in shards]
        if state["sha256"] not in (None, self._digest.hexdigest()) or any(
            not (folder / s.file).is_file() or hash_file(folder / s.file) != s.sha256 for s in whole
        ):
            self.abandon()
            raise StaleError(
                f"unfinished work in {folder} was damaged since it was left, it is dropped: start "
                "the same command again"
            )

    def _open(self, name: str, num_tokens: int = 0) -> None:
        """Open the part file of a split's next shard or of the head, cut to its first tokens."""
        self._name, self._used = name, num_tokens
        final = self._folder / (_HEAD if name == _HEAD else shard_name(name, self._count(name)))
        self._path = final.with_name(final.name + ".tmp")
        if num_tokens and not self._path.exists() and final.exists():
            final.replace(self._path)  # it became whole after the state was taken
        self._file = self._path.open("r+b" if num_tokens else "w+b")
        header = header_of(self._dtype, self._shard_tokens)  # right unless it is the last shard
        self._file.write(header)
        self._file.truncate(len(header) + num_tokens * self._dtype.itemsize)
        self._digest = hashlib.sha256(header)
        while block := self._file.read(2**24):
            self._digest.update(block)

    def _count(self, split: str) -> int:
        return len(self.shards[split])

    def _write(self, content: Any) -> None:
        self._file.write(content)
        self._digest.update(content)

    @property
    def _num_shards(self) -> int:
        return sum(map(len, self.shards.values()))

    @property
    def is_due(self) -> bool:
        """Whether enough was written that a kill should not lose it."""
        num_added, num_shards = self._committed
        return self._num_added - num_added >= COMMIT_TOKENS or self._num_shards > num_shards

    def state(self) -> dict[str, Any]:
        """What is written so far: as JSON can hold it."""
        self._file.flush()
        self._committed = self._num_added, self._num_shards
        shards = {split: [asdict(s) for s in found] for split, found in self.shards.items()}
        sha256 = self._digest.hexdigest()
        return {"open": self._name, "num_tokens": self._used, "sha256": sha256, **shards}

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens; shards that fill up get their name."""
        self._num_added += tokens.size
        if self._name == _HEAD:
            self._append(tokens)
            if self._used >= 10 * self._val_tokens:
                self._cut()
            return
        self._fill("train", tokens)

    def close(self) -> None:
        """Write what is left."""
        if self._name == _HEAD:
            self._cut()
        self._finish("train")

    def abandon(self) -> None:
        """Close the file; what lies in it stays for a writer that goes on."""
        self._file.close()

    def _append(self, tokens: np.ndarray) -> None:
        self._write(np.ascontiguousarray(tokens).data)
        self._used += tokens.size

    def _fill(self, split: str, tokens: np.ndarray) -> None:
        while tokens.size:
            taken = min(tokens.size, self._shard_tokens - self._used)
            self._append(tokens[:taken])
            tokens = tokens[taken:]
            if self._used == self._shard_tokens:
                self._finish(split)
                self._open(split)

    def _finish(self, split: str) -> None:
        """Give the open part file its header and its name."""
        if self._used:
            name = self._path.stem
            self._file.seek(0)
            self._file.write(header_of(self._dtype, self._used))
            self._file.flush()
            os.fsync(self._file.fileno())
            is_full = self._used == self._shard_tokens
            digest = self._digest.hexdigest() if is_full else hash_file(self._path)
            self._path.replace(self._path.with_suffix(""))
            self.shards[split].append(ShardInfo(name, self._used, digest))
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _cut(self) -> None:
        """Send a tenth of the head, at most val_tokens, to validation and the rest to training.

        The documents that fit whole, if they fill half of that; else the next is cut inside.
        """
        self._file.close()  # its file stays: no journal knows of the cut yet
        head = np.memmap(self._path, self._dtype, "r", HEADER_BYTES, (self._used,))
        wanted = min(self._val_tokens, head.size // 10)
        num_whole = int(np.flatnonzero(head[: wanted + 1] == self._eot_id).max(initial=0))
        num_val = num_whole if num_whole >= wanted / 2 else wanted
        self._open("val")
        self._fill("val", head[:num_val])
        self._finish("val")
        self._open("train")
        self._fill("train", head[num_val:])
