"""Documents streamed from a Hugging Face hub, and files fetched from it; drops are survived.

The hub's address is HF_ENDPOINT, as for all of Hugging Face's libraries (a mirror, or a test).
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nanogpt_tpu.errors import PausedError, UserError
from nanogpt_tpu.files import guess_field

NAMED = {
    "fineweb-edu": "hf:HuggingFaceFW/fineweb-edu:sample-10BT",
    "fineweb": "hf:HuggingFaceFW/fineweb:sample-10BT",
}
READY_REPO = "kjj0/fineweb10B-gpt2"  # the speed-runs' FineWeb 10B as GPT-2 tokens, 100M a shard
MAX_TRIES = 8
FIRST_WAIT_S = 1.0
Place = dict[str, Any]


def stream(
    source: str, text_field: str | None, part: tuple[int, int], place: Place | None
) -> Iterator[tuple[Callable[[], Place], object]]:
    """(where to go on after it, text) of each record of "hf:owner/name[:config]", from `place` on.

    A part takes whole files of the dataset, or every n-th record where there are fewer files.

    Raises:
        UserError: no such dataset, no such field, or the library is missing.
        PausedError: the hub stayed out of reach, though tried again and again.
    """
    dataset, is_cut, failures = _open(source, part)
    field = text_field or guess_field(
        _retried(lambda: list(dataset.take(8)), source, failures), source
    )
    every, first = (1, 0) if is_cut else (part[1], part[0])
    count = place["count"] if place else 0
    if place:
        dataset.load_state_dict(place["stream"])
    num_tries, good = 0, place["stream"] if place else None
    while True:
        try:
            for record in dataset:
                count, num_tries = count + 1, 0
                if field not in record:
                    raise UserError(f"{source} has no {field!r}, only {', '.join(record)}")
                if (count - 1) % every == first:
                    yield partial(_after, count, dataset), record[field]
            return
        except failures as error:
            num_tries += 1
            good = dataset.state_dict() if num_tries == 1 else good
            _wait(num_tries, source, error)
            dataset = _open(source, part)[0]
            dataset.load_state_dict(good)


def _after(count: int, dataset: Any) -> Place:
    return {"count": count, "stream": dataset.state_dict()}


def _open(source: str, part: tuple[int, int]) -> tuple[Any, bool, tuple[type[Exception], ...]]:
    """The streamed dataset, whether it is cut into parts by file, and what a drop raises."""
    try:
        import datasets
        from httpx import HTTPError
    except ImportError as error:
        raise UserError(f"source {source!r} needs the library: pip install datasets") from error
    name, _, config = source.removeprefix("hf:").partition(":")
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserError(f"source {source!r}: say owner and name, as in hf:HuggingFaceFW/fineweb")
    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # its waits are fixed; ours grow and are told
    failures = (OSError, EOFError, HTTPError)
    missing = (datasets.exceptions.DatasetNotFoundError, ValueError)  # ValueError: no such config

    def load() -> Any:
        try:
            opened = datasets.load_dataset(name, config or None, split="train", streaming=True)
        except missing as error:
            raise UserError(f"source {source!r}: {error}") from error
        return opened

    dataset = _retried(load, source, failures)
    is_cut = dataset.num_shards >= part[1]
    return dataset.shard(part[1], part[0]) if is_cut else dataset, is_cut, failures


def _retried(action: Callable[[], Any], source: str, failures: tuple[type[Exception], ...]) -> Any:
    """The result of `action`, tried again when the connection breaks."""
    for num_tries in range(1, MAX_TRIES + 1):
        try:
            return action()
        except failures as error:
            _wait(num_tries, source, error)
    raise AssertionError  # the last _wait has raised


def _wait(num_tries: int, source: str, error: Exception) -> None:
    """Wait, longer each time, or give up."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if 400 <= status < 500 and status not in (408, 429):
        raise UserError(f"{source!r}: {reason}") from error
    if num_tries >= MAX_TRIES:
        raise PausedError(
            f"{source} cannot be reached, tried {num_tries} times ({reason}): what is done is "
            "kept, check the connection (or HF_ENDPOINT) and start the same command again"
        )
    wait_s = FIRST_WAIT_S * 2 ** (num_tries - 1)
    print(f"{source}: {reason}; again in {wait_s:g} s", file=sys.stderr)
    time.sleep(wait_s)


def fetch(repo: str, name: str, folder: Path) -> tuple[Path, str | None]:
    """A file of a dataset repository, downloaded or gone on with, and the sha256 the hub gives it.

    Raises:
        UserError: no such file.
        PausedError: the hub stayed out of reach.
    """
    try:
        from httpx import HTTPError
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise UserError(f"{repo} needs the library: pip install huggingface_hub") from error
    url = hf_hub_url(repo, name, repo_type="dataset")

    def load() -> tuple[Path, str | None]:
        try:
            etag = get_hf_file_metadata(url).etag
            path = hf_hub_download(repo, name, repo_type="dataset", local_dir=folder)
        except (EntryNotFoundError, RepositoryNotFoundError) as error:
            raise UserError(f"{repo} has no file {name}") from error
        return Path(path), etag if etag and len(etag) == 64 else None  # sha256 for large files

    return _retried(load, repo, (OSError, HTTPError))
