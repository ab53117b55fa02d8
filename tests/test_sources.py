"""Documents out of files: which files, which text, and what is said about damaged text."""

import hashlib
import json
from pathlib import Path

import pytest

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.sources import Reader


def read(*sources: object, **options) -> list[str]:
    return list(Reader(tuple(map(str, sources)), **options))


def refusal(*sources: object) -> str:
    with pytest.raises(UserError) as caught:
        read(*sources)
    return str(caught.value)


def write_lines(path: Path, *records: object) -> Path:
    """A JSONL file; strings are written as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path


def test_files_folders_and_globs_in_a_fixed_order(tmp_path):
    (tmp_path / "b" / "deep.md").mkdir(parents=True)
    for name in ("a.txt", "b/c.md", "b/deep.md/d.txt", "b/picture.png"):
        (tmp_path / name).write_text(name, "utf-8")
    write_lines(tmp_path / "e.jsonl", {"text": "e1"}, {"text": "e2"})
    assert read(tmp_path) == ["a.txt", "b/c.md", "b/deep.md/d.txt", "e1", "e2"]
    assert read(tmp_path / "e.jsonl", tmp_path / "a.txt") == ["e1", "e2", "a.txt"]
    assert read(tmp_path / "**" / "*.txt") == ["a.txt", "b/deep.md/d.txt"]
    assert read(tmp_path / "?.jsonl") == ["e1", "e2"]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "song [1].txt").write_text("this one", "utf-8")
    (tmp_path / "song 1.txt").write_text("not this one", "utf-8")
    assert read(tmp_path / "song [1].txt") == ["this one"]


@pytest.mark.parametrize("name", ["missing.txt", "missing/", "*.txt", "picture.png", "empty"])
def test_sources_that_are_not_there(tmp_path, name):
    (tmp_path / "picture.png").touch()
    (tmp_path / "empty").mkdir()
    message = refusal(tmp_path / name)
    assert str(tmp_path / name) in message and ".txt .md .jsonl" in message


def test_no_source():
    assert "no source" in refusal()


def test_a_file_that_goes_away_while_it_is_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text", "utf-8")
    reader = Reader((str(path),))
    path.unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read \(No such file"):
        list(reader)


RECORDS = ({"text": "hello"}, {"text": "bye"})
EMPTY_RECORDS = ({"text": ""}, {"text": "  \n"}, {"text": None}, {"other": 1}, [], "", {"text": 5})


@pytest.mark.parametrize(
    "lines",
    [EMPTY_RECORDS + RECORDS, RECORDS + EMPTY_RECORDS, RECORDS[:1] + EMPTY_RECORDS + RECORDS[1:]],
)
def test_empty_records_are_skipped_and_counted_wherever_they_are(tmp_path, lines):
    reader = Reader((str(write_lines(tmp_path / "a.jsonl", *lines)),))
    for _ in range(2):  # counts start again with each reading
        assert list(reader) == ["hello", "bye"]
        assert reader.num_skipped == {"empty": 2, "no 'text'": 4, "blank line": 1}
    assert reader.warnings == []


def test_empty_files(tmp_path):
    for name, content in (("a", b""), ("b", b" \r\n"), ("c", b"\xef\xbb\xbf"), ("d", b"d")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    reader = Reader((str(tmp_path),))
    assert list(reader) == ["d"]
    assert reader.num_skipped == {"empty": 3}


def test_text_of_another_field(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "no", "lyrics": "yes"})
    assert read(path, text_field="lyrics") == ["yes"]


@pytest.mark.parametrize("line", ['{"text": "cut', "not json", "{'text': 'a'}", "[" * 100_000])
def test_malformed_lines_name_file_and_line(tmp_path, line):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, "", line, {"text": "two"})
    assert refusal(path).startswith(f"{path}:3 is not JSON")


def test_a_byte_order_mark_before_json(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert read(tmp_path / "a.jsonl") == ["one", "two"]


def test_half_a_surrogate_pair_is_reported(tmp_path):
    whole, half = '{"text":"\\ud83d\\ude00"}', '{"text":"ab\\ud83dcd"}'
    reader = Reader((str(write_lines(tmp_path / "a.jsonl", whole, half, half)),))
    assert list(reader) == ["😀", "ab\ud83dcd", "ab\ud83dcd"]
    (warning,) = reader.warnings
    assert warning.startswith(f"{tmp_path / 'a.jsonl'}: 2 piece(s)")
    assert "U+FFFD" in warning and warning.endswith("line 2")


def test_a_few_bad_bytes_become_replacement_marks_and_are_reported(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"plenty of good text \xff\xfe and more of it \xff, with \xef\xbf\xbd in it")
    reader = Reader((str(path),))
    assert list(reader) == [
        "plenty of good text \ufffd\ufffd and more of it \ufffd, with \ufffd in it"
    ]
    (warning,) = reader.warnings
    assert warning.startswith(f"{path}: 3 piece(s)") and "byte 20 (0xff)" in warning
    list(reader)
    assert reader.warnings == [warning]


def test_bad_bytes_in_a_json_line_are_placed_in_the_file(tmp_path):
    first = b'{"text": "good"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(first + b'{"text": "a longer line with one bad \xff byte"}\n')
    reader = Reader((str(path),))
    assert list(reader) == ["good", "a longer line with one bad \ufffd byte"]
    assert f"byte {len(first) + 37} (0xff)" in reader.warnings[0]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"ok\n\xff\xfe\n", "byte 3 (0xff)"),
        ("你好".encode("gbk"), "byte 0 (0xc4)"),
        ("春风又绿江南岸".encode("gbk"), "byte 0 (0xb4)"),
        ("a long page of plain English ".encode("utf-16") * 50, "iconv -f UTF-16"),
        (b"\xfe\xff" + ("a long page of plain English " * 50).encode("utf-16-be"), "UTF-16"),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_text_in_another_encoding_is_refused(tmp_path, content, place, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content if suffix == ".txt" else content.replace(b"\n", b" "))
    message = refusal(path)
    assert message.startswith(f"{path} is not UTF-8 text") and place in message
    assert "iconv" in message


def test_text_with_few_characters_of_its_own_is_not_taken_for_damaged(tmp_path):
    (tmp_path / "a.txt").write_text("\ufffd\ufffd", "utf-8")
    assert read(tmp_path) == ["\ufffd\ufffd"]


def test_demo_text(run_python):
    documents = read("demo")
    assert sum(len(text.encode()) for text in documents) > 1_500_000
    assert len(documents) == len(set(documents)) > 300
    assert not any("idlelib" in text for text in documents)
    assert all(text.strip() for text in documents)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    code = (
        "import hashlib; from nanogpt_tpu.sources import demo_documents; "
        "print(hashlib.sha256('\\0'.join(demo_documents()).encode()).hexdigest())"
    )
    assert run_python("-c", code, env={"PYTHONHASHSEED": "5"}).stdout.strip() == digest


def test_one_text_file_is_not_cut_into_parts(tmp_path):
    (tmp_path / "long.txt").write_text("some words\n" * 10)
    with pytest.raises(UserError, match=r"part 1/2: 1 file\(s\) cannot be cut"):
        Reader((str(tmp_path / "long.txt"),), part=(0, 2))
