"""Optional cleaning of documents, every drop counted: HTML, blank runs, length, script, duplicates.

All is off unless asked for. What decides is the document as it then stands: without its tags, if
those were to go.
"""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from nanogpt_tpu.errors import UserError, one_of, positive, well_typed
from nanogpt_tpu.files import Piece

MIN_SCRIPT_SHARE = 0.5
NEAR = 0.8  # estimated Jaccard similarity from which two texts are near duplicates
_SHINGLE_CHARS, _MAX_SHINGLES = 5, 20_000
_BLOCKS = "title,p,div,br,li,tr,table,ul,ol,h1,h2,h3,h4,h5,h6,pre,blockquote,section,article"
_BLANK_RUN = re.compile(r"[^\S\n]*\n(?:[^\S\n]*\n){2,}")
_SPACES = re.compile(r"[^\S\n]{2,}")


@dataclass(frozen=True)
class Cleaning:
    """What is done to documents before they are encoded."""

    strip_html: bool = False
    """Keep the text of HTML documents only, without tags, scripts and styles."""
    collapse_blank: bool = False
    """At most one empty line, and one space, in a row."""
    min_chars: int | None = None
    """Drop shorter documents."""
    script: str | None = None
    """Drop documents of which less than half of the letters are of it: Han, Latin, Cyrillic..."""
    drop_duplicates: str | None = None
    """exact (the same text), or near (five-character pieces four fifths the same, by MinHash)."""

    def __post_init__(self) -> None:
        well_typed(self)
        positive(self, "min_chars")
        if self.drop_duplicates is not None:
            one_of("drop_duplicates", self.drop_duplicates, ("exact", "near"))
        needed = {
            "selectolax": self.strip_html, "regex": self.script is not None,
            "datasketch": self.drop_duplicates == "near",
        }  # fmt: skip
        for library, is_needed in needed.items():
            if is_needed and find_spec(library) is None:
                raise UserError(f"this cleaning needs a library: pip install {library}")
        _script_pattern(self.script)

    @property
    def remembers(self) -> bool:
        """Whether what is dropped depends on the documents before."""
        return self.drop_duplicates is not None

    def clean(self, texts: Iterator[str], num_dropped: Counter[str]) -> Iterator[str]:
        """The documents that stay, cleaned, each held whole; the others counted by reason."""
        if all(getattr(self, name) == f.default for name, f in _FIELDS.items()):
            yield from texts
            return
        letters = _script_pattern(self.script)
        is_seen = {"exact": _exact, "near": _near}.get(self.drop_duplicates or "", _nothing)()
        for text in map(self._rewritten, _whole(texts)):
            reason = None
            if not text.strip():
                reason = "empty after cleaning"
            elif self.min_chars is not None and len(text) < self.min_chars:
                reason = f"under {self.min_chars} characters"
            elif letters is not None and not _is_mostly(text, *letters):
                reason = f"not in {self.script}"
            elif is_seen(text):
                reason = f"{self.drop_duplicates} duplicate"
            if reason is None:
                yield text
            else:
                num_dropped[reason] += 1

    def _rewritten(self, text: str) -> str:
        if self.strip_html and "<" in text:
            from selectolax.lexbor import LexborHTMLParser

            page = LexborHTMLParser(text)
            page.strip_tags(["script", "style", "template", "noscript"])
            for block in page.css(_BLOCKS):
                block.insert_after("\n")
            text = page.text().strip()
        if self.collapse_blank:
            text = _SPACES.sub(" ", _BLANK_RUN.sub("\n\n", text))
        return text


_FIELDS = Cleaning.__dataclass_fields__


def _whole(texts: Iterator[str]) -> Iterator[str]:
    """Documents whose pieces, if there are several, are joined."""
    pieces: list[str] = []
    for text in texts:
        pieces.append(text)
        if not isinstance(text, Piece) or text.ends:
            yield "".join(pieces)
            pieces = []


def _script_pattern(script: str | None) -> tuple[Any, Any] | None:
    """Patterns for letters of a script, and for all letters."""
    if script is None:
        return None
    import regex

    try:
        if not re.fullmatch(r"\w+", script):
            raise regex.error("no name")
        return regex.compile(rf"\p{{Script={script}}}"), regex.compile(r"\p{L}")
    except regex.error as error:
        raise UserError(f"script {script!r} is not known: Han, Latin, Cyrillic...") from error


def _is_mostly(text: str, wanted: Any, letter: Any) -> bool:
    num_letters = len(letter.findall(text))
    return len(wanted.findall(text)) >= MIN_SCRIPT_SHARE * num_letters > 0


def _nothing() -> Any:
    return lambda text: False


def _exact() -> Any:
    seen: set[bytes] = set()

    def is_seen(text: str) -> bool:
        content = text.strip().encode("utf-8", "surrogatepass")
        num_before = len(seen)
        seen.add(hashlib.blake2b(content, digest_size=12).digest())
        return len(seen) == num_before

    return is_seen


def _near() -> Any:
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=NEAR, num_perm=64)

    def is_seen(text: str) -> bool:
        letters = "".join(filter(str.isalnum, text.lower())) or text
        count = max(1, min(_MAX_SHINGLES, len(letters) - _SHINGLE_CHARS + 1))
        pieces = {letters[i : i + _SHINGLE_CHARS] for i in range(count)}
        sketch = MinHash(num_perm=64, hashfunc=zlib.crc32)
        sketch.update_batch([piece.encode("utf-8", "surrogatepass") for piece in sorted(pieces)])
        if any(True for _ in index.query(sketch)):
            return True
        index.insert(len(index.keys), sketch, check_duplication=False)
        return False

    return is_seen
