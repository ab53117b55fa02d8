"""Text to ids and back, whatever the text; files that hold a tokenizer, and files that do not."""

import json
import random
import sys
import time
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from conftest import make_documents

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.tokenizer import (
    EOT_TEXT,
    Tokenizer,
    clean_text,
    load_tokenizer,
    train_tokenizer,
)

SONG = [f"第{number}句 床前明月光。疑是地上霜。举头望明月。低头思故乡。" for number in range(20)]


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return train_tokenizer([*make_documents(20), *[f"a {EOT_TEXT} b"] * 50], 300)


@pytest.fixture(scope="session")
def gpt2(gpt2_files) -> Tokenizer:
    return load_tokenizer("gpt2")


@pytest.fixture(
    scope="session",
    params=["bytes", "bpe", "gpt2", "bytes saved", "bpe saved", "gpt2 saved"],
)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """Each kind, as made and as read back from its file."""
    kind, _, saved = request.param.partition(" ")
    made = load_tokenizer("bytes") if kind == "bytes" else request.getfixturevalue(kind)
    return load_tokenizer(made.save(tmp_path_factory.mktemp("saved"))) if saved else made


def random_text(seed: int, length: int = 200) -> str:
    """Characters of all planes: controls, Latin, Chinese, emoji, unassigned; no surrogates."""
    rng = random.Random(seed)
    ranges = [(0, 0x20), (0x20, 0x7F), (0x7F, 0x250), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    ranges += [(0x2000, 0x2070), (0xE000, 0x10000), (0x10000, sys.maxunicode + 1)]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(length))


TEXTS = [
    "",
    " ",
    "Hello, world!  Two  spaces\tand\n\n\nlines\r end",
    "你好。世界 😀 👩‍👩‍👧 e\u0301 \u200f\u202eabc",
    "\x00\x01\x7f\x80\u0085\u2028\u2029\ufffd\ufffe\uffff\U0010ffff",
    f"x{EOT_TEXT}y {EOT_TEXT}{EOT_TEXT}",
    "I'll we've 'twas 1234567 ... ###\n    def f():\n\treturn None",
    *[random_text(seed) for seed in range(30)],
]


def test_any_text_round_trips(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == clean_text(text)
        assert tokenizer.encode(text) == ids
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert tokenizer.eot_id not in ids


def test_token_lengths_add_up_to_the_text(tokenizer):
    lengths = tokenizer.token_num_bytes()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokenizer.eot_id] == 0
    for text in TEXTS:
        assert lengths[tokenizer.encode(text)].sum() == len(clean_text(text).encode())


def test_end_of_text_is_one_id_that_decodes_to_nothing(tokenizer):
    ids = [tokenizer.eot_id, *tokenizer.encode("one"), tokenizer.eot_id, *tokenizer.encode("two")]
    assert tokenizer.decode(ids) == "onetwo"


def test_ids_outside_the_vocabulary(tokenizer):
    for token in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(UserError, match=f"{token} is outside the vocabulary of"):
            tokenizer.decode([token])


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\ufeffone\ufefftwo", "one\ufefftwo"),
        ("a\r\nb\rc\n\r\n", "a\nb\rc\n\n"),
        ("ab\ud83dcd", "ab\ufffdcd"),
        ("\udc00", "\ufffd"),
        ("e\u0301 \u00e9 \ufb01", "e\u0301 \u00e9 \ufb01"),
    ],
)
def test_cleaning(tokenizer, text, cleaned):
    assert clean_text(text) == cleaned
    assert tokenizer.decode(tokenizer.encode(text)) == cleaned


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eot_id) == ("bytes", 257, 256)
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    assert tokenizer.encode("a世") == [0x61, 0xE4, 0xB8, 0x96]
    assert tokenizer.decode([0xE4, 0xB8, 0x96, 0x61, 0xE4]) == "世a\ufffd"


def test_training_stops_when_the_text_has_no_more_pairs(tmp_path):
    tokenizer = train_tokenizer(["low lower"], 5000)
    assert 257 < tokenizer.vocab_size < 300
    assert tokenizer.describe()["vocab_size"] == tokenizer.vocab_size
    assert load_tokenizer(tokenizer.save(tmp_path)).vocab_size == tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode("never 见过 😀")) == "never 见过 😀"


@pytest.mark.parametrize("texts", [["hello"], ["a"]])
def test_the_smallest_vocabulary_is_a_bpe_without_merges(tmp_path, texts):
    tokenizer = train_tokenizer(texts, 257)
    assert (tokenizer.kind, tokenizer.vocab_size) == ("bpe", 257)
    again = load_tokenizer(tokenizer.save(tmp_path))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == clean_text(text)
        assert again.encode(text) == tokenizer.encode(text)


def test_training_on_a_chinese_song():
    tokenizer = train_tokenizer(SONG, 320)
    assert (tokenizer.kind, tokenizer.vocab_size) == ("bpe", 320)
    assert len(tokenizer.encode(SONG[0])) < len(SONG[0].encode()) / 2
    assert tokenizer.decode(tokenizer.encode("没见过的字 😀")) == "没见过的字 😀"


@pytest.mark.parametrize("run", ["a", "好", " ", "ab1"])
def test_training_on_long_runs_takes_no_longer_than_on_words(run):
    """Time with the square of a run's length would be over half a minute."""
    start = time.monotonic()
    tokenizer = train_tokenizer([f"so{run * 200_000}"], 300)
    assert time.monotonic() - start < 10
    assert tokenizer.decode(tokenizer.encode(run * 9)) == run * 9


@pytest.mark.parametrize("size", [50, 256, 0, -1, 10**9])
def test_vocabularies_out_of_range(size):
    with pytest.raises(UserError, match=rf"vocabulary of {size} .*257 .*1048576"):
        train_tokenizer(SONG, size)


@pytest.mark.parametrize("texts", [[], [""], ["", " \n"]])
def test_nothing_to_train_on(texts):
    with pytest.raises(UserError, match="no text to train"):
        train_tokenizer(texts, 300)


def test_identity(bpe, gpt2, tmp_path):
    assert train_tokenizer([*make_documents(20), *[f"a {EOT_TEXT} b"] * 50], 300).sha256 == (
        bpe.sha256
    )
    others = [
        load_tokenizer("bytes"),
        bpe,
        gpt2,
        train_tokenizer(SONG, 300),
        train_tokenizer(SONG, 301),
    ]
    assert len({tokenizer.sha256 for tokenizer in others}) == len(others)
    for tokenizer in others:
        again = load_tokenizer(tokenizer.save(tmp_path).parent)
        assert again.describe() == tokenizer.describe()


def test_gpt2_is_gpt2(gpt2):
    assert (gpt2.kind, gpt2.vocab_size, gpt2.eot_id) == ("gpt2", 50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]


def test_saved_gpt2_gives_tiktokens_ids(gpt2, tmp_path):
    saved = load_tokenizer(gpt2.save(tmp_path))
    assert saved.kind == "gpt2"
    encoding = tiktoken.get_encoding("gpt2")
    texts = [*TEXTS, *make_documents(10), Path(__file__).read_text("utf-8"), "a" * 5000, " " * 500]
    for text in map(clean_text, texts):
        assert saved.encode(text) == encoding.encode_ordinary(text) == gpt2.encode(text)


def test_gpt2_as_others_write_its_file(gpt2, tmp_path):
    """With what would cut, pad or extend every text, and with older forms of the same content."""
    content = json.loads(gpt2.save(tmp_path).read_text("utf-8"))
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": EOT_TEXT, "type_id": 0}}],
        "pair": [],
        "special_tokens": {EOT_TEXT: {"id": EOT_TEXT, "ids": [50256], "tokens": [EOT_TEXT]}},
    }
    content["model"]["vocab"][EOT_TEXT] = 50256
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["model"]["dropout"] = 0.5
    content["added_tokens"][0].update(normalized=True, special=False)
    (tmp_path / "other.json").write_text(json.dumps(content), "utf-8")
    other = load_tokenizer(tmp_path / "other.json")
    assert other.describe() == gpt2.describe()
    for text in TEXTS:
        assert other.encode(text) == gpt2.encode(text)


def test_added_tokens_are_ordinary_text(bpe, tmp_path):
    path = bpe.save(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(path))
    core.add_tokens(["a tool"])
    core.add_special_tokens(["<|思考|>"])
    core.save(str(path))
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == bpe.vocab_size + 2
    text = "use a tool <|思考|> now"
    assert tokenizer.encode(text) == bpe.encode(text)
    assert tokenizer.decode([bpe.vocab_size, bpe.vocab_size + 1]) == "a tool<|思考|>"


def _edit(content: dict, **changes: object) -> dict:
    """`content` with "model.vocab"-like places replaced."""
    for place, value in changes.items():
        *parents, name = place.split("__")
        target = content
        for parent in parents:
            target = target[parent]
        target[name] = value
    return content


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"added_tokens": []}, EOT_TEXT),
        ({"normalizer": {"type": "NFC"}}, "normalizer"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"pre_tokenizer__add_prefix_space": True}, "pre_tokenizer"),
        ({"pre_tokenizer__use_regex": False}, "pre_tokenizer"),
        ({"pre_tokenizer": None}, "pre_tokenizer"),
        ({"model__ignore_merges": True}, "model"),
        ({"model__vocab": {"a": 0, "b": 1}, "model__merges": []}, "all 256 bytes"),
    ],
)
def test_tokenizers_of_another_kind(bpe, tmp_path, changes, why):
    path = bpe.save(tmp_path)
    path.write_text(json.dumps(_edit(json.loads(path.read_text("utf-8")), **changes)), "utf-8")
    with pytest.raises(UserError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value) and why in str(caught.value)
    assert "--train-tokenizer" in str(caught.value)


def test_ids_with_a_gap(bpe, tmp_path):
    path = bpe.save(tmp_path)
    content = json.loads(path.read_text("utf-8"))
    content["model"]["vocab"]["zzz"] = 1000
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(UserError, match="301 ids that are not 0 to 300"):
        load_tokenizer(path)


def test_word_piece(tmp_path):
    model = tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, EOT_TEXT: 2}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="no byte-level BPE"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"null", b'{"model": 3}', b"\xff\xfe", b'{"model": {}}']
)
def test_files_that_hold_no_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer at .*tokenizer\.json: give gpt2, bytes"):
        load_tokenizer(tmp_path)


def prepare_offline(run_python, cache: Path):
    """Stderr of `prepare` with GPT-2's vocabulary where nothing can be fetched."""
    (cache.parent / "a.txt").write_text("text", "utf-8")
    args = ("-m", "nanogpt_tpu", "prepare", cache.parent / "a.txt", "--out", "data")
    blocked = {"https_proxy": "http://127.0.0.1:9", "TIKTOKEN_CACHE_DIR": str(cache)}
    done = run_python(*args, env={**blocked, "HTTPS_PROXY": blocked["https_proxy"]})
    return done.returncode, done.stderr


@pytest.mark.parametrize("cut", ["vocab.bpe", "encoder.json", None])
def test_gpt2_without_network(run_python, gpt2_cache, tmp_path, cut):
    """No vocabulary files, or one of them cut in half as an interrupted download leaves it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    is_large = {"vocab.bpe": False, "encoder.json": True}
    for file in gpt2_cache.iterdir() if cut else ():
        content = file.read_bytes()
        damaged = is_large[cut] == (len(content) > 800_000)
        (cache / file.name).write_bytes(content[: len(content) // 2] if damaged else content)
    code, stderr = prepare_offline(run_python, cache)
    assert code == 2
    assert stderr.startswith("error: tokenizer 'gpt2': ") and stderr.count("\n") == 1
    assert cut or "vocab.bpe" in stderr
    assert str(cache) in stderr and any(file.name in stderr for file in gpt2_cache.iterdir())
    assert not (tmp_path / "data").exists()


def test_gpt2_with_its_files_needs_no_network(run_python, gpt2_cache, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for file in gpt2_cache.iterdir():
        (cache / file.name).write_bytes(file.read_bytes())
    code, stderr = prepare_offline(run_python, cache)
    assert code == 0, stderr
    assert load_tokenizer(tmp_path / "data").kind == "gpt2"
