"""Documents to shards: what is in them, and that a failure leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, make_documents

from nanogpt_tpu import encode
from nanogpt_tpu.cli import main
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.inspection import inspect
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.merge import merge
from nanogpt_tpu.prepare import prepare
from nanogpt_tpu.shardfile import read_shard
from nanogpt_tpu.tokenizer import EOT_TEXT, load_tokenizer, train_tokenizer

EOT = 256  # of the bytes tokenizer


def write_records(path: Path, texts: list[str | None]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def make(tmp_path: Path, texts: list[str | None], tokenizer="bytes", **options) -> Manifest:
    """`prepare` on a JSONL file of these texts, into tmp_path/data."""
    source = write_records(tmp_path / "source.jsonl", texts)
    return prepare(source, tmp_path / "data", tokenizer, **options)


def stream(folder: Path, split: str = "all") -> list[int]:
    """The tokens of a data folder, validation first, as they came from the documents."""
    splits = Manifest.load(folder).splits
    shards = [s for name in ("val", "train") if split in (name, "all") for s in splits[name]]
    return [int(token) for shard in shards for token in read_shard(folder / shard.file)]


def documents(folder: Path) -> list[str]:
    """The texts of a data folder, cut at its end-of-text ids."""
    tokenizer, tokens = load_tokenizer(folder), stream(folder)
    assert tokens[0] == tokenizer.eot_id
    starts = [place for place, token in enumerate(tokens) if token == tokenizer.eot_id]
    ends = [*starts[1:], len(tokens)]
    return [tokenizer.decode(tokens[a + 1 : b]) for a, b in zip(starts, ends, strict=True)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(*args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        prepare(*args, **kwargs)
    return str(caught.value)


# What is in the shards


@pytest.mark.parametrize("options", [{}, {"tokenizer": "gpt2"}, {"train_tokenizer": 300}])
def test_text_of_a_control_token_is_ordinary_text(tmp_path, gpt2_files, options):
    texts = ["alpha", f"x{EOT_TEXT}y", "omega", *make_documents(3)]
    manifest = make(tmp_path, texts, **options)
    assert documents(tmp_path / "data") == texts
    assert manifest.num_documents == len(texts)
    found = inspect(tmp_path / "data")
    assert (found["num_eot"], found["problems"]) == (len(texts), [])


@pytest.mark.parametrize("blank_first", [True, False])
def test_empty_documents_leave_no_trace(tmp_path, blank_first):
    blank = ["", "  \n", None]
    manifest = make(tmp_path, [*blank, "hello", "bye"] if blank_first else ["hello", "bye", *blank])
    assert stream(tmp_path / "data") == [EOT, *b"hello", EOT, *b"bye"]
    assert manifest.num_documents == 2
    assert manifest.num_skipped == {"empty": 2, "no 'text'": 1}


def test_manifest_says_what_was_made(tmp_path):
    manifest = make(tmp_path, make_documents(50), val_tokens=500, shard_tokens=4000)
    assert manifest == Manifest.load(tmp_path / "data")
    assert manifest.tokenizer == load_tokenizer(tmp_path / "data").describe()
    assert manifest.source == str(tmp_path / "source.jsonl")
    assert {"val_tokens": 500, "shard_tokens": 4000}.items() <= manifest.settings.items()
    sizes = [shard.num_tokens for shard in manifest.splits["train"]]
    assert sizes[:-1] == [4000] * (len(sizes) - 1) and 0 < sizes[-1] <= 4000
    names = [s.file for split in ("train", "val") for s in manifest.splits[split]]
    assert sorted(contents(tmp_path / "data")) == sorted(
        [*names, "manifest.json", "tokenizer.json"]
    )
    assert documents(tmp_path / "data") == make_documents(50)


def test_small_vocabularies_take_two_bytes_a_token_and_large_ones_four(tmp_path):
    make(tmp_path, ["hello"])
    (shard,) = Manifest.load(tmp_path / "data").splits["train"]
    assert read_shard(tmp_path / "data" / shard.file).dtype == np.uint16

    large = json.loads((tmp_path / "data" / "tokenizer.json").read_text("utf-8"))
    vocab = large["model"]["vocab"]
    vocab.update({f"a{number}": len(vocab) + number for number in range(2**16)})
    large["added_tokens"][0]["id"] = eot_id = len(vocab)
    (tmp_path / "large.json").write_text(json.dumps(large), "utf-8")
    prepare(tmp_path / "source.jsonl", tmp_path / "large", tmp_path / "large.json")
    (shard,) = Manifest.load(tmp_path / "large").splits["train"]
    tokens = read_shard(tmp_path / "large" / shard.file)
    assert tokens.dtype == np.uint32 and tokens.tolist() == [eot_id, *b"hello"]
    assert inspect(tmp_path / "large")["problems"] == []


@pytest.mark.parametrize(
    ("sizes", "val_tokens", "expected"),
    [
        ([10] * 100, 10**6, 100),  # a tenth
        ([10] * 100, 50, 50),  # at most val_tokens
        ([10] * 100, 45, 40),  # whole documents
        ([10] * 100, 0, 0),
        ([10] * 100, 1, 1),  # not one document fits: cut inside
        ([30, 70, *[10] * 90], 10**6, 100),
        ([60, 70, *[10] * 87], 10**6, 60),  # whole documents fill more than half
        ([40, 70, *[10] * 89], 10**6, 100),  # less than half: the next is cut inside
        ([1000], 10**6, 100),  # a single document
        ([1000], 30, 30),
        ([9], 10**6, 0),
        ([10], 10**6, 1),
    ],
)
def test_validation_split(tmp_path, sizes, val_tokens, expected):
    texts = [chr(ord("a") + k % 26) * (size - 1) for k, size in enumerate(sizes)]
    manifest = make(tmp_path, texts, val_tokens=val_tokens)
    assert manifest.num_tokens("val") == expected
    assert manifest.num_tokens("train") == sum(sizes) - expected
    assert documents(tmp_path / "data") == texts


@pytest.mark.parametrize(("max_tokens", "num_documents"), [(1, 1), (15, 2), (20, 2), (21, 3)])
def test_max_tokens(tmp_path, max_tokens, num_documents):
    manifest = make(tmp_path, ["a" * 9] * 1000, max_tokens=max_tokens, val_tokens=0)
    assert stream(tmp_path / "data") == ([EOT, *b"aaaaaaaaa"] * 3)[:max_tokens]
    assert manifest.num_documents == num_documents
    assert inspect(tmp_path / "data")["num_eot"] == num_documents


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"train_tokenizer": 400}])
def test_two_runs_give_the_same_bytes(tmp_path, options):
    source = write_records(tmp_path / "a.jsonl", make_documents(300))
    for name in ("one", "two"):
        prepare(source, tmp_path / name, **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


# Damaged and foreign text


def test_documented_cleaning_reaches_the_shards(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "b.jsonl").write_text('{"text":"ab\\ud83dcd"}\n', "ascii")
    (tmp_path / "c.txt").write_bytes(b"twenty and more good characters \xff")
    prepare([tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt")], tmp_path / "data", "bytes")
    cleaned = ["one\ntwo\n", "ab\ufffdcd", "twenty and more good characters \ufffd"]
    assert documents(tmp_path / "data") == cleaned
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: ") and "b.jsonl: 1 piece(s)" in first and "line 1" in first
    assert "c.txt: 1 piece(s)" in second and "byte 32 (0xff)" in second


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"train_tokenizer": 300}])
@pytest.mark.parametrize("content", [b"ok\n\xff\xfe\n", "你好".encode("gbk")])
def test_other_encodings_are_refused_and_leave_nothing(tmp_path, content, options):
    (tmp_path / "a.txt").write_bytes(content)
    message = refusal(tmp_path / "a.txt", tmp_path / "data", **options)
    assert str(tmp_path / "a.txt") in message and "byte" in message and "UTF-8" in message
    assert not (tmp_path / "data").exists()


def test_any_locale_gives_the_same_bytes(run_python, tmp_path):
    folder = tmp_path / "歌"
    folder.mkdir()
    (folder / "静夜思.txt").write_text("床前明月光。\n" * 40, "utf-8")
    args = ("-m", "nanogpt_tpu", "prepare", folder / "静夜思.txt", "--train-tokenizer", "270")
    locales = {
        "utf8": {"PYTHONUTF8": "1"},
        "ascii": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
    }
    for name, environ in locales.items():
        done = run_python(*args, "--out", folder / name, env=environ)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    assert contents(folder / "utf8") == contents(folder / "ascii")
    again = run_python(*args, "--out", folder / "utf8", env=locales["ascii"])
    assert again.returncode == 0 and "nothing to do" in again.stderr


# Failures leave nothing


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"val_tokens": -1}, ["val_tokens is -1"]),
        ({"shard_tokens": 0}, ["shard_tokens is 0"]),
        ({"shard_tokens": 2**31}, ["shard_tokens is 2147483648"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"train_tokenizer": 0}, ["train_tokenizer is 0"]),
        ({"train_tokenizer": 50}, ["vocabulary of 50", "257"]),
        ({"val_tokens": 1e5}, ["val_tokens is 100000.0", "a whole number"]),
        ({"tokenizer": "missing.json"}, ["missing.json", "give gpt2, bytes"]),
        ({"text_field": "lyrics"}, ["has no text", "2 no 'lyrics'", "has the fields text"]),
        ({"text_field": ""}, ["text_field is ''"]),
        ({"script": ""}, ["script ''"]),
        ({"tokenizer": True}, ["tokenizer is True"]),
        ({"tokenizer": ""}, ["tokenizer is ''"]),
        ({"max_output_bytes": 2**20, "tokenizer": "gpt2"}, ["max_output_bytes", "tokenizer.json"]),
        ({"train_tokenizer": 300, "part": "1/2"}, ["part 1/2", "train once"]),
    ],
)
def test_wrong_settings(tmp_path, gpt2_files, options, parts):
    with pytest.raises(UserError) as caught:
        make(tmp_path, ["hello", "bye"], **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (5, "source is 5"),
        ([5], "source is 5"),
        ("", "source is ''"),
        (["demo", ""], "source is ''"),
        ([], "no source"),
        (lambda: 5, "returned 5"),
        (lambda: "text", "returned 'text'"),
        ("fineweb-shards:0", "fineweb-shards:0"),
        ("fineweb-shards:-1", "fineweb-shards:-1"),
        ("fineweb-shards:x", "fineweb-shards:x"),
    ],
)
def test_what_is_no_source(tmp_path, source, what):
    assert what in refusal(source, tmp_path / "data", "bytes")
    assert not (tmp_path / "data").exists()


def test_no_folder_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "out is ''" in refusal("poems", "", "bytes")
    assert "out is None" in refusal("poems", None, "bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_folder_without_one_is_not_gpt2(tmp_path):
    make(tmp_path, ["hello"])
    for name in ("tokenizer.json", "manifest.json"):
        (tmp_path / "data" / name).unlink()
    message = refusal("poems", tmp_path / "new", tmp_path / "data")
    assert "no tokenizer at" in message and str(tmp_path / "data") in message


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"train_tokenizer": 300}])
def test_a_corpus_of_empty_documents(tmp_path, options):
    source = write_records(tmp_path / "a.jsonl", ["", " ", "\n"])
    message = refusal(source, tmp_path / "new" / "deep" / "data", **options)
    assert "text" in message
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", ["missing.txt", "picture.png", "nowhere/"])
def test_sources_that_are_not_there(tmp_path, name):
    (tmp_path / "picture.png").touch()
    assert str(tmp_path / name) in refusal(str(tmp_path / name), tmp_path / "data", "bytes")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"train_tokenizer": 300}])
def test_a_failure_before_anything_is_done_leaves_nothing(tmp_path, options):
    source = write_records(tmp_path / "a.jsonl", make_documents(60))
    with source.open("a", encoding="utf-8") as file:
        file.write('{"text": "cut')
    message = refusal(source, tmp_path / "data", val_tokens=50, shard_tokens=1000, **options)
    assert message.startswith(f"{source}:61 is not JSON") and "kept" not in message
    assert list(tmp_path.iterdir()) == [source]


# What is done is kept: hours of work are worth more than a folder that looks untouched

SMALL = {"val_tokens": 50, "shard_tokens": 1000}


@pytest.fixture
def small_batches(monkeypatch):
    """Batches so small that work is done before a failure comes."""
    monkeypatch.setattr(sys.modules[prepare.__module__], "BATCH_CHARS", 5000)


def damage(source: Path, line: int) -> None:
    lines = source.read_text("utf-8").splitlines()
    lines[line] = '{"text": "cut'
    source.write_text("\n".join(lines), "utf-8")


def same_as_undisturbed(tmp_path: Path, source: Path, **options) -> bool:
    prepare(source, tmp_path / "undisturbed", "bytes", **SMALL, **options)
    return contents(tmp_path / "undisturbed") == contents(tmp_path / "data")


@pytest.mark.parametrize("options", [{}, {"drop_duplicates": "exact"}, {"workers": 2}])
@pytest.mark.parametrize("mend", ["a line", "the rest"])
def test_a_damaged_source_is_mended_and_the_same_command_goes_on(
    tmp_path, capsys, small_batches, options, mend
):
    texts = [f"{n} {text}" for n, text in enumerate(make_documents(300))]
    source = write_records(tmp_path / "a.jsonl", texts)
    damage(source, 250)
    message = refusal(source, tmp_path / "data", "bytes", **SMALL, **options)
    assert message.startswith(f"{source}:251 is not JSON") and "is kept" in message
    assert contents(tmp_path / "data" / ".partial").keys() >= {"journal.json"}
    write_records(source, texts if mend == "a line" else texts[:250])
    prepare(source, tmp_path / "data", "bytes", **SMALL, **options)
    assert "Going on after" in capsys.readouterr().err
    assert same_as_undisturbed(tmp_path, source, **options)


def test_a_source_changed_before_the_place_is_not_gone_on_with(tmp_path, capsys, small_batches):
    texts = make_documents(300)
    source = write_records(tmp_path / "a.jsonl", texts)
    damage(source, 250)
    refusal(source, tmp_path / "data", "bytes", **SMALL)
    for _ in range(2):  # nor the second time
        write_records(source, ["another", *texts[1:]])
        message = refusal(source, tmp_path / "data", "bytes", **SMALL)
        assert "the source was changed before the place" in message and ".partial" in message
    write_records(source, texts)
    prepare(source, tmp_path / "data", "bytes", **SMALL)
    assert same_as_undisturbed(tmp_path, source)


def test_another_tokenizer_file_does_not_go_on(tmp_path, small_batches):
    file = prepare("poems", tmp_path / "own", train_tokenizer=300) and tmp_path / "own"
    source = write_records(tmp_path / "a.jsonl", make_documents(300))
    damage(source, 250)
    refusal(source, tmp_path / "data", file, **SMALL)
    load_tokenizer("bytes").save(file)
    assert "tokenizer_sample" in refusal(source, tmp_path / "data", file, **SMALL)


def test_a_worker_that_dies_is_one_line_and_the_work_is_kept(
    tmp_path, monkeypatch, capsys, small_batches
):
    source = write_records(tmp_path / "a.jsonl", make_documents(300))
    whole, calls = encode._Worker.encode, []

    def killed(worker, texts, continues):
        calls.append(worker)
        if len(calls) == 12:
            worker._process.kill()
            worker._process.wait()
        return whole(worker, texts, continues)

    argv = ["prepare", str(source), "--out", str(tmp_path / "data"), "--tokenizer", "bytes"]
    argv += ["--val-tokens", "50", "--shard-tokens", "1000", "--workers", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(encode._Worker, "encode", killed)
        assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: an encoding worker ended with code -9 (killed")
    assert "fewer --workers" in line and "is kept" in line
    assert main([*argv[:-1], "1"]) == 0
    assert "Going on after" in capsys.readouterr().err
    assert same_as_undisturbed(tmp_path, source)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), PermissionError(13, "no")])
def test_any_other_error_keeps_the_work(tmp_path, monkeypatch, small_batches, error):
    texts = make_documents(300)

    def broken():
        yield from texts[:200]
        raise error

    broken.__qualname__ = "texts"
    with pytest.raises((type(error), UserError)):
        prepare(broken, tmp_path / "data", "bytes", **SMALL)
    assert json.loads((tmp_path / "data" / ".partial" / "journal.json").read_text())["num_tokens"]

    def mended():
        yield from texts

    mended.__qualname__ = "texts"
    prepare(mended, tmp_path / "data", "bytes", **SMALL)
    assert documents(tmp_path / "data") == texts


@pytest.mark.parametrize("name", ["train_000000.bin", "val_000000.bin", "open", "journal.json"])
def test_damaged_unfinished_work_is_noticed(tmp_path, small_batches, name):
    source = write_records(tmp_path / "a.jsonl", make_documents(300))
    damage(source, 250)
    refusal(source, tmp_path / "data", "bytes", **SMALL)
    partial = tmp_path / "data" / ".partial"
    path = next(partial.glob("train_*.tmp")) if name == "open" else partial / name
    content = bytearray(path.read_bytes())
    content[1030 if name != "journal.json" else 0] ^= 1
    path.write_bytes(content)
    message = refusal(source, tmp_path / "data", "bytes", **SMALL)
    assert "damaged" in message and str(partial) in message
    assert name == "journal.json" or not partial.exists()


def test_two_at_once_in_one_folder(tmp_path, run_python):
    """The second is refused at once; a kill leaves no lock."""
    args = ["-m", "nanogpt_tpu", "prepare", "poems", "--out", "data", "--tokenizer", "bytes"]
    code = (
        "import time; from nanogpt_tpu import prepare\n"
        "def slow():\n yield 'text'; print('begun', flush=True); time.sleep(100)\n"
        "prepare(slow, 'data', 'bytes')"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert first.stdout is not None and first.stdout.readline() == b"begun\n"
    second = run_python(*args)
    first.kill()
    first.communicate()
    assert (second.returncode, second.stderr.count("\n")) == (2, 1)
    assert "another process is at work in data" in second.stderr
    (tmp_path / "data" / ".partial" / "journal.json").unlink()
    third = run_python(*args)
    assert third.returncode == 0, third.stderr
    assert sorted(contents(tmp_path / "data")) == [
        "manifest.json", "tokenizer.json", "train_000000.bin", "val_000000.bin"
    ]  # fmt: skip


def test_a_failure_leaves_other_files_of_the_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine", "utf-8")
    assert "not JSON" in refusal(write_bad(tmp_path), folder, "bytes")
    assert contents(folder) == {"notes.txt": b"mine"}


def write_bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.jsonl"
    path.write_text("{", "utf-8")
    return path


def test_a_full_disk_leaves_nothing(run_python, tmp_path):
    resource = pytest.importorskip("resource")
    write_records(tmp_path / "a.jsonl", make_documents(100))
    done = run_python(
        *("-m", "nanogpt_tpu", "prepare", "a.jsonl", "--tokenizer", "bytes", "--out", "data"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 2
    assert done.stderr == "error: data folder data cannot be written (File too large)\n"
    assert not (tmp_path / "data").exists()


# The data folder


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "data").write_text("mine", "utf-8")
    with pytest.raises(UserError, match=r"data folder .*data cannot be written"):
        make(tmp_path, ["hello"], train_tokenizer=300)
    assert (tmp_path / "data").read_text("utf-8") == "mine"


def test_the_same_call_again_makes_nothing(tmp_path, capsys):
    first = make(tmp_path, make_documents(5))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()}
    assert make(tmp_path, make_documents(5)) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()} == before
    assert "nothing to do" in capsys.readouterr().err


def test_other_data_is_never_replaced(tmp_path):
    make(tmp_path, make_documents(5), val_tokens=100)
    before = contents(tmp_path / "data")
    source = tmp_path / "source.jsonl"
    for options, parts in (
        ({"val_tokens": 200}, ["val_tokens 100", "200"]),
        ({"val_tokens": 100, "train_tokenizer": 300}, ["'bytes'", "None"]),
        ({"val_tokens": 100, "max_tokens": 9}, ["max_tokens None", "9"]),
    ):
        message = refusal(source, tmp_path / "data", "bytes", **options)
        assert all(part in message for part in [*parts, "choose another --out"]), message
    other = write_records(tmp_path / "other.jsonl", ["x"])
    assert "source.jsonl" in refusal(other, tmp_path / "data", "bytes", val_tokens=100)
    assert contents(tmp_path / "data") == before


def test_a_source_that_has_grown_is_not_taken_for_the_old_one(tmp_path):
    make(tmp_path, ["hello"])
    with pytest.raises(UserError, match="source_bytes 18, now it is 36"):
        make(tmp_path, ["hello", "hello"])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_what_was_changed_is_not_taken_for_done(tmp_path):
    make(tmp_path, make_documents(5))
    data, merged = tmp_path / "data", tmp_path / "merged"
    flip(data / "train_000000.bin")
    for use in (lambda: make(tmp_path, make_documents(5)), lambda: merge([data], merged)):
        with pytest.raises(UserError, match=r"train_000000\.bin differs .*prepare the data again"):
            use()
    flip(data / "train_000000.bin")
    (data / "tokenizer.json").unlink()
    for use in (lambda: make(tmp_path, make_documents(5)), lambda: merge([data], merged)):
        with pytest.raises(UserError, match=r"no tokenizer at .*data.* prepare the data again"):
            use()
    train_tokenizer(["low lower lowest"], 260).save(data)
    for use in (lambda: make(tmp_path, make_documents(5)), lambda: merge([data], merged)):
        with pytest.raises(UserError, match=r"is not the tokenizer that made these shards"):
            use()
    assert not merged.exists()


def test_a_lost_shard_is_not_taken_for_done(tmp_path):
    make(tmp_path, make_documents(5))
    (tmp_path / "data" / "train_000000.bin").unlink()
    with pytest.raises(UserError, match=r"train_000000\.bin is missing: .*delete its folder"):
        make(tmp_path, make_documents(5))


def test_shards_without_a_manifest_are_not_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train_000000.bin").write_bytes(b"another program's")
    with pytest.raises(UserError, match="holds shards of something else"):
        make(tmp_path, ["hello"])
    assert contents(tmp_path / "data") == {"train_000000.bin": b"another program's"}


def test_what_a_killed_run_left_is_cleared(tmp_path):
    leftover = tmp_path / "data" / ".partial"
    leftover.mkdir(parents=True)
    (leftover / "train_000007.bin").write_bytes(b"half")
    make(tmp_path, ["hello"])
    assert contents(tmp_path / "data").keys() == {
        "manifest.json",
        "tokenizer.json",
        "train_000000.bin",
    }


def test_other_text_of_the_same_size_is_not_taken_for_the_old_one(tmp_path):
    make(tmp_path, ["hello"])
    with pytest.raises(UserError, match="source_sample"):
        make(tmp_path, ["jello"])
