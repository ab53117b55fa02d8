"""The shard file: ours, and those of others that are read as they are.

256 int32 of header [magic, version, num_tokens, 0...], then the tokens: uint16 under magic 20240520
(the format of llm.c and modded-nanogpt), uint32 under 20240801. Also read: build-nanogpt's `.npy`,
and nanoGPT's headerless `.bin` when its folder is named as "nanogpt:DIR".
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_tpu.errors import UserError

HEADER_INT32 = 256
HEADER_BYTES = HEADER_INT32 * 4
FORMATS: dict[int, tuple[int, type[np.unsignedinteger]]] = {
    20240520: (1, np.uint16),
    20240801: (7, np.uint32),
}
HEADERLESS = "nanogpt:"
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


def write_shard(path: Path, tokens: np.ndarray) -> ShardInfo:
    """Write uint16 or uint32 tokens with their header; the name appears when the file is whole."""
    partial = path.with_suffix(".bin.tmp")
    digest = hashlib.sha256()
    with partial.open("wb") as file:
        for part in (header_of(tokens.dtype, tokens.size), np.ascontiguousarray(tokens).data):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return ShardInfo(path.name, int(tokens.size), digest.hexdigest())


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


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
