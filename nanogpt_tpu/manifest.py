"""What a data folder holds: shards by split, and the manifest that names them.

Folders of others' shards have none: they are taken for GPT-2's tokens. Several folders with
shares, "A:0.8 B:0.2", are one mixture.
"""

import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanogpt_tpu import env
from nanogpt_tpu.errors import UserError, between, well_typed
from nanogpt_tpu.shardfile import (
    HEADERLESS,
    DataPath,
    ShardInfo,
    is_headerless,
    read_shard,
    write_text,
)
from nanogpt_tpu.vocabulary import GPT2

MANIFEST = "manifest.json"
SPLITS = ("train", "val")
_PART = re.compile(r"(\S.*?):(\d+\.?\d*|\.\d+)(?=\s|$)\s*")  # of a mixture; names may hold spaces


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

    def check_types(self) -> None:
        """Refuse what no `prepare` wrote.

        Raises:
            TypeError, KeyError: a value of another kind, or one that is missing.
        """
        for shard in (shard for split in self.splits.values() for shard in split):
            well_typed(shard)
            between(shard, 0, 2**63, "num_tokens")
        counts = [self.tokenizer["vocab_size"], self.tokenizer["eot_id"], self.num_documents]
        for count in (*counts, *self.num_skipped.values()):
            if not isinstance(count, int) or not 0 <= count < 2**63:
                raise TypeError(f"{count!r} is no count")
        if not isinstance(self.tokenizer["sha256"], str) or not isinstance(self.source, str):
            raise TypeError("sha256 or source is no text")
        dict(self.settings)

    def save(self, folder: Path) -> None:
        """Write manifest.json."""
        content = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        write_text(folder / MANIFEST, content)

    @staticmethod
    def load(data: DataPath) -> "Manifest":
        """Read the manifest of a data folder or of a mixture, or make up that of others' shards.

        Raises:
            UserError: no such folder, no data in it, a manifest of another format, or a mixture
                of several tokenizers.
        """
        parts = parse_data(data)
        if len(parts) > 1:
            return mix({folder: Manifest.load(folder) for folder, _ in parts}, dict(parts))
        path = folder_of(data) / MANIFEST
        if not path.is_file():
            return _of_others(data)
        try:
            values = json.loads(path.read_text("utf-8"))
            if (version := values["format_version"]) == 1:
                if missing := {"sha256", "vocab_size", "eot_id"} - values["tokenizer"].keys():
                    raise KeyError(f"tokenizer has no {' and no '.join(sorted(missing))}")
                splits = values.pop("splits").items()
                found = {
                    split: [ShardInfo(**shard) for shard in shards] for split, shards in splits
                }
                manifest = Manifest(splits=found, **values)
                manifest.check_types()
                return manifest
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not a manifest of ours ({error}); prepare again") from error
        raise UserError(f"{path} has format_version {version!r}, this program reads 1")


def parse_data(data: DataPath) -> list[tuple[str, float]]:
    """The folders that `data` names and their shares, which sum to 1: "DIR" or "A:0.8 B:0.2".

    Raises:
        UserError: a share is missing or no positive number, or a folder is named twice.
    """
    text = os.fspath(data)
    found = _PART.findall(text)
    if Path(text).exists() or not found:
        return [(text, 1.0)]
    shares = {folder: float(share) for folder, share in found}
    is_whole = not _PART.sub("", text).strip() and len(shares) == len(found)
    if not is_whole or not all(0 < share < 1e9 for share in shares.values()):
        raise UserError(
            f"data {text!r}: a mixture is DIR:SHARE DIR:SHARE..., each share above 0 and each "
            "folder once"
        )
    return [(folder, share / sum(shares.values())) for folder, share in shares.items()]


def folder_of(data: DataPath) -> Path:
    """The folder that `data` names; of a mixture the first, all of which share a tokenizer."""
    return Path(parse_data(data)[0][0].removeprefix(HEADERLESS))


def mix(parts: dict[str, Manifest], shares: dict[str, float]) -> Manifest:
    """One manifest for several data folders, by their names; its identity holds their shares.

    Raises:
        UserError: their tokenizers differ.
    """
    manifests = list(parts.values())
    if len({part.tokenizer["sha256"] for part in manifests}) > 1:
        found = ", ".join(f"{name}: {m.tokenizer['sha256'][:8]}" for name, m in parts.items())
        raise UserError(f"corpora of different tokenizers are not one ({found})")
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
    """A manifest for shards without one: of GPT-2's tokens, their bytes not hashed."""
    folder = folder_of(data)
    splits = {
        split: [ShardInfo(p.name, read_shard(p, data).size, "") for p in _named(data, split)]
        for split in SPLITS
    }
    if not any(splits.values()):
        what = f"no shards ({MANIFEST})" if folder.is_dir() else "no such folder"
        fix = "make it with: nanogpt-tpu prepare"
        if (folder / "train.bin").is_file():
            fix = f"nanoGPT's headerless train.bin is read as {HEADERLESS}{folder}"
        raise UserError(f"data {os.fspath(data)!r}: {what}; {fix}")
    return Manifest(dict(GPT2), splits, 0, {}, f"shards of others in {folder.name}")


def is_of_others(data: DataPath) -> bool:
    """Whether `data` is a folder of shards that have no manifest."""
    return not (folder_of(data) / MANIFEST).is_file() and any(_named(data, s) for s in SPLITS)


def _named(data: DataPath, split: str) -> list[Path]:
    """The shards of a split by their names alone."""
    folder = folder_of(data)
    if is_headerless(data):
        return [path for path in [folder / f"{split}.bin"] if path.is_file()]
    patterns = [f"{split}_*.bin", f"*_{split}_*.bin", f"{split}_*.npy", f"*_{split}_*.npy"]
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


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


def list_shards(data: DataPath, split: str) -> list[Path]:
    """Shard files of a split: the manifest's, or by name where there is no manifest.

    Raises:
        UserError: none there.
    """
    shards = Manifest.load(data).splits.get(split, [])
    files = [folder_of(data) / shard.file for shard in shards]
    if not files:
        raise UserError(
            f"data {os.fspath(data)!r}: no {split} shards; make them with: nanogpt-tpu prepare"
        )
    return files
