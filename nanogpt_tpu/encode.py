"""Documents to ids on all cores: an `Encoder`, and worker processes that each hold one.

A worker is this module run as a program that talks through its pipes. So it needs no fork (which
threads make unsafe), imports no `__main__` of the user's, works in a notebook, and ends by itself
when its parent is killed. Threads would do without all that, but malloc's locks make them a
quarter slower.
"""

import os
import pickle
import re
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

import numpy as np

from nanogpt_tpu.errors import UserError

EOT_TEXT = "<|endoftext|>"
PIECE_CHARS = 2**18
_SURROGATE = re.compile("[\ud800-\udfff]")
_CUT = re.compile(r"(?<=\S)[ \n]")
_PIPE_BYTES = 2**20
T = TypeVar("T")


def clean_text(text: str) -> str:
    """What every document and every prompt goes through before encoding.

    A byte-order mark at the start is dropped, CR LF becomes LF, and half of a surrogate pair
    (from broken PDFs and JSON) becomes U+FFFD. Nothing else is touched.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def cut_point(text: str, end: int) -> int:
    """Where to cut `text` at or before `end`: such that both sides keep the ids of the whole.

    That is before a space or newline after something else: GPT-2's splitting rule always begins
    a word there. Only where the last half holds none is it cut at `end`.
    """
    for begin in (end - 2**12, end // 2):  # near the end first: mostly there is one
        cuts = [match.start() for match in _CUT.finditer(text, max(0, begin), end)]
        if cuts:
            return cuts[-1]
    return end - 1 if text[end - 1 : end + 1] == "\r\n" else end


def cut(text: str) -> Iterator[str]:
    """A text in pieces that BPE takes in bounded memory and time, whatever stands in it."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        piece = text[start : start + PIECE_CHARS + 1]
        end = cut_point(piece, PIECE_CHARS)
        yield piece[:end]
        start += end
    yield text[start:]


@dataclass(frozen=True)
class Encoder:
    """Turns texts into ids of one vocabulary. Pickled, it is what a worker needs and no more."""

    eot_id: int
    dtype: Any
    fast: Any = None
    """A tiktoken encoding with end-of-text as its control token."""
    core: Any = None
    """A Hugging Face tokenizer; with neither, ids are bytes."""

    def __call__(self, texts: list[str], continues: bool = False) -> np.ndarray:
        """Ids of documents, each preceded by end-of-text: uint16 or uint32 (num_ids,).

        `continues`: the first text goes on with a document begun before, so nothing precedes it.
        """

        def is_plain(text: str) -> bool:
            return self.fast is not None and len(text) <= PIECE_CHARS and EOT_TEXT not in text

        parts = []
        for may_join, group in groupby(map(clean_text, texts), is_plain):
            if may_join:
                joined = EOT_TEXT + EOT_TEXT.join(group)
                parts.append(self.fast.encode_to_numpy(joined, allowed_special={EOT_TEXT}))
            else:
                for text in group:
                    parts.append(np.array([self.eot_id]))
                    parts += map(self.ordinary, cut(text))
        ids = np.concatenate([part.astype(self.dtype) for part in parts])
        return ids[1:] if continues else ids

    def ordinary(self, text: str) -> np.ndarray:
        """Ids of one clean text, control tokens' names taken for ordinary text."""
        if self.fast is not None:
            return self.fast.encode_to_numpy(text, disallowed_special=())
        if self.core is not None:
            return np.array(self.core.encode_batch_fast([text])[0].ids, dtype=np.int64)
        return np.frombuffer(text.encode(), dtype=np.uint8)


def _send(pipe: BinaryIO, message: object) -> None:
    pickle.dump(message, pipe, protocol=5)
    pipe.flush()


class _Worker:
    """One process with an encoder in it."""

    def __init__(self, encoder: Encoder) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from nanogpt_tpu.encode import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=_PIPE_BYTES,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for the parent, which then closes the pipe
        )
        assert self._process.stdin and self._process.stdout
        self._to: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._from: BinaryIO = self._process.stdout  # type: ignore[assignment]
        self._encoder: Encoder | None = encoder

    def encode(self, texts: list[str], continues: bool) -> np.ndarray:
        """As `Encoder.__call__`, in the worker.

        Raises:
            UserError: the worker has died.
        """
        try:
            if self._encoder:
                _send(self._to, self._encoder)
                self._encoder = None
            _send(self._to, (texts, continues))
            return pickle.load(self._from)  # only ever from our own process
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            why = " (killed, as when memory runs out)" if code == -9 else ""
            raise UserError(
                f"an encoding worker ended with code {code}{why}: start again with fewer --workers"
            ) from error

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # half a message may wait in it
            self._to.close()
        self._from.close()


def serve() -> None:
    """What a worker does: receive texts, send ids, until its parent closes the pipe."""
    to, from_ = sys.stdout.buffer, sys.stdin.buffer
    try:
        encoder = pickle.load(from_)
        while True:
            _send(to, encoder(*pickle.load(from_)))
    except (EOFError, BrokenPipeError):
        return


def encode_all(
    encoder: Encoder, batches: Iterable[tuple[list[str], bool, T]], num_workers: int
) -> Generator[tuple[np.ndarray, T], None, None]:
    """(ids, tag) of each (texts, continues, tag), in order; few batches are held at a time.

    Where one worker is enough, this process does it itself. Close the iterator: it ends the others.

    Raises:
        UserError: a worker has died.
    """
    batches = iter(batches)
    first_two = list(islice(batches, 2))
    batches = chain(first_two, batches)
    if len(first_two) < 2 or num_workers < 2:
        for texts, continues, tag in batches:
            yield encoder(texts, continues), tag
        return
    workers, idle = [_Worker(encoder) for _ in range(num_workers)], SimpleQueue[_Worker]()
    for worker in workers:
        idle.put(worker)

    def encode(texts: list[str], continues: bool) -> np.ndarray:
        worker = idle.get()
        try:
            return worker.encode(texts, continues)
        finally:
            idle.put(worker)

    waiting: deque[tuple[Future[np.ndarray], T]] = deque()
    threads = ThreadPoolExecutor(num_workers)
    try:
        for texts, continues, tag in batches:
            waiting.append((threads.submit(encode, texts, continues), tag))
            if len(waiting) > 3 * num_workers:
                future, first = waiting.popleft()
                yield future.result(), first
        for future, tag in waiting:
            yield future.result(), tag
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()
        threads.shutdown()
