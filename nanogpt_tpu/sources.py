"""Documents out of files, a hub, Python, or the text that every Python carries.

    for text in Reader(("book.txt", "songs/*.jsonl.gz", "hf:owner/name")): ...

Empty and blank documents are skipped and counted. Bytes that are no UTF-8, and halves of surrogate
pairs in JSON, become U+FFFD and are reported with their position; text of which more than one
character in ten is bad is no UTF-8 at all, and refused. A reader's `state()` says where it stands;
`read_from(state)` goes on there.
"""

import ast
import pydoc_data.topics
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import Any

from nanogpt_tpu import hub
from nanogpt_tpu.errors import PausedError, UserError
from nanogpt_tpu.files import PACKED, SUFFIXES, Piece, Skip, has_text, kind_of, peek, read_file

BUILT_IN = ("demo", "poems")
_SKIPPED_LIBRARY_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
_START: dict[str, Any] = {
    "file": 0, "place": None, "num_read": 0, "crc": 0, "skipped": {}, "mended": {}
}  # fmt: skip
Documents = Callable[[], Iterable[str]]
Origin = str | Path | Documents


def fingerprint(path: Path) -> bytes:
    """sha256 over a file's size and 64 evenly spaced pieces of 4 KiB: all of a small file."""
    size_bytes = path.stat().st_size
    digest = sha256(str(size_bytes).encode())
    with path.open("rb") as file:
        for piece in range(64):
            file.seek(piece * size_bytes // 64)
            digest.update(file.read(4096))
    return digest.digest()


@dataclass
class Reader:
    """Reads documents out of sources, and counts what was skipped or mended on the way."""

    sources: tuple[str | Documents, ...]
    text_field: str | None = None
    """Field or column with the text; None takes "text", or guesses where there is none."""
    part: tuple[int, int] = (0, 1)
    """(index, count): every count-th file, or every count-th record where files are fewer."""
    num_skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError(f"no source: give demo, or files or globs ending in {_suffixes()}")
        files = [origin for source in self.sources for origin in _find(source)]
        index, count = self.part
        self._is_cut_by_file = len(files) >= count
        self._files = files[index::count] if self._is_cut_by_file else files
        texts = [p for p in files if isinstance(p, Path) and kind_of(p) in (".txt", ".md")]
        if texts and not self._is_cut_by_file:
            raise UserError(
                f"part {index + 1}/{count}: {len(files)} file(s) cannot be cut into {count} parts, "
                f"{texts[0]} is one document: give at least {count} files, or JSON lines"
            )
        self._mended: dict[str, tuple[int, str]] = {}  # how much in a file, and where first
        self._at: tuple[int, Any] = (0, None)  # file, place in it
        self.num_read, self.crc = 0, 0  # of all texts given so far: how many, and a checksum

    @property
    def num_bytes(self) -> int:
        """Size of the files, without built-in text and the hub's."""
        return sum(path.stat().st_size for path in self._files if isinstance(path, Path))

    @property
    def sample(self) -> str:
        """Fingerprint of the files: sha256 over the sizes and 64 pieces of each."""
        files = (path for path in self._files if isinstance(path, Path))
        return sha256(b"".join(map(fingerprint, files))).hexdigest()

    def known_fields(self) -> str:
        """What the first JSON file's first records hold, for an error about a missing field."""
        for path in self._files:
            if isinstance(path, Path) and kind_of(path) == ".jsonl":
                names = sorted({name for record in peek(path) for name in record})
                return f"; {path} has the fields {', '.join(names)}: name one with --text-field"
        return ""

    @property
    def warnings(self) -> list[str]:
        """What was mended in the last reading, one line a file."""
        return [
            f"{path}: {count} piece(s) that are no UTF-8 text became U+FFFD, the first at {place}"
            for path, (count, place) in self._mended.items()
        ]

    def state(self) -> dict[str, Any]:
        """Where reading stands, as JSON can hold it."""
        file, place = self._at
        return {
            "file": file,
            "place": place() if callable(place) else place,
            "num_read": self.num_read,
            "crc": self.crc,
            "skipped": dict(self.num_skipped),
            "mended": dict(self._mended),
        }

    def __iter__(self) -> Iterator[str]:
        """Documents with text in them, in the order of the sources."""
        return self._read_on(_START)

    def read_from(self, state: dict[str, Any] | None, is_mended: bool = False) -> Iterator[str]:
        """The documents that follow those read when `state()` gave this; None: all of them.

        What may be others than then (a mended source, Python's) is read from the beginning.

        Raises:
            UserError: unreadable, damaged or undecodable source; the file and the place are given.
            PausedError: what comes before `state` is not what it was.
        """
        if state and (is_mended or any(map(callable, self._files))):
            return self.skip(iter(self), state)
        return self._read_on(state or _START)

    def skip(self, texts: Iterator[str], state: dict[str, Any]) -> Iterator[str]:
        """Of texts made from all that this reader gives, those that follow `state`."""
        for _ in texts:
            if self.num_read >= state["num_read"]:
                break
        if (self.num_read, self.crc) != (state["num_read"], state["crc"]):
            raise PausedError(
                "the source was changed before the place where the unfinished work stands: give "
                "it as it was, or delete .partial in the data folder to begin again"
            )
        return texts

    def _read_on(self, state: dict[str, Any]) -> Iterator[str]:
        self.num_read, self.crc = state["num_read"], state["crc"]
        self.num_skipped.clear()
        self.num_skipped.update(state["skipped"])
        self._mended = {name: (count, at) for name, (count, at) in state["mended"].items()}
        place = state["place"]
        for number in range(state["file"], len(self._files)):
            self._at = number, place
            try:
                yield from self._read(number, place)
            except OSError as error:
                reason, name = error.strerror or " ".join(str(error).split()), self._files[number]
                raise UserError(f"source {name} cannot be read ({reason})") from error
            place = None
        self._at = len(self._files), None

    def _read(self, number: int, place: Any) -> Iterator[str]:
        """The documents of one file or other origin."""
        index, count = self.part
        origin = self._files[number]
        is_hub = isinstance(origin, str) and origin not in BUILT_IN
        every = 1 if self._is_cut_by_file or is_hub else count  # hub.stream cuts parts itself
        for nth, (after, text) in enumerate(self._records(origin, place), start=1):
            self._at = number, after
            if every > 1 and (_count(place) + nth - 1) % every != index:
                continue
            if isinstance(text, Piece) or (has_text(text) and not isinstance(text, Skip)):
                self.num_read += 1
                self.crc = zlib.crc32(text.encode("utf-8", "surrogatepass") + b"\0", self.crc)
                yield text
            else:
                self.num_skipped[str(text) if isinstance(text, Skip) else "empty"] += 1

    def _records(self, origin: Origin, place: Any) -> Iterator[tuple[Any, str]]:
        """(place after it, text) of what follows `place`."""
        records: Iterable[tuple[Any, Any]]
        if isinstance(origin, Path):
            records = read_file(origin, self.text_field, place or 0, self._note)
        elif callable(origin):
            records = _read_python(origin)
        elif origin in BUILT_IN:
            texts = demo_documents() if origin == "demo" else poems()
            records = list(enumerate(texts, start=1))[place or 0 :]
        else:
            part = (0, 1) if self._is_cut_by_file else self.part
            records = hub.stream(origin, self.text_field, part, place)
        for after, text in records:
            yield after, text if isinstance(text, str) else Skip("no text")

    def _note(self, path: Path, count: int, place: str) -> None:
        if count:
            before, first = self._mended.get(str(path), (0, place))
            self._mended[str(path)] = before + count, first


def _count(place: Any) -> int:
    return place["count"] if isinstance(place, dict) else place or 0


def _suffixes() -> str:
    return f"{' '.join(SUFFIXES)} (or these and {' '.join(PACKED)})"


def _find(source: str | Documents) -> list[Origin]:
    """The files a source names, sorted; what is no file stands for itself."""
    if not isinstance(source, str) or source in BUILT_IN:
        return [source]
    if source in hub.NAMED or source.startswith("hf:"):
        return [hub.NAMED.get(source, source)]
    path = Path(source)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if kind_of(p) in SUFFIXES and p.is_file())
    elif path.is_file():
        found = [path]
    else:
        found = sorted(map(Path, glob(source, recursive=True)))  # noqa: PTH207 (may be absolute)
    if not found:
        raise UserError(f"source {source!r}: nothing there that ends in {_suffixes()}")
    for path in found:
        if kind_of(path) not in SUFFIXES or not path.is_file():
            raise UserError(f"source {path}: not a file ending in {_suffixes()}")
    return list(found)


def _read_python(origin: Documents) -> Iterable[tuple[Any, object]]:
    texts = origin()
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise UserError(f"a source function returned {texts!r}: it must return strings to iterate")
    return enumerate(texts, start=1)


def poems() -> list[str]:
    """Poems of the Tang dynasty, in Chinese: enough to try a vocabulary of one's own."""
    text = Path(__file__).with_name("poems.txt").read_text("utf-8")
    return [poem.strip() for poem in text.split("\n\n") if poem.strip()]


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
