"""Token shards: the file format, the manifest beside it, and the loader that turns step into batch.

A shard is 256 int32 of header [magic, version, num_tokens, 0...], then the tokens: uint16 under
magic 20240520 (the format of llm.c and modded-nanogpt), uint32 under 20240801. Where a batch comes
from is a pure function of (seed, step): resuming needs no stored position, and the number of
devices changes nothing.

Letters: n sequences, T = seq_len, W windows of T + 1 tokens in all shards of a split.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanogpt_tpu import env
from nanogpt_tpu.errors import UserError

if TYPE_CHECKING:
    import torch

HEADER_INT32 = 256
HEADER_BYTES = HEADER_INT32 * 4
FORMATS: dict[int, tuple[int, type[np.unsignedinteger]]] = {
    20240520: (1, np.uint16),
    20240801: (7, np.uint32),
}
MANIFEST = "manifest.json"
SPLITS = ("train", "val")
_AGAIN = "copy it again, or delete its folder and prepare the data again"


@dataclass(frozen=True)
class ShardInfo:
    """One shard as the manifest lists it."""

    file: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a data folder holds: its tokenizer, its shards with hashes, and how it was made."""

    tokenizer: dict[str, Any]
    splits: dict[str, list[ShardInfo]]
    num_documents: int
    num_skipped: dict[str, int]
    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    format_version: int = 1

    def num_tokens(self, split: str) -> int:
        """Tokens in a split; 0 when it has none."""
        return sum(shard.num_tokens for shard in self.splits.get(split, []))

    def __str__(self) -> str:
        skipped = "".join(f", {n} skipped ({why})" for why, n in self.num_skipped.items())
        return (
            f"{self.num_documents:,} documents{skipped}; {self.num_tokens('train'):,} training and "
            f"{self.num_tokens('val'):,} validation tokens; vocabulary "
            f"{self.tokenizer['vocab_size']:,} ({self.tokenizer['kind']})"
        )

    @property
    def identity(self) -> str:
        """sha256 over tokenizer and shards: two folders with it hold the same tokens."""
        shards = [(split, s.sha256) for split in SPLITS for s in self.splits.get(split, [])]
        return hashlib.sha256(json.dumps([self.tokenizer["sha256"], shards]).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in manifest.json."""
        return asdict(self)

    def save(self, folder: Path) -> None:
        """Write manifest.json by rename, so that a half-written one is never seen."""
        partial = folder / f"{MANIFEST}.tmp"
        partial.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False), "utf-8")
        partial.replace(folder / MANIFEST)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "Manifest":
        """Read the manifest of a data folder.

        Raises:
            UserError: no such folder, no data in it, or a manifest of another format.
        """
        path = Path(folder) / MANIFEST
        if not path.is_file():
            what = "no such folder" if not Path(folder).is_dir() else f"no shards ({MANIFEST})"
            raise UserError(f"data {str(folder)!r}: {what}; make it with: nanogpt-tpu prepare")
        try:
            values = json.loads(path.read_text("utf-8"))
            version = values["format_version"]
            if version != 1:
                raise UserError(f"{path} has format_version {version!r}, this program reads 1")
            splits = {
                split: [ShardInfo(**shard) for shard in shards]
                for split, shards in values.pop("splits").items()
            }
            if missing := {"sha256", "vocab_size", "eot_id"} - values["tokenizer"].keys():
                raise KeyError(f"tokenizer has no {' and no '.join(sorted(missing))}")
            return Manifest(splits=splits, **values)
        except UserError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} is not a manifest of ours ({error}); prepare again") from error


def find_data(folder: str | os.PathLike[str] | None = None) -> Path:
    """The data folder in or below `folder`; below `env.attached_dir()` unless given.

    Raises:
        UserError: none there, or several; their names are given.
    """
    root = env.attached_dir() if folder is None else Path(folder)
    found = sorted(path.parent for path in root.rglob(MANIFEST))
    if not found:
        raise UserError(
            f"no data under {root}: attach the output of data-prep (Add input), or give the folder"
        )
    if len(found) > 1:
        names = ", ".join(str(path) for path in found)
        raise UserError(f"several data folders under {root}: say which of {names}")
    return found[0]


def shard_name(split: str, index: int) -> str:
    """The file name of a split's shard."""
    return f"{split}_{index:06d}.bin"


def write_shard(path: Path, tokens: np.ndarray) -> ShardInfo:
    """Write uint16 or uint32 tokens with their header; the name appears when the file is whole."""
    magic, version = next((m, v) for m, (v, dtype) in FORMATS.items() if tokens.dtype == dtype)
    header = np.zeros(HEADER_INT32, dtype=np.int32)
    header[:3] = magic, version, tokens.size
    partial = path.with_suffix(".bin.tmp")
    digest = hashlib.sha256()
    with partial.open("wb") as file:
        for part in (header.tobytes(), np.ascontiguousarray(tokens).data):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return ShardInfo(path.name, int(tokens.size), digest.hexdigest())


def read_shard(path: Path) -> np.ndarray:
    """A shard's tokens, memory-mapped and read-only: uint16 or uint32, (num_tokens,).

    Raises:
        UserError: missing, foreign or shortened file; the numbers are given.
    """
    if not path.is_file():
        raise UserError(f"shard {path} is missing: {_AGAIN}")
    size_bytes = path.stat().st_size
    if size_bytes < HEADER_BYTES:
        raise UserError(f"shard {path} holds {size_bytes} bytes, less than its header: {_AGAIN}")
    header = np.fromfile(path, dtype=np.int32, count=HEADER_INT32)
    magic, version, num_tokens = (int(value) for value in header[:3])
    if magic not in FORMATS or FORMATS[magic][0] != version:
        raise UserError(f"{path} is no token shard: magic {magic}, version {version}")
    dtype = np.dtype(FORMATS[magic][1])
    wanted_bytes = HEADER_BYTES + num_tokens * dtype.itemsize
    if size_bytes != wanted_bytes:
        raise UserError(
            f"shard {path} holds {size_bytes} bytes, its header promises {wanted_bytes}: {_AGAIN}"
        )
    if num_tokens == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(num_tokens,))


def list_shards(folder: str | os.PathLike[str], split: str) -> list[Path]:
    """Shard files of a split: the manifest's, or by name where there is no manifest.

    Raises:
        UserError: none there.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        files = [folder / shard.file for shard in Manifest.load(folder).splits.get(split, [])]
    else:
        files = sorted({*folder.glob(f"{split}_*.bin"), *folder.glob(f"*_{split}_*.bin")})
    if not files:
        raise UserError(
            f"data {str(folder)!r}: no {split} shards; make them with: nanogpt-tpu prepare"
        )
    return files


class ShardLoader:
    """Batches of a split: `loader(step)` gives (idx, targets), each int64 (n, T) on the host.

    Every shard is cut into windows of T + 1 tokens that overlap by one, so that each token but the
    first is a target once; a tail shorter than a window is counted in `num_dropped_tokens`.
    Each epoch visits the windows in an order of its own. `step` counts from 0.

    Raises:
        UserError: the split has fewer windows than one batch; file, length and need are given.
    """

    def __init__(
        self,
        data: str | os.PathLike[str],
        split: str,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        files = list_shards(data, split)
        self._shards = [read_shard(path) for path in files]
        self.seq_len, self.sequences_per_step = seq_len, sequences_per_step
        self._seed, self._shuffle = seed, shuffle
        windows = [max(0, shard.size - 1) // seq_len for shard in self._shards]
        self._ends = np.cumsum(windows)  # shard k holds windows [ends[k-1], ends[k])
        self.num_windows = int(self._ends[-1])
        self.num_dropped_tokens = sum(
            shard.size - num * seq_len for shard, num in zip(self._shards, windows, strict=True)
        ) - sum(1 for num in windows if num)
        if self.num_windows < sequences_per_step:
            longest = max(range(len(files)), key=lambda k: self._shards[k].size)
            raise UserError(
                f"{files[longest]} holds {self._shards[longest].size:,} tokens and all {split} "
                f"shards {self.num_windows} sequences of {seq_len} + 1; one step needs "
                f"{sequences_per_step} sequences ({sequences_per_step * seq_len + 1:,} tokens): "
                "add data, or lower tokens_per_step or seq_len"
            )

    def window_ids(self, step: int) -> np.ndarray:
        """Which windows make the batch of `step`: int64 (n,)."""
        first = step * self.sequences_per_step
        places = np.arange(first, first + self.sequences_per_step, dtype=np.int64)
        epochs, places = np.divmod(places, self.num_windows)
        if not self._shuffle:
            return places
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            ids[rows] = permute(places[rows], self.num_windows, self._seed, int(epoch))
        return ids

    def __call__(self, step: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """The batch of `step`: inputs and targets, which are the inputs shifted by one."""
        import torch  # here, so that prepare and inspect start without it

        ids = self.window_ids(step)
        tokens = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        shard_of = np.searchsorted(self._ends, ids, side="right")
        for row, (window, k) in enumerate(zip(ids, shard_of, strict=True)):
            start = (window - (self._ends[k - 1] if k else 0)) * self.seq_len
            tokens[row] = self._shards[k][start : start + self.seq_len + 1]
        both = torch.from_numpy(tokens)  # (n, T + 1)
        return both[:, :-1], both[:, 1:]


def permute(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where each of `places` in [0, size) goes in a pseudo-random permutation: int64, same shape.

    A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway
    2002): no table to build or to store, and the same order under every version of NumPy.
    """
    half_bits = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = [_mix(np.uint64(seed) ^ (np.uint64(epoch) << np.uint64(32)), r) for r in range(6)]
    result = places.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        value = result[outside]
        left, right = value >> shift, value & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key, 0) & mask)
        result[outside] = (left << shift) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _mix(value: Any, salt: int) -> Any:
    """splitmix64's finalizer: scatters the bits of uint64 values."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15) * np.uint64(salt + 1)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
