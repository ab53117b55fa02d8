"""Documents out of files, and the text that every Python carries.

    for text in Reader(("book.txt", "songs/*.jsonl")): ...

Empty and blank documents are skipped and counted. Bytes that are no UTF-8 become U+FFFD and are
reported with their position; text of which more than one character in ten is bad is no UTF-8 at
all, and refused.
"""

import ast
import json
import pydoc_data.topics
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
_SKIPPED_LIBRARY_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages"}


@dataclass
class Reader:
    """Reads documents out of sources, and counts what was skipped or mended on the way."""

    sources: tuple[str, ...]
    text_field: str = "text"
    num_skipped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("no source: give demo, or files or globs ending in .txt .md .jsonl")
        self._files = [path for name in self.sources for path in _find_files(name)]

    def __iter__(self) -> Iterator[str]:
        """Documents with text in them, in the order of the sources."""
        self.num_skipped.clear()
        self.warnings.clear()
        for path in self._files:
            for text in self._read(path):
                if text.strip():
                    yield text
                else:
                    self.num_skipped["empty"] += 1

    def _read(self, path: Path | None) -> Iterator[str]:
        if path is None:
            return iter(demo_documents())
        if path.suffix == ".jsonl":
            return self._read_jsonl(path)
        return iter([self._decode(path.read_bytes(), str(path), 0)])

    def _read_jsonl(self, path: Path) -> Iterator[str]:
        position = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                text = self._decode(line, where, position)
                position += len(line)
                if not text.strip():
                    self.num_skipped["blank line"] += 1
                    continue
                try:
                    record = json.loads(text.removeprefix("\ufeff"))
                except ValueError as error:
                    raise UserError(f"{where} is not JSON ({error}): mend or drop it") from error
                value = record.get(self.text_field) if isinstance(record, dict) else None
                if isinstance(value, str):
                    yield value
                else:
                    self.num_skipped[f"no {self.text_field!r}"] += 1

    def _decode(self, data: bytes, where: str, offset_bytes: int) -> str:
        """UTF-8 text of bytes, by the policy in the module's header."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            text = data.decode("utf-8", "replace")
            place = offset_bytes + error.start
            num_bad = text.count("\ufffd")
            if num_bad > MAX_BAD_SHARE * len(text):
                raise UserError(
                    f"{where} is not UTF-8 text (first bad byte 0x{data[error.start]:02x} at "
                    f"position {place}, {num_bad} in all): convert it, such as with "
                    "iconv -f GBK -t UTF-8"
                ) from error
            self.warnings.append(
                f"{where}: {num_bad} bad UTF-8 piece(s) became U+FFFD, the first at byte {place}"
            )
            return text


def _find_files(source: str) -> list[Path | None]:
    """The files a source names, sorted; [None] for the built-in text."""
    if source == "demo":
        return [None]
    if Path(source).is_dir():
        found = sorted(path for path in Path(source).rglob("*") if path.suffix in SUFFIXES)
    else:
        found = sorted(Path(name) for name in glob(source, recursive=True))
        found = found or ([Path(source)] if Path(source).is_file() else [])
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
