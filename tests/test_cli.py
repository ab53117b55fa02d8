"""The command line: one line per mistake, JSON alone on stdout, signals, the whole way once."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

import nanogpt_tpu as ng
from nanogpt_tpu.cli import main

TINY = [
    "--preset",
    "tiny",
    "--device",
    "cpu",
    "--n-layer",
    "1",
    "--n-embd",
    "16",
    "--block-size",
    "8",
    "--tokens-per-step",
    "32",
    "--num-steps",
    "4",
    "--eval-every",
    "2",
    "--eval-tokens",
    "32",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data/ (bytes), other/ (own BPE) and run/ (four steps on data/)."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("some lines of text to learn from\n" * 200)
    text, data = str(folder / "text.txt"), str(folder / "data")
    assert main(["prepare", text, "--out", data, "--tokenizer", "bytes"]) == 0
    assert main(["prepare", text, "--out", str(folder / "other"), "--train-tokenizer", "280"]) == 0
    assert main(["train", *TINY, "--data", data, "--out", str(folder / "run")]) == 0
    return folder


def error_line(capsys, argv):
    """The single line that a mistaken command prints; exit code 2, nothing on stdout."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "pattern"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'"),
        (["train", *TINY, "--n-lyaer", "3"], "'--n-lyaer': did you mean '--n-layer'"),
        (["train", *TINY, "--n-layer", "three"], "--n-layer.*three"),
        (["train", "--preset", "dmeo"], "unknown preset 'dmeo': did you mean 'demo'"),
        (["train", *TINY, "--device", "tup"], "unknown device 'tup': did you mean 'tpu'"),
        (["train", *TINY, "--device", "xla-cpu"], "how many virtual devices, such as xla-cpu:8"),
        (["train", *TINY, "--device", "cuda"], "device 'cuda': PyTorch .* finds none"),
        (["train", *TINY, "--n-head", "3"], "n_embd 16 .* n_head 3: try n_embd 15"),
        (["train", *TINY, "--seq-len", "9"], "seq_len 9 is over the model's block_size 8"),
        (["train", *TINY, "--tokens-per-step", "60"], "60 is not .* multiple of 16 .*48 or 64"),
        (["train", *TINY, "--tokens-per-step", "0"], "0 is not .*nearest valid 16"),
        (["train", *TINY, "--tokens-per-step", "-16"], "-16 is not .*nearest valid 16"),
        (["train", *TINY, "--micro-batch-size", "0"], "micro_batch_size is 0"),
        (["train", *TINY, "--data", "PLACE/absent"], "no such folder"),
        (["train", *TINY, "--data", "PLACE"], "no shards"),
        (["train", *TINY, "--out", "PLACE/text.txt/run"], "not a writable folder"),
        (["train", *TINY, "--data", "PLACE/other", "--out", "PLACE/run"], "tokenizer is .* there"),
        (["train", "--config", "PLACE/absent.json"], "cannot be read"),
        (["prepare", "PLACE/absent.txt", "--out", "NEW"], "nothing there"),
        (["prepare", "PLACE/text.txt", "--out", "NEW", "--tokenizer", "PLACE"], "no tokenizer at"),
        (["prepare", "PLACE/text.txt", "--out", "PLACE/text.txt"], "cannot be written"),
        (["prepare", "PLACE/text.txt", "--out", "NEW", "--train-tokenizer", "50"], "from 257"),
        (["inspect", "PLACE"], "no shards"),
        (["sample", "PLACE/data"], "no checkpoint in or below"),
        (["sample", "PLACE/run", "--temperature", "-1"], "temperature is -1"),
        (["sample", "PLACE/run", "--temperature", "nan"], "temperature is nan"),
        (["sample", "PLACE/run", "--top-k", "0"], "top_k is 0"),
        (["eval", "PLACE/run", "--data", "PLACE/other"], "vocabulary of 257, .* one of"),
        (["report", "PLACE/data"], "no metrics.jsonl"),
        ([], "COMMAND"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing(place, tmp_path, capsys, argv, pattern):
    argv = [
        part.replace("PLACE", str(place)).replace("NEW", str(tmp_path / "new")) for part in argv
    ]
    if argv[:1] == ["train"]:  # later flags win, so a case may still set its own
        argv[1:1] = ["--data", str(place / "data"), "--out", str(tmp_path / "new")]
    before = sorted(place.rglob("*"))
    assert re.search(pattern, error_line(capsys, argv))
    assert list(tmp_path.iterdir()) == []
    assert sorted(place.rglob("*")) == before


def json_of(capsys, argv):
    capsys.readouterr()
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_all_there_is_on_stdout(place, tmp_path, capsys):
    run = str(place / "run")
    trained = json_of(
        capsys, ["train", *TINY, "--data", str(place / "data"), "--out", str(tmp_path), "--json"]
    )
    assert trained.keys() == {"run", "step", "val_loss", "stopped_because"}
    assert (trained["step"], trained["stopped_because"]) == (4, "done")
    drawn = json_of(
        capsys,
        ["sample", run, "--prompt", "so", "--num-samples", "2", "--max-new-tokens", "5", "--json"],
    )
    assert drawn.keys() == {"samples", "tokens_per_s"}
    for one in drawn["samples"]:
        assert one.keys() == {"text", "tokens", "finish_reason"}
        assert one["text"].startswith("so")
    scores = json_of(capsys, ["eval", run, "--data", str(place / "data"), "--json"])
    assert scores.keys() == {"val_loss", "perplexity", "bits_per_byte", "num_tokens"}
    found = json_of(capsys, ["inspect", str(place / "data"), "--json"])
    assert found["problems"] == []
    assert found["num_documents"] == 1


def test_every_field_is_a_flag_and_none_means_off(place, tmp_path):
    argv = ["train", *TINY, "--data", str(place / "data"), "--out", str(tmp_path / "run")]
    flags = ["--grad-clip", "none", "--qk-norm", "--no-bias", "--learning-rate", "1e-2"]
    assert main([*argv, *flags, "--num-steps", "1e0", "--eval-every", "none"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["grad_clip"] is None
    assert config["eval_every"] is None
    assert (config["model"]["qk_norm"], config["model"]["bias"]) == (True, False)
    assert (config["learning_rate"], config["num_steps"]) == (0.01, 1)


def test_a_run_can_be_run_again_from_its_config(place, tmp_path):
    config = str(place / "run" / "config.json")
    assert main(["train", "--config", config, "--out", str(tmp_path / "again")]) == 0

    def losses(run):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("loss") for line in lines]

    assert losses(tmp_path / "again") == losses(place / "run")


def test_damaged_data_is_found_and_is_no_success(place, tmp_path, capsys):
    import shutil

    shutil.copytree(place / "data", tmp_path / "data")
    shard = tmp_path / "data" / "train_000000.bin"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["inspect", str(tmp_path / "data")]) == 1
    assert "differs from its sha256" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(place, tmp_path, number):
    out = tmp_path / "run"
    argv = [sys.executable, "-m", "nanogpt_tpu", "train", *TINY, "--num-steps", "100000"]
    argv += ["--json"]
    argv += ["--data", str(place / "data"), "--out", str(out), "--checkpoint-every", "none"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while (
        not (out / "metrics.jsonl").exists()
        or "tokens_per_s" not in (out / "metrics.jsonl").read_text()
    ):
        assert process.poll() is None, process.stderr.read()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    result = json.loads(stdout)
    assert result["stopped_because"] == "signal"
    assert ng.load_checkpoint(out)[2]["step"] == result["step"] > 0


def test_it_speaks_utf8_where_the_locale_does_not(place):
    environ = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    argv = [
        sys.executable,
        "-m",
        "nanogpt_tpu",
        "sample",
        str(place / "run"),
        "--prompt",
        "你好 😀",
    ]
    done = subprocess.run(
        [*argv, "--max-new-tokens", "3", "--device", "cpu"], env=environ, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert "你好 😀" in done.stdout.decode("utf-8")


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for command in ("demo", "prepare", "inspect", "train", "sample", "eval", "report"):
        assert command in text
