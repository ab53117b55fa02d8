"""Documents out of files, and the text that every Python carries.

    for text in Reader(("book.txt", "songs/*.jsonl")): ...

Empty and blank documents are skipped and counted. Bytes that are no UTF-8, and halves of surrogate
pairs in JSON, become U+FFFD and are reported with their position; text of which more than one
character in ten is bad is no UTF-8 at all, and refused.
"""

import ast
import codecs
import json
import pydoc_data.topics
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import glob
from hashlib import sha256
from pathlib import Path

from nanogpt_tpu.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl")
MAX_BAD_SHARE = 0.1
_SURROGATE = re.compile("[\ud800-\udfff]")
_SKIPPED_LIBRARY_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages"}


@dataclass
class Reader:
    """Reads documents out of sources, and counts what was skipped or mended on the way."""

    sources: tuple[str, ...]
    text_field: str = "text"
    num_skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("no source: give demo, or files or globs ending in .txt .md .jsonl")
        self._files = [path for name in self.sources for path in _find_files(name)]
        self._mended: dict[Path, tuple[int, str]] = {}  # how much in a file, and where first

    @property
    def num_bytes(self) -> int:
        """Size of the files, without the built-in text."""
        return sum(path.stat().st_size for path in self._files if path is not None)

    @property
    def warnings(self) -> list[str]:
        """What was mended in the last reading, one line a file."""
        return [
            f"{path}: {count} piece(s) that are no UTF-8 text became U+FFFD, the first at {place}"
            for path, (count, place) in self._mended.items()
        ]

    def __iter__(self) -> Iterator[str]:
        """Documents with text in them, in the order of the sources."""
        self.num_skipped.clear()
        self._mended.clear()
        for path in self._files:
            try:
                for text in self._read(path):
                    if text.removeprefix("\ufeff").strip():
                        yield text
                    else:
                        self.num_skipped["empty"] += 1
            except OSError as error:
                raise UserError(f"source {path} cannot be read ({error.strerror})") from error

    def _read(self, path: Path | None) -> Iterator[str]:
        if path is None:
            return iter(demo_documents())
        if path.suffix == ".jsonl":
            return self._read_jsonl(path)
        return iter([self._decode(path.read_bytes(), path, 0)])

    def _read_jsonl(self, path: Path) -> Iterator[str]:
        position = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = self._decode(line, path, position).removeprefix("\ufeff")
                position += len(line)
                if not text.strip():
                    self.num_skipped["blank line"] += 1
                    continue
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{path}:{number} is not JSON ({error}): mend or drop it"
                    ) from error
                value = record.get(self.text_field) if isinstance(record, dict) else None
                if isinstance(value, str):
                    self._note_mended(path, len(_SURROGATE.findall(value)), f"line {number}")
                    yield value
                else:
                    self.num_skipped[f"no {self.text_field!r}"] += 1

    def _decode(self, data: bytes, path: Path, start: int) -> str:
        """UTF-8 text of the bytes at `start` in a file, by the policy in the module's header."""
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
            self._note_mended(path, num_bad, place)
            return text

    def _note_mended(self, path: Path, count: int, place: str) -> None:
        if count:
            before, first = self._mended.get(path, (0, place))
            self._mended[path] = before + count, first


def _find_files(source: str) -> list[Path | None]:
    """The files a source names, sorted; [None] for the built-in text."""
    if source == "demo":
        return [None]
    path = Path(source)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    elif path.is_file():
        found = [path]
    else:
        found = sorted(map(Path, glob(source, recursive=True)))  # noqa: PTH207 (may be absolute)
    if not found:
        raise UserError(f"source {source!r}: nothing there that ends in {' '.join(SUFFIXES)}")
    for path in found:
        if path.suffix not in SUFFIXES or not path.is_file():
            raise UserError(f"source {path}: not a file ending in {' '.join(SUFFIXES)}")
    return list(found)


def demo_documents() -> list[str]:
    """English prose that every CPython carries: the language reference and library docstrings.

    About 2 MB, needs no network. The order is by hash, so that validation text is of every kind.
    """
    documents = set(pydoc_data.topics.topics.values())
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        folders = set(path.relative_to(library).parts[:-1])
        if folders & _SKIPPED_LIBRARY_FOLDERS:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template with placeholders, not a module
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        documents.add("\n\n".join(doc for doc in docs if doc))
    documents.discard("")
    return sorted(documents, key=lambda text: sha256(text.encode()).digest())
