"""The whole product in about two minutes: text, training with an interruption, samples, a picture.

Trains the `demo` preset on the documentation that every Python carries, stops half-way as if a
session had ended, resumes, and shows what the model learned. Needs no network.
"""

import math
import os
import re
import shutil
import sys
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
from nanogpt_tpu.runtime import Runtime
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
    Runtime(device, config.precision)  # a device that is not there is refused before any change
    step = _clear_finished(folder / "run", config)
    print(
        f"1/4  Text to tokens: the documentation inside this Python, an own BPE of {VOCAB_SIZE:,}"
    )
    manifest = prepare("demo", folder / "data", train_tokenizer=VOCAB_SIZE)
    print(
        f"     {manifest.num_documents:,} documents: {manifest.num_tokens('train'):,} training and "
        f"{manifest.num_tokens('val'):,} validation tokens"
    )
    half = config.num_steps // 2
    if step < half:
        print(f"2/4  Training; it will stop at step {half}, as if the session had ended there")
        result = train(config.replace(stop_after_step=half))
        if result.stopped_because != "step":
            return _interrupted(result)
    print("3/4  A new session: the same call resumes where the last one stopped")
    result = train(config)
    if result.stopped_because != "done":
        return _interrupted(result)
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
        f"  {_program()} sample {folder / 'run'} --prompt 'The list'\n"
        f"  {_program()} prepare my.txt --out data --train-tokenizer 4096    # your own text\n"
        f"  {_program()} train --preset demo --data data --out runs/mine"
    )
    return {**_summary(result), **scores, "known_words_share": share, "samples": texts}


def _program() -> str:
    """How to call us from this shell: by name, or where the environment is not active by path."""
    if shutil.which("nanogpt-tpu"):
        return "nanogpt-tpu"
    return os.path.relpath(Path(sys.executable).with_name("nanogpt-tpu"))


def _interrupted(result: TrainResult) -> dict[str, Any]:
    print("Interrupted and saved: the same command goes on from here.")
    return {**_summary(result), "val_loss": result.val_loss}


def _clear_finished(run_dir: Path, config: TrainConfig) -> int:
    """Remove a finished demo, so that this one trains; the step at which a started one stands."""
    checkpoints = find_checkpoints(run_dir)
    for checkpoint in checkpoints:
        saved = checkpoint.state["config"]
        if (saved.get("preset"), saved.get("num_steps")) != ("demo", config.num_steps):
            raise UserError(f"{run_dir} holds a run that is no demo: choose another --out")
    step = checkpoints[0].step if checkpoints else 0
    if step >= config.num_steps:
        print(f"Replacing the finished demo in {run_dir}")
        shutil.rmtree(run_dir)
        return 0
    return step


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
