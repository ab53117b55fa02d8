"""The whole product in about two minutes: text, training with an interruption, samples, a picture.

Trains the `demo` preset on the documentation that every Python carries, stops half-way as if a
session had ended, resumes, and shows what the model learned. Needs no network.
"""

import math
import re
import shutil
from pathlib import Path
from typing import Any

from nanogpt_tpu import env
from nanogpt_tpu.checkpoint import find_checkpoints
from nanogpt_tpu.config import TrainConfig, preset
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.load import load_checkpoint
from nanogpt_tpu.metrics import read_metrics
from nanogpt_tpu.prepare import prepare
from nanogpt_tpu.report import report
from nanogpt_tpu.sample import sample
from nanogpt_tpu.sources import demo_documents
from nanogpt_tpu.train import TrainResult, train

VOCAB_SIZE = 4096
PROMPTS = ("", "The function returns", "A class is")
_WORD = re.compile(r"[A-Za-z]{2,}")


def demo(out: Path | None, device: str) -> dict[str, Any]:
    """Run the demo in folder `out` (data/ and run/ in it); a finished earlier one is replaced.

    Returns what `train --json` does, and the figures that are printed.

    Raises:
        UserError: `out` holds something else, or cannot be written.
    """
    folder = out or env.working_dir() / "runs" / "demo"
    config = preset("demo", data=str(folder / "data"), out=str(folder / "run"), device=device)
    _clear_finished(folder / "run", config)
    print(
        f"1/4  Text to tokens: the documentation inside this Python, an own BPE of {VOCAB_SIZE:,}"
    )
    manifest = prepare("demo", folder / "data", train_tokenizer=VOCAB_SIZE)
    print(
        f"     {manifest.num_documents:,} documents: {manifest.num_tokens('train'):,} training and "
        f"{manifest.num_tokens('val'):,} validation tokens"
    )
    half = config.num_steps // 2
    print(f"2/4  Training; it will stop at step {half}, as if the session had ended there")
    train(config.replace(stop_after_step=half))
    print("3/4  A new session: the same call resumes where the last one stopped")
    result = train(config)
    print("4/4  What it writes now (4 million parameters, two minutes: some grammar, no sense)")
    texts, share = _write_samples(folder / "run")
    scores = _scores(folder / "run")
    print(
        f"\nValidation loss {scores['first_val_loss']:.2f} -> {scores['val_loss']:.2f} nats a token"
        f" (guessing among {VOCAB_SIZE:,} ids: {math.log(VOCAB_SIZE):.2f}); "
        f"{scores['bits_per_byte']:.2f} bits a byte\n"
        f"{share:.0%} of the words it wrote occur in its training text\n"
        f"Run card: {report(folder / 'run')}\n\n"
        f"Next:\n"
        f"  nanogpt-tpu sample {folder / 'run'} --prompt 'The list'\n"
        f"  nanogpt-tpu prepare my.txt --out data --train-tokenizer 4096    # your own text\n"
        f"  nanogpt-tpu train --preset demo --data data --out runs/mine"
    )
    return {**_summary(result), **scores, "known_words_share": share, "samples": texts}


def _clear_finished(run_dir: Path, config: TrainConfig) -> None:
    """Remove a finished demo, so that this one trains; leave an interrupted one to go on."""
    if not run_dir.exists():
        return
    checkpoints = find_checkpoints(run_dir)
    if any(c.state["config"].get("preset") != "demo" for c in checkpoints):
        raise UserError(f"{run_dir} holds a run that is no demo: choose another --out")
    if checkpoints and checkpoints[0].step >= config.num_steps:
        print(f"Replacing the finished demo in {run_dir}")
        shutil.rmtree(run_dir)


def _write_samples(run_dir: Path) -> tuple[list[str], float]:
    """Three printed samples, and the share of their words that the training text has."""
    model, tokenizer, _ = load_checkpoint(run_dir)
    texts, words = [], []
    for number, prompt in enumerate(PROMPTS):
        drawn, _ = sample(
            model, tokenizer, prompt, max_new_tokens=48, temperature=0.7, top_k=40, seed=number
        )
        texts.append(drawn[0].text)
        words += _WORD.findall(tokenizer.decode(drawn[0].tokens))
        lines = "\n".join(f"     | {line}" for line in drawn[0].text.strip().splitlines())
        print(f"     {prompt!r} continued:\n{lines}" if prompt else f"     a new text:\n{lines}")
    known = {word for text in demo_documents() for word in _WORD.findall(text)}
    return texts, sum(word in known for word in words) / max(1, len(words))


def _scores(run_dir: Path) -> dict[str, float]:
    """First and last evaluation in the run's metrics."""
    evaluations = [record for record in read_metrics(run_dir) if "val_loss" in record]
    return {
        "first_val_loss": evaluations[0]["val_loss"],
        "val_loss": evaluations[-1]["val_loss"],
        "bits_per_byte": evaluations[-1]["bits_per_byte"],
    }


def _summary(result: TrainResult) -> dict[str, Any]:
    return {
        "run": str(result.run_dir),
        "step": result.step,
        "stopped_because": result.stopped_because,
    }
