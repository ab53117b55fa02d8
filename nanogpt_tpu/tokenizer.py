"""Text to token ids and back: one class over byte-level BPE, GPT-2's or one's own, or plain bytes.

    tokenizer = load_tokenizer("data")           # a folder or file holding tokenizer.json
    ids = tokenizer.encode("Hello")               # ordinary text, always: no control id inside
    tokenizer.decode(ids)

Whatever its kind, a tokenizer is kept as a Hugging Face `tokenizer.json`, because Kaggle's TPU
image can read that and has no tiktoken. Text is cleaned in one place, `clean_text`, for training
and for prompts alike.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from nanogpt_tpu.encode import EOT_TEXT, Encoder, clean_text
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.manifest import Manifest, folder_of, is_of_others
from nanogpt_tpu.shardfile import AGAIN, verify_shard, write_text
from nanogpt_tpu.vocabulary import (
    BYTE_OF_CHAR,
    CHAR_OF_BYTE,
    GPT2_SHA256,
    fast_encoding,
    gpt2_vocabulary,
    to_bytes,
)

FILE_NAME = "tokenizer.json"
BYTES_SHA256 = "0d68d2ff8b82dd53fb546b9a33d21ff292cb3260488e2a967612da1751aa2185"
MIN_VOCAB_SIZE = 257  # 256 bytes and end-of-text: below that some text could not be encoded
MAX_VOCAB_SIZE = 2**20


# Training takes time with the square of a word's length: longer ones are cut, here only.
_LONG_RUN = re.compile(r"(\S{2000}|\s{2000})")

_SPLITTING = {
    "type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True
}  # fmt: skip
_ODD_MODEL_SETTINGS = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")


class Tokenizer:
    """A byte-level BPE with one end-of-text id. Any Unicode string round-trips exactly."""

    def __init__(self, core: tokenizers.Tokenizer, fast: Any = None) -> None:
        """Wrap a Hugging Face tokenizer; `fast` is a tiktoken encoding that gives the same ids."""
        self._core = core
        self._core.encode_special_tokens = True  # "<|endoftext|>" in a document is ordinary text
        self._fast = fast
        self._added = {id_: t.content for id_, t in core.get_added_tokens_decoder().items()}
        self.eot_id = next(id_ for id_, text in self._added.items() if text == EOT_TEXT)
        self.vocab_size: int = core.get_vocab_size()
        self.sha256 = _identity(core)
        self.kind = {GPT2_SHA256: "gpt2", BYTES_SHA256: "bytes"}.get(self.sha256, "bpe")

    def encode(self, text: str) -> list[int]:
        """Ids of cleaned text; never the end-of-text id."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of several texts, on all cores."""
        texts = [clean_text(text) for text in texts]
        if self.kind == "bytes":
            return [list(text.encode()) for text in texts]
        return [encoding.ids for encoding in self._core.encode_batch_fast(texts)]

    @cached_property
    def encoder(self) -> Encoder:
        """The same ids faster, for documents by the million."""
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        if self.kind == "bytes":
            return Encoder(self.eot_id, dtype)
        fast = self._fast
        if fast is None:
            model = json.loads(self._core.to_str())["model"]
            fast = fast_encoding(model["vocab"], _pairs(model["merges"]), self.eot_id)
        return Encoder(self.eot_id, dtype, fast, None if fast else self._core)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that form no character become U+FFFD, end-of-text is left out."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; none for end-of-text.

        Raises:
            UserError: the id is not in the vocabulary.
        """
        if token == self.eot_id:
            return b""
        if not 0 <= token < self.vocab_size:
            raise UserError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        if token in self._added:
            return self._added[token].encode()
        return to_bytes(self._core.id_to_token(token) or "")

    def token_num_bytes(self) -> np.ndarray:
        """Length in bytes of every id, int64 (vocab_size,): for bits per byte."""
        lengths = [len(self.token_bytes(token)) for token in range(self.vocab_size)]
        return np.array(lengths, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        """The tokenizer's entry in a manifest or a checkpoint; `sha256` is its identity."""
        return {
            "kind": self.kind,
            "file": FILE_NAME,
            "sha256": self.sha256,
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
        }

    def save(self, folder: Path) -> Path:
        """Write `tokenizer.json` into `folder`."""
        write_text(folder / FILE_NAME, self._core.to_str())
        return folder / FILE_NAME


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer named "gpt2" or "bytes", or that of a file, a data folder or a mixture.

    Others' shards without a tokenizer.json are of GPT-2's tokens.

    Raises:
        UserError: nothing there, or the file is no byte-level BPE.
    """
    if source == "bytes":
        return _bytes_tokenizer()
    if source == "gpt2":
        return _gpt2_tokenizer()
    path = folder_of(source)
    if path.is_dir() and not (path / FILE_NAME).exists() and is_of_others(source):
        return _gpt2_tokenizer()
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"no tokenizer at {path}: give gpt2, bytes or a tokenizer.json")
    try:
        content = json.loads(path.read_text("utf-8"))
        _make_ordinary(content)
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
    except UserError as error:
        raise UserError(f"{path} is {error}: make one with prepare --train-tokenizer") from error
    except Exception as error:  # `tokenizers` raises bare Exception for a malformed file
        raise UserError(f"{path} is not a readable tokenizer.json ({error})") from error


def tokenizer_of(data: str | os.PathLike[str], manifest: Manifest) -> Tokenizer:
    """The tokenizer of a data folder or a mixture, sure to be the one that made its shards.

    Raises:
        UserError: it is missing, damaged or another one.
    """
    try:
        tokenizer = load_tokenizer(data)
    except UserError as error:
        raise UserError(f"{error}; or {AGAIN}") from error
    found, then = tokenizer.describe(), manifest.tokenizer
    if differing := [key for key in ("sha256", "vocab_size", "eot_id") if found[key] != then[key]]:
        raise UserError(
            f"{folder_of(data) / FILE_NAME} is not the tokenizer that made these shards: "
            f"{', '.join(differing)} differ from the manifest; {AGAIN}"
        )
    return tokenizer


def verify(folder: Path, manifest: Manifest) -> Tokenizer:
    """Compare every file of one data folder with its manifest; its tokenizer.

    Raises:
        UserError: one is missing or was changed.
    """
    for shards in manifest.splits.values():
        for shard in shards:
            verify_shard(folder / shard.file, shard)
    return tokenizer_of(folder, manifest)


def _make_ordinary(content: dict[str, Any]) -> None:
    """Turn off what would cut text, add ids to it or find control ids in it."""
    model, added = content["model"], content.get("added_tokens") or []
    if "merges" not in model or not BYTE_OF_CHAR.keys() <= model["vocab"].keys():
        raise UserError("no byte-level BPE with all 256 bytes")
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    if EOT_TEXT not in (token["content"] for token in added):
        raise UserError(f"without {EOT_TEXT} among its added_tokens")
    if sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f"of {len(ids)} ids that are not 0 to {len(ids) - 1}")
    splitting = {"use_regex": True, **(content.get("pre_tokenizer") or {}), "trim_offsets": True}
    odd_model = any(model.get(name) for name in _ODD_MODEL_SETTINGS)
    if splitting != _SPLITTING or content.get("normalizer") or odd_model:
        raise UserError("of another kind than GPT-2's (normalizer, pre_tokenizer or model)")
    content.update(truncation=None, padding=None, post_processor=None)
    model["dropout"] = None
    for token in added:
        token["special"] = True


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on texts; the result may be smaller when the text runs out of pairs.

    Raises:
        UserError: vocab_size out of range, or no text at all.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"a vocabulary of {vocab_size} is out of range: from {MIN_VOCAB_SIZE} (256 bytes and "
            f"end-of-text, so that any text can be encoded) to {MAX_VOCAB_SIZE}"
        )
    cleaned = (clean_text(text) for text in texts if text.strip())
    first = next(cleaned, None)
    if first is None:
        raise UserError("no text to train a tokenizer on: the source has only empty documents")
    words = (filter(None, _LONG_RUN.split(text)) for text in chain([first], cleaned))
    core = _empty_core(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT],
        initial_alphabet=CHAR_OF_BYTE,
        show_progress=False,
    )
    core.train_from_iterator(chain.from_iterable(words), trainer)
    return Tokenizer(core)


def _empty_core(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    """A byte-level tokenizer around `model`: GPT-2's splitting rule, no normalization."""
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return core


def _bytes_tokenizer() -> Tokenizer:
    """256 ids that are the bytes themselves, and 256 for end-of-text."""
    vocab = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
    core = _empty_core(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.add_special_tokens([EOT_TEXT])
    return Tokenizer(core)


def _gpt2_tokenizer() -> Tokenizer:
    """GPT-2's vocabulary from tiktoken, rewritten as merges."""
    fast, vocab, merges = gpt2_vocabulary()
    core = _empty_core(tokenizers.models.BPE(vocab=vocab, merges=merges))
    core.add_special_tokens([EOT_TEXT])
    return Tokenizer(core, fast)


def _pairs(merges: list[Any]) -> list[tuple[str, str]]:
    """Merges as pairs: versions of the library write ["a", "b"] or "a b"."""
    split = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
    return [(left, right) for left, right in split]


def _identity(core: tokenizers.Tokenizer) -> str:
    """sha256 over vocabulary and merges, the same whatever version of the library wrote the file.

    Nothing else differs between two tokenizers: `_make_ordinary` sees to that.
    """
    merges = _pairs(json.loads(core.to_str())["model"]["merges"])
    vocab = sorted(core.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    canonical = json.dumps([vocab, merges], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
