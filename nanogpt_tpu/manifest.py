"""What a data folder holds: token shards, and the manifest that names them.

A shard is 256 int32 of header [magic, version, num_tokens, 0...], then the tokens: uint16 under
magic 20240520 (the format of llm.c and modded-nanogpt), uint32 under 20240801. Shards of others
are read as they are: folders of such files without a manifest, build-nanogpt's `.npy`, and
nanoGPT's headerless `.bin` when asked for as "nanogpt:DIR". Several folders with weights, "A:0.8
B:0.2", are one mixture. What has no manifest is taken for GPT-2's tokens.
"""

import hashlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_tpu import env
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.vocabulary import GPT2

HEADER_INT32 = 256
HEADER_BYTES = HEADER_INT32 * 4
FORMATS: dict[int, tuple[int, type[np.unsignedinteger]]] = {
    20240520: (1, np.uint16),
    20240801: (7, np.uint32),
}
MANIFEST = "manifest.json"
SPLITS = ("train", "val")
HEADERLESS = "nanogpt:"
DataPath = str | os.PathLike[str]
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
        """sha256 over tokenizer and shards: two folders with it hold the same tokens.

        Shards of others have no hash here: their names and lengths stand for them. The shares of a
        mixture count too.
        """
        found = [(split, shard) for split in SPLITS for shard in self.splits.get(split, [])]
        shards = [(split, s.sha256 or f"{s.file} {s.num_tokens}") for split, s in found]
        content = [self.tokenizer["sha256"], shards, *self.settings.get("mixture", [])]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in manifest.json."""
        return asdict(self)

    def save(self, folder: Path) -> None:
        """Write manifest.json by rename, so that a half-written one is never seen."""
        partial = folder / f"{MANIFEST}.tmp"
        partial.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False), "utf-8")
        partial.replace(folder / MANIFEST)

    @staticmethod
    def load(data: DataPath) -> "Manifest":
        """Read the manifest of a data folder or of a mixture, or make up that of others' shards.

        Raises:
            UserError: no such folder, no data in it, a manifest of another format, or a mixture
                of several tokenizers.
        """
        parts = parse_data(data)
        if len(parts) > 1:
            return _mix({folder: Manifest.load(folder) for folder, _ in parts}, dict(parts))
        path = folder_of(data) / MANIFEST
        if not path.is_file():
            return _of_others(data)
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


def parse_data(data: DataPath) -> list[tuple[str, float]]:
    """The folders that `data` names and their shares, which sum to 1: "DIR" or "A:0.8 B:0.2".

    Raises:
        UserError: a share is missing or no positive number, or a folder is named twice.
    """
    text = os.fspath(data)
    words = [word.rpartition(":") for word in text.split()]
    if Path(text).exists() or not any(_is_number(weight) for _, _, weight in words):
        return [(text, 1.0)]
    shares = {folder: float(weight) for folder, _, weight in words if _is_number(weight)}
    if len(shares) < len(words) or not all(0 < share < 1e9 for share in shares.values()):
        raise UserError(f"data {text!r}: a mixture is DIR:SHARE DIR:SHARE..., each share above 0")
    return [(folder, share / sum(shares.values())) for folder, share in shares.items()]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def folder_of(data: DataPath) -> Path:
    """The folder that `data` names; of a mixture the first, all of which share a tokenizer."""
    return Path(parse_data(data)[0][0].removeprefix(HEADERLESS))


def _mix(parts: dict[str, Manifest], shares: dict[str, float]) -> Manifest:
    """One manifest for several corpora; its identity holds their shares."""
    manifests = list(parts.values())
    if len({part.tokenizer["sha256"] for part in manifests}) > 1:
        found = ", ".join(f"{name}: {m.tokenizer['sha256'][:8]}" for name, m in parts.items())
        raise UserError(f"corpora of different tokenizers cannot be mixed ({found})")
    skipped = sum((Counter(part.num_skipped) for part in manifests), Counter[str]())
    return Manifest(
        tokenizer=manifests[0].tokenizer,
        splits={
            split: [
                replace(shard, file=os.fspath(Path(folder) / shard.file))
                for folder, part in parts.items()
                for shard in part.splits.get(split, [])
            ]
            for split in SPLITS
        },
        num_documents=sum(part.num_documents for part in manifests),
        num_skipped=dict(skipped),
        source=" + ".join(f"{shares[name]:g} of {part.source}" for name, part in parts.items()),
        settings={"mixture": [[shares[name], part.identity] for name, part in parts.items()]},
    )


def _of_others(data: DataPath) -> Manifest:
    """A manifest for shards that came without one, of GPT-2's tokens; their bytes are not hashed.

    Raises:
        UserError: there are none.
    """
    folder = folder_of(data)
    splits = {}
    for split in SPLITS:
        files = _named(folder, split, os.fspath(data).startswith(HEADERLESS))
        splits[split] = [ShardInfo(p.name, read_shard(p, data).size, "") for p in files]
    if not any(splits.values()):
        what = f"no shards ({MANIFEST})" if folder.is_dir() else "no such folder"
        raise UserError(f"data {os.fspath(data)!r}: {what}; make it with: nanogpt-tpu prepare")
    return Manifest(dict(GPT2), splits, 0, {}, f"shards of others in {folder.name}")


def is_of_others(data: DataPath) -> bool:
    """Whether `data` is a folder of shards that have no manifest."""
    folder, headerless = folder_of(data), os.fspath(data).startswith(HEADERLESS)
    has_shards = any(_named(folder, split, headerless) for split in SPLITS)
    return has_shards and not (folder / MANIFEST).is_file()


def _named(folder: Path, split: str, headerless: bool) -> list[Path]:
    """The shards of a split by their names alone."""
    if headerless:
        return [path for path in [folder / f"{split}.bin"] if path.is_file()]
    patterns = [f"{split}_*.bin", f"*_{split}_*.bin", f"{split}_*.npy", f"*_{split}_*.npy"]
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def find_data(folder: str | os.PathLike[str] | None = None) -> Path:
    """The data folder in or below `folder`; below the read-only inputs unless given.

    Raises:
        UserError: none there, or several; their names are given.
    """
    root = env.input_dir() if folder is None else Path(folder)
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
        raise UserError(f"shard {path} is missing: {_AGAIN}")
    size_bytes = path.stat().st_size
    if os.fspath(data).startswith(HEADERLESS):
        return _map(path, np.dtype(np.uint16), 0, size_bytes // 2)
    if path.suffix == ".npy":
        return _read_npy(path)
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


def list_shards(data: DataPath, split: str) -> list[Path]:
    """Shard files of a split: the manifest's, or by name where there is no manifest.

    Raises:
        UserError: none there.
    """
    folder = folder_of(data)
    if (folder / MANIFEST).is_file():
        files = [folder / shard.file for shard in Manifest.load(folder).splits.get(split, [])]
    else:
        files = _named(folder, split, os.fspath(data).startswith(HEADERLESS))
    if not files:
        raise UserError(
            f"data {os.fspath(data)!r}: no {split} shards; make them with: nanogpt-tpu prepare"
        )
    return files


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
