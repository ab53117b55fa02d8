"""The data kit's speed, memory and loader against what is usual, in one run; rows for README.md.

    python benchmarks/data_kit.py [--megabytes 200]

The corpus is the Python sources of this environment's packages, cut to documents of at most 4,000
characters. The peers are written here: `classic` is build-nanogpt's way (one document at a time
through multiprocessing.Pool, chunks of 16), `simple loader` is nanoGPT's (a row at a time). All
times are of whole processes, start and reading and writing included, except those of one thread.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

CORES = os.cpu_count() or 1


def write_corpus(path: Path, num_bytes: int) -> list[str]:
    """JSON lines until so many bytes are written; a sample of the documents is returned."""
    sample, written = [], 0
    sources = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            for source in sources:
                text = source.read_text("utf-8", "replace")
                for start in range(0, len(text), 4000):
                    document = text[start : start + 4000]
                    file.write(json.dumps({"text": document}) + "\n")
                    written += len(document)
                    if len(sample) < 6000:
                        sample.append(document)
                if written >= num_bytes:
                    break
    return sample


def one_thread(documents: list[str]) -> float:
    """Tokens/s of tiktoken's fastest call on one thread."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    start = time.perf_counter()
    total = sum(encoding.encode_to_numpy(text, disallowed_special=()).size for text in documents)
    return total / (time.perf_counter() - start)


def all_cores(documents: list[str]) -> float:
    """Tokens/s of that call in a process on every core at once: what the machine has to give."""
    with multiprocessing.Pool(CORES) as pool:
        return sum(pool.map(one_thread, [documents] * CORES, chunksize=1))


def encode_document(line: str) -> np.ndarray:
    """What a worker of the classic script does with one document."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    ids = [encoding._special_tokens["<|endoftext|>"]]
    ids.extend(encoding.encode_ordinary(json.loads(line)["text"]))
    return np.array(ids).astype(np.uint16)


def classic(corpus: Path, out: Path, num_processes: int) -> None:
    """The usual script: a pool, one document a task, a shard in memory, written with np.save."""
    shard, used, number = np.empty(100_000_000, dtype=np.uint16), 0, 0
    with multiprocessing.Pool(num_processes) as pool, corpus.open(encoding="utf-8") as lines:
        for ids in pool.imap(encode_document, lines, chunksize=16):
            if used + ids.size > shard.size:
                np.save(out / f"train_{number:06d}.npy", shard[:used])
                used, number = 0, number + 1
            shard[used : used + ids.size] = ids
            used += ids.size
    np.save(out / f"train_{number:06d}.npy", shard[:used])


def run(*command: object) -> tuple[float, float]:
    """Seconds a process takes, and the most memory in MB that it and its workers held together."""
    start, peak_bytes = time.perf_counter(), 0
    process = psutil.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            tree = [process, *process.children(recursive=True)]
            peak_bytes = max(peak_bytes, sum(one.memory_info().rss for one in tree))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - start, peak_bytes / 1e6


def row(name: str, value: str, note: str = "") -> None:
    """One line of the table."""
    print(f"| {name} | {value} | {note} |", flush=True)


def speed(corpus: Path, sample: list[str], out: Path) -> Path:
    """Rows of preparation; the folder it made."""
    single = one_thread(sample)
    row("one thread, encode_to_numpy", f"{single / 1e6:.2f}M tokens/s", "the unit of what follows")
    given = all_cores(sample)
    row(f"the same in {CORES} processes at once", f"{given / 1e6:.2f}M tokens/s", "the most to get")
    module = ("-m", "nanogpt_tpu", "prepare", corpus)
    seconds, memory = run(*module, "--out", out / "ours", "--workers", CORES)
    tokens = sum(p.stat().st_size // 2 - 512 for p in (out / "ours").glob("*.bin"))
    ours = tokens / seconds
    again = one_thread(sample)  # the machine is shared: what one thread did before and after
    share = ours / (CORES * (single + again) / 2)
    most = (given + all_cores(sample)) / 2
    note = f"{share:.0%} of {CORES} x one thread, {ours / most:.0%} of the most"
    row(f"prepare, {CORES} workers", f"{ours / 1e6:.2f}M tokens/s", note)
    row("one thread again", f"{again / 1e6:.2f}M tokens/s")
    row("prepare, memory of all its processes", f"{memory:,.0f} MB")
    for processes in (CORES, max(1, CORES // 2)):
        (out / f"classic{processes}").mkdir()
        seconds, _ = run(__file__, "--classic", processes, corpus, out / f"classic{processes}")
        rate = tokens / seconds
        row(f"classic, {processes} process(es)", f"{rate / 1e6:.2f}M tokens/s",
            f"prepare is {ours / rate:.2f}x")  # fmt: skip
    seconds, _ = run(*module, "--out", out / "own", "--workers", CORES, "--train-tokenizer", 8192,
                     "--max-tokens", tokens // 4)  # fmt: skip
    encode_own(out / "own", sample, again)
    return out / "ours"


def encode_own(folder: Path, sample: list[str], single: float) -> None:
    """One thread of a tokenizer of one's own beside GPT-2's."""
    from nanogpt_tpu.tokenizer import load_tokenizer

    encoder = load_tokenizer(folder).encoder
    start = time.perf_counter()
    rate = encoder(sample).size / (time.perf_counter() - start)
    row("own tokenizer of 8,192, one thread", f"{rate / 1e6:.2f}M tokens/s",
        f"{single / rate:.2f}x slower than GPT-2's")  # fmt: skip


def memory(out: Path) -> None:
    """Peak memory on one enormous document."""
    (out / "huge.txt").write_text("A line of the longest book. " * 15_000_000, "utf-8")
    _, peak = run("-m", "nanogpt_tpu", "prepare", out / "huge.txt", "--out", out / "huge",
                  "--workers", 2)  # fmt: skip
    row("one document of 420 MB, memory of all processes", f"{peak:,.0f} MB")


def best(action, num_tokens: int) -> str:
    """Tokens/s over the best of several rounds of 64 batches."""
    seconds = []
    for number in range(5):
        start = time.perf_counter()
        for step in range(64):
            action(number * 64 + step)
        seconds.append(time.perf_counter() - start)
    return f"{64 * num_tokens / min(seconds) / 1e6:,.0f}M tokens/s"


def loader(data: Path, out: Path) -> None:
    """Rows of the loader, on one core, from page cache."""
    import torch

    from nanogpt_tpu.shardfile import header_of, read_shard
    from nanogpt_tpu.shards import ShardLoader

    torch.set_num_threads(1)
    load, (path, *_) = ShardLoader(data, "train", 1024, 512, 1), sorted(data.glob("train_*.bin"))
    for step in range(load.num_windows // 512):
        load(step)  # into the page cache
    row("loader, 512 x 1,024 shuffled", best(load, 512 * 1024))
    tokens, rng = read_shard(path), np.random.default_rng(1)

    def simple(step: int) -> None:
        places = rng.integers(0, tokens.size - 1025, 512)
        idx = [torch.from_numpy(tokens[i : i + 1024].astype(np.int64)) for i in places]
        targets = [torch.from_numpy(tokens[i + 1 : i + 1025].astype(np.int64)) for i in places]
        torch.stack(idx), torch.stack(targets)

    row("simple loader, the same batch", best(simple, 512 * 1024))
    many = out / "many"
    many.mkdir()
    for number in range(100):
        content = header_of(np.uint16, 10_000) + bytes(20_000)
        (many / f"train_{number:06d}.bin").write_bytes(content)
    start = time.perf_counter()
    ShardLoader(many, "train", 1024, 8, 1)
    row("opening 100 shards", f"{time.perf_counter() - start:.3f} s")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--classic", nargs=3, metavar=("PROCESSES", "CORPUS", "OUT"))
    args = parser.parse_args()
    if args.classic:
        classic(Path(args.classic[1]), Path(args.classic[2]), int(args.classic[0]))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        corpus = out / "corpus.jsonl"
        sample = write_corpus(corpus, args.megabytes * 10**6)
        print("| what | seen | |\n|---|---|---|")
        data = speed(corpus, sample, out)
        loader(data, out)
        memory(out)


if __name__ == "__main__":
    main()
