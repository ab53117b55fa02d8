"""The pieces that byte-level BPE is made of, and GPT-2's two vocabulary files wherever they lie.

tiktoken encodes about four times as fast as `tokenizers`, but knows no merges: it joins whatever
two neighbours form the token of lowest rank. `fast_encoding` proves for a given vocabulary that
this comes to the same before it is used.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanogpt_tpu import env
from nanogpt_tpu.encode import EOT_TEXT
from nanogpt_tpu.errors import UserError

GPT2_SHA256 = "ae1589b6422c4a21fbd8938ef7a2af401c4bc7e187a88dc9c07c7545cbcd758b"
GPT2: dict[str, Any] = {
    "kind": "gpt2",
    "file": "tokenizer.json",
    "sha256": GPT2_SHA256,
    "vocab_size": 50257,
    "eot_id": 50256,
}
_GPT2_FILES = ("vocab.bpe", "encoder.json")
Ranks = dict[bytes, int]
Pairs = list[tuple[str, str]]


def _char_of_byte() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in chars]
    chars.update({byte: chr(256 + n) for n, byte in enumerate(rest)})
    return [chars[byte] for byte in range(256)]


CHAR_OF_BYTE = _char_of_byte()
BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}


def to_chars(token: bytes) -> str:
    """Bytes as byte-level BPE writes them."""
    return "".join(CHAR_OF_BYTE[byte] for byte in token)


def to_bytes(chars: str) -> bytes:
    """The bytes that such characters stand for."""
    return bytes(BYTE_OF_CHAR[char] for char in chars)


def gpt2_vocabulary() -> tuple[Any, dict[str, int], Pairs]:
    """GPT-2 as a fast encoding, and the same as vocabulary and merges in characters.

    The files are looked for where tiktoken keeps them, then below the attached input folder, then
    on the internet; tiktoken checks their hashes.

    Raises:
        UserError: tiktoken is missing, or its two vocabulary files can be neither found nor read.
    """
    try:
        import tiktoken
        from tiktoken.load import read_file_cached
    except ImportError as error:
        raise UserError(
            "tokenizer 'gpt2' needs tiktoken: pip install tiktoken, or give a tokenizer.json"
        ) from error
    with _attached_files():
        try:
            encoding = tiktoken.get_encoding("gpt2")
            merges_file = read_file_cached(_gpt2_urls()[_GPT2_FILES[0]])  # just verified
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; a bad hash is none
            raise UserError(f"tokenizer 'gpt2': {_missing_vocabulary(error)}") from error
    ranks = encoding._mergeable_ranks
    vocab = {to_chars(token): rank for token, rank in ranks.items()}
    lines = merges_file.decode("utf-8").splitlines()[1:]  # the first says the version
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    fast = _encoding(tiktoken.Encoding, encoding._pat_str, ranks, encoding.eot_token)
    return fast, vocab, merges


def _gpt2_urls() -> dict[str, str]:
    """Where tiktoken's own code says that the two files are, by file name."""
    from tiktoken_ext import openai_public

    names = [c for c in openai_public.gpt2.__code__.co_consts if isinstance(c, str)]
    return {url.rpartition("/")[2]: url for url in names if url.startswith("http")}


@contextmanager
def _attached_files() -> Iterator[None]:
    """Point the cache of tiktoken at copies of files below the input folder, if they lie there.

    Under their natural names, or under those that tiktoken's cache gives them (sha1 of the URL).
    """
    if os.environ.get("TIKTOKEN_CACHE_DIR") or not env.input_dir().is_dir():
        yield
        return
    cached = {name: hashlib.sha1(url.encode()).hexdigest() for name, url in _gpt2_urls().items()}
    below = [path for path in sorted(env.input_dir().rglob("*")) if path.is_file()]
    found = {
        key: next((p for p in below if p.name in (name, key)), None) for name, key in cached.items()
    }
    if None in found.values():
        yield
        return
    with TemporaryDirectory() as folder:  # tiktoken drops a damaged file: never from the input
        for key, path in found.items():
            (Path(folder) / key).write_bytes(path.read_bytes() if path else b"")
        os.environ["TIKTOKEN_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TIKTOKEN_CACHE_DIR"]


def _missing_vocabulary(error: Exception) -> str:
    """Which of tiktoken's files is not there, and where it would be looked for."""
    url = getattr(getattr(error, "request", None), "url", None) or ""
    name = url.rpartition("/")[2] or "its vocabulary"
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or "the folder named by TIKTOKEN_CACHE_DIR"
    file_name = f" as {hashlib.sha1(url.encode()).hexdigest()}" if url else ""
    return (
        f"{name} could not be fetched ({type(error).__name__}), and {folder} holds no whole copy "
        f"of it{file_name}: connect to the internet once, copy it there, attach a dataset with "
        f"{' and '.join(_GPT2_FILES)} below {env.input_dir()}, or use another tokenizer"
    )


def fast_encoding(vocab: dict[str, int], merges: Pairs, eot_id: int) -> Any | None:
    """A tiktoken encoding that gives the ids of this BPE; None if it would not, or is missing."""
    try:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError:
        return None
    ids = [vocab[left + right] for left, right in merges]
    if any(later <= earlier for earlier, later in pairwise(ids)):
        return None  # the order of merging is not that of the ids
    tokens = [*CHAR_OF_BYTE, *(left + right for left, right in merges)]
    ranks = {to_bytes(token): vocab[token] for token in tokens}
    for left, right in merges:
        token = to_bytes(left + right)
        if _last_merge(token, ranks, ranks[token]) != [to_bytes(left), to_bytes(right)]:
            return None
    return _encoding(tiktoken.Encoding, r50k_pat_str, ranks, eot_id)


def _encoding(kind: Any, pattern: str, ranks: Ranks, eot_id: int) -> Any:
    """An encoding under a name tiktoken does not know: pickled whole, so that workers read no file.

    End-of-text is a control token of it: one call encodes many documents, cut at that.
    """
    special = {EOT_TEXT: eot_id}
    return kind("ours", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _last_merge(token: bytes, ranks: Ranks, rank: int) -> list[bytes]:
    """The two pieces whose merge made `token`: BPE on its bytes with only earlier merges."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
        best = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
