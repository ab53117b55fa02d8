"""Documents to shards: what is in them, and that a failure leaves nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import make_documents

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.inspection import inspect
from nanogpt_tpu.prepare import prepare
from nanogpt_tpu.shards import Manifest, read_shard
from nanogpt_tpu.tokenizer import EOT_TEXT, load_tokenizer

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
def test_a_failure_half_way_leaves_nothing(tmp_path, options):
    """Shards were already full when the bad line came."""
    source = write_records(tmp_path / "a.jsonl", make_documents(600))
    with source.open("a", encoding="utf-8") as file:
        file.write('{"text": "cut')
    message = refusal(source, tmp_path / "data", val_tokens=50, shard_tokens=1000, **options)
    assert message.startswith(f"{source}:601 is not JSON")
    assert list(tmp_path.iterdir()) == [source]


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
