"""The shard file: ours, and those of others that are read as they are.

256 int32 of header [magic, version, num_tokens, 0...], then the tokens: uint16 under magic 20240520
(the format of llm.c and modded-nanogpt), uint32 under 20240801. Also read: build-nanogpt's `.npy`,
and nanoGPT's headerless `.bin` when its folder is named as "nanogpt:DIR".
"""

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_tpu.errors import StaleError, UserError

HEADER_INT32 = 256
HEADER_BYTES = HEADER_INT32 * 4
FORMATS: dict[int, tuple[int, type[np.unsignedinteger]]] = {
    20240520: (1, np.uint16),
    20240801: (7, np.uint32),
}
HEADERLESS = "nanogpt:"
_HEAD = "head"
COMMIT_TOKENS = 8_000_000
DataPath = str | os.PathLike[str]
AGAIN = "copy it again, or delete its folder and prepare the data again"


@dataclass(frozen=True)
class ShardInfo:
    """One shard as the manifest lists it."""

    file: str
    num_tokens: int
    sha256: str


def verify_shard(path: Path, shard: ShardInfo, data: DataPath = "") -> None:
    """Compare a shard's length and every byte with what the manifest says.

    Raises:
        UserError: it is missing, or differs.
    """
    tokens = read_shard(path, data)
    if tokens.size != shard.num_tokens:
        raise UserError(
            f"{path} holds {tokens.size} tokens, the manifest says {shard.num_tokens}: {AGAIN}"
        )
    if shard.sha256 and hash_file(path) != shard.sha256:
        raise UserError(
            f"{path} differs from its sha256 in the manifest, its bytes were changed: {AGAIN}"
        )


def is_headerless(data: DataPath) -> bool:
    """Whether `data` was named as nanoGPT's: .bin files of uint16 without a header."""
    return os.fspath(data).startswith(HEADERLESS)


def shard_name(split: str, index: int) -> str:
    """The file name of a split's shard."""
    return f"{split}_{index:06d}.bin"


def header_of(dtype: Any, num_tokens: int) -> bytes:
    """The header of a shard of so many uint16 or uint32 tokens."""
    magic, version = next((m, v) for m, (v, kind) in FORMATS.items() if dtype == kind)
    header = np.zeros(HEADER_INT32, dtype=np.int32)
    header[:3] = magic, version, num_tokens
    return header.tobytes()


def read_shard(path: Path, data: DataPath = "") -> np.ndarray:
    """A shard's tokens, memory-mapped and read-only: uint16 or uint32, (num_tokens,).

    Args:
        path: ours, llm.c's (.bin) or build-nanogpt's (.npy).
        data: what it belongs to; "nanogpt:..." says that .bin files have no header and are uint16.

    Raises:
        UserError: missing, foreign or shortened file; the numbers are given.
    """
    if not path.is_file():
        raise UserError(f"shard {path} is missing: {AGAIN}")
    size_bytes = path.stat().st_size
    if is_headerless(data):
        return _map(path, np.dtype(np.uint16), 0, size_bytes // 2)
    if path.suffix == ".npy":
        return _read_npy(path)
    if size_bytes < HEADER_BYTES:
        raise UserError(f"shard {path} holds {size_bytes} bytes, less than its header: {AGAIN}")
    header = np.fromfile(path, dtype=np.int32, count=HEADER_INT32)
    magic, version, num_tokens = (int(value) for value in header[:3])
    if magic not in FORMATS or FORMATS[magic][0] != version:
        raise UserError(
            f"{path} is no token shard: magic {magic}, version {version}; if it is nanoGPT's, of "
            f"uint16 without a header, name its folder as {HEADERLESS}{path.parent}"
        )
    dtype = np.dtype(FORMATS[magic][1])
    wanted_bytes = HEADER_BYTES + num_tokens * dtype.itemsize
    if size_bytes != wanted_bytes:
        raise UserError(
            f"shard {path} holds {size_bytes} bytes, its header promises {wanted_bytes}: {AGAIN}"
        )
    return _map(path, dtype, HEADER_BYTES, num_tokens)


def _map(path: Path, dtype: np.dtype, offset: int, num_tokens: int) -> np.ndarray:
    if num_tokens == 0:  # nothing to map
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(num_tokens,))


def _read_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"shard {path} is no whole .npy file ({error})") from error
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise UserError(
            f"shard {path} holds {tokens.dtype} of shape {tokens.shape}: tokens are uint16 or "
            "uint32 in one row"
        )
    return tokens


def write_text(path: Path, text: str) -> None:
    """Write a file by rename, so that a half-written one is never seen."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        final = self._folder / (
            _HEAD if name == _HEAD else shard_name(name, len(self.shards[name]))
        )
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
        content = np.ascontiguousarray(tokens).data
        self._file.write(content)
        self._digest.update(content)
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
