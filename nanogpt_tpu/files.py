"""The records of one file: text, JSON lines or parquet, plain, gzip or zstd.

Each generator gives (number, text) from the record after `place` on; a record without text is a
`Skip` that says why. Text of more than BLOCK_BYTES comes as several `Piece`s.
"""

import codecs
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanogpt_tpu.encode import cut_point
from nanogpt_tpu.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PACKED = {".gz": "gzip", ".zst": "zstd"}
MAX_BAD_SHARE = 0.1
BLOCK_BYTES = 2**21
_PEEKED_RECORDS = 64
_SURROGATE = re.compile("[\ud800-\udfff]")
Note = Callable[[Path, int, str], None]
"""Told of damaged text: the file, how many pieces became U+FFFD, and where the first stood."""


class Piece(str):
    """A part of a document that is too long to be held whole; `begins` and `ends` say which."""

    begins = ends = False


class Skip(str):
    """Why a record gives no text."""

    __slots__ = ()


Records = Iterator[tuple[int, str]]


def kind_of(path: Path) -> str:
    """The suffix that says how to read a file: what stands before .gz or .zst, if that is last."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def read_file(path: Path, text_field: str | None, place: int, note: Note) -> Records:
    """The records of a file of any kind, after the first `place` of them.

    Raises:
        UserError: damaged, cut short, not UTF-8, or without the field; file and place are given.
        OSError: the file cannot be opened.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        return _read_parquet(path, text_field, place)
    if kind == ".jsonl":
        return _read_jsonl(path, text_field or _field_of(path), place, note)
    return _read_text(path, place, note)


def guess_field(records: list[dict[str, Any]], origin: str) -> str:
    """The field that holds the text: "text" where there is one, else the longest string; said.

    Raises:
        UserError: no field is a string; the fields are given.
    """
    if any("text" in record for record in records):
        return "text"
    lengths: dict[str, int] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, str):
                lengths[name] = lengths.get(name, 0) + len(value)
    if not lengths:
        names = sorted({name for record in records for name in record})
        raise UserError(
            f"{origin} has no column 'text' and none that holds text, only {', '.join(names)}: "
            "name one with --text-field"
        )
    field = max(lengths, key=lambda name: lengths[name])
    print(f"{origin}: text is taken from {field!r} (--text-field says another)", file=sys.stderr)
    return field


def _open(path: Path) -> Any:
    """The unpacked bytes of a file."""
    if path.suffix not in PACKED:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=PACKED[path.suffix]))


def _read_text(path: Path, place: int, note: Note) -> Records:
    """A file as one document, in pieces when it is long; blanks before the text wait for it."""
    number, held = 0, []
    for text, is_last in _blocks(path, note):
        held.append(text)
        if number == 0 and not has_text(text):
            if is_last and place == 0:
                yield 1, ""
            continue
        for part in held:
            number += 1
            piece = Piece(part)
            piece.begins, piece.ends = number == 1, is_last and part is text
            if number > place:
                yield number, piece
        held = []


def has_text(text: str) -> bool:
    """Whether there is more than blanks."""
    text = text.removeprefix("\ufeff")
    return text != "" and not text.isspace()


def _blocks(path: Path, note: Note) -> Iterator[tuple[str, bool]]:
    """The text of a file in pieces that may be encoded one by one, and whether it is the last."""
    start, data, carry, is_last = 0, b"", "", False
    with _open(path) as file:
        while not is_last:
            block = file.read(BLOCK_BYTES)
            data, is_last = data + block, len(block) < BLOCK_BYTES
            end = len(data) if is_last else _character_end(data)
            carry += _decode(data[:end], path, start, note)
            data, start = data[end:], start + end
            cut = len(carry) if is_last else cut_point(carry, len(carry) - 1)
            yield carry[:cut], is_last
            carry = carry[cut:]


def _character_end(data: bytes) -> int:
    """Where the last character of UTF-8 bytes begins: what follows may be but half of one."""
    for end in range(len(data) - 1, max(0, len(data) - 4), -1):
        if data[end] & 0xC0 != 0x80:
            return end
    return len(data)  # no UTF-8: all is decoded and reported


def _read_jsonl(path: Path, name: str, place: int, note: Note) -> Records:
    position = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            begin, position = position, position + len(line)
            if number <= place:
                continue
            text = _decode(line, path, begin, note).removeprefix("\ufeff")
            if not text or text.isspace():
                yield number, Skip("blank line")
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path}:{number} is not JSON ({error}): mend or drop it"
                ) from error
            value = record.get(name) if isinstance(record, dict) else None
            if isinstance(value, str) and not value.isascii():
                note(path, len(_SURROGATE.findall(value)), f"line {number}")
            yield number, value if isinstance(value, str) else Skip(f"no {name!r}")


def _field_of(path: Path) -> str:
    """The field of a JSON file's text, from its first lines; "text" if they hold no text."""
    records = peek(path)
    values = (value for record in records for value in record.values())
    return guess_field(records, str(path)) if any(isinstance(v, str) for v in values) else "text"


def peek(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON file's first lines."""
    records = []
    with _open(path) as file:
        for line in itertools.islice(file, _PEEKED_RECORDS):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                continue  # blank, or bad: the reading itself tells where and why
    return [record for record in records if isinstance(record, dict)]


def _read_parquet(path: Path, text_field: str | None, place: int) -> Records:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            name = _column(file, text_field, path)
            number = 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if number + num_rows <= place:
                    number += num_rows
                    continue
                for batch in file.iter_batches(256, [group], [name], use_threads=False):
                    for value in batch.column(0).to_pylist():
                        number += 1
                        if number > place:
                            yield number, value if isinstance(value, str) else Skip(f"no {name!r}")
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise UserError(f"source {path} is no whole parquet file ({reason})") from error


def _column(file: Any, text_field: str | None, path: Path) -> str:
    names = file.schema_arrow.names
    if text_field is None and "text" not in names:
        first = next(file.iter_batches(_PEEKED_RECORDS), None)
        empty = [dict.fromkeys(names)]
        return guess_field((first.to_pylist() if first else None) or empty, str(path))
    name = text_field or "text"
    if name not in names:
        raise UserError(f"{path} has no column {name!r}, only {', '.join(names)}: name one of them")
    return name


def _decode(data: bytes, path: Path, start: int, note: Note) -> str:
    """UTF-8 text of the bytes at `start` in a file; a few bad ones become U+FFFD."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", "replace")
        num_bad = text.count("\ufffd") - data.count("\ufffd".encode())
        place = f"byte {start + error.start} (0x{data[error.start]:02x})"
        is_utf16 = start == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if is_utf16 or num_bad > MAX_BAD_SHARE * len(text):
            raise UserError(
                f"{path} is not UTF-8 text ({num_bad} bad piece(s), the first at {place}): "
                f"convert it, such as with iconv -f {'UTF-16' if is_utf16 else 'GBK'} -t UTF-8"
            ) from error
        note(path, num_bad, place)
        return text
