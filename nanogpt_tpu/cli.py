"""The command line: `nanogpt-tpu`, flags over the Python functions and nothing more.

Every field of TrainConfig and ModelConfig is a flag of `train`. A user's mistake ends in one line
on stderr and exit code 2. With --json, stdout holds one JSON object and nothing else; what people
read goes to stderr then.
"""

import argparse
import contextlib
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from nanogpt_tpu import __version__, env
from nanogpt_tpu.config import ModelConfig, TrainConfig, preset
from nanogpt_tpu.errors import UserError, unknown_name

Values = dict[str, Any]


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are a line of ours instead of its usage text."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a bad result, 2 for a user's mistake."""
    for stream in (sys.stdout, sys.stderr):  # also where the locale is not UTF-8
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    parser, commands = _make_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        raise unknown_name("command", argv[0], commands)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = commands[args.command]._option_string_actions
        raise unknown_name("option", unknown[0].split("=")[0], known)
    # stdout belongs to the JSON object: whatever is printed for people moves to stderr
    redirect = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    with redirect:
        values = args.run(args)
    if args.json:
        print(json.dumps(values, ensure_ascii=False))
    return 1 if values.get("problems") or values.get("stopped_because") == "nan" else 0


def _make_parser() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser, and those of its commands by name."""
    parser = _Parser(prog="nanogpt-tpu", description="Train your own GPT from scratch.")
    parser.add_argument("--version", action="version", version=f"nanogpt-tpu {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands: dict[str, _Parser] = {}

    def command(name: str, run: Callable[[argparse.Namespace], Values], help: str) -> _Parser:
        sub = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        sub.set_defaults(run=run)
        commands[name] = sub
        return sub

    sub = command("demo", _demo, "built-in text to a trained, sampled model in about two minutes")
    sub.add_argument("--out", default=None, help="run folder (default: demo in runs/)")
    sub.add_argument("--device", default="auto", help="as for train")

    sub = command("prepare", _prepare, "documents to verified token shards")
    sub.add_argument("source", nargs="+", help="demo, or files, folders, globs: .txt .md .jsonl")
    sub.add_argument("--out", required=True, help="data folder to make")
    sub.add_argument("--tokenizer", default="gpt2", help="gpt2, bytes or a tokenizer.json")
    sub.add_argument("--train-tokenizer", type=_integer, metavar="VOCAB", help="train a BPE first")
    sub.add_argument("--val-tokens", type=_integer, default=1_048_576)
    sub.add_argument("--shard-tokens", type=_integer, default=100_000_000)
    sub.add_argument("--max-tokens", type=_integer)
    sub.add_argument("--text-field", default="text", help="field of a JSON line that has the text")

    sub = command("inspect", _inspect, "verify hashes and ids of a data folder")
    sub.add_argument("data")

    sub = command("train", _train, "train, or go on training")
    sub.add_argument("--config", help="config.json of an earlier run, to run it again")
    _add_fields(sub, TrainConfig)
    _add_fields(sub, ModelConfig)

    sub = command("sample", _sample, "let a trained model write")
    sub.add_argument("run_dir", metavar="RUN")
    sub.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    sub.add_argument("--num-samples", type=_integer, default=1)
    sub.add_argument("--max-new-tokens", type=_integer, default=128)
    sub.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    sub.add_argument("--top-k", type=_optional(_integer), default=50, help="none turns it off")
    sub.add_argument("--top-p", type=_optional(float), default=None)
    sub.add_argument("--seed", type=_integer, default=1337)
    sub.add_argument("--device", default="auto", help="as for train")

    sub = command("eval", _eval, "loss, perplexity and bits per byte of a trained model")
    sub.add_argument("run_dir", metavar="RUN")
    sub.add_argument("--data", required=True)
    sub.add_argument("--split", default="val", choices=("val", "train"))
    sub.add_argument("--max-tokens", type=_integer)
    sub.add_argument("--device", default="auto", help="as for train")

    sub = command("report", _report, "draw the loss curve of a run, also of one that died")
    sub.add_argument("run_dir", metavar="RUN")
    return parser, commands


def _integer(text: str) -> int:
    """A whole number; 1e9 and 1_000 too."""
    number = float(text)
    if number != int(number):
        raise ValueError(text)
    return int(text) if text.lstrip("+-").isdecimal() else int(number)


def _optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, or None for the word none."""

    def parse_or_none(text: str) -> Any:
        return None if text.lower() == "none" else parse(text)

    parse_or_none.__name__ = getattr(parse, "__name__", "value").lstrip("_")
    return parse_or_none


def _add_fields(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for every field of a config class; absent ones leave no attribute."""
    for name, hint in typing.get_type_hints(config).items():
        flag = "--" + name.replace("_", "-")
        options = typing.get_args(hint)
        kind = next((o for o in options if o is not types.NoneType), hint)
        parse: Callable[[str], Any] = {int: _integer, float: float, str: str}.get(kind, str)
        if kind is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=argparse.SUPPRESS)
        elif kind in (int, float, str):
            parse = _optional(parse) if types.NoneType in options else parse
            parser.add_argument(flag, type=parse, default=argparse.SUPPRESS)


def _demo(args: argparse.Namespace) -> Values:
    env.patch_tpu_env(args.device)  # before torch_xla or accelerate is imported
    from nanogpt_tpu.demo import demo

    return demo(Path(args.out) if args.out else None, args.device)


def _prepare(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.prepare import prepare

    manifest = prepare(
        args.source,
        args.out,
        args.tokenizer,
        train_tokenizer=args.train_tokenizer,
        val_tokens=args.val_tokens,
        shard_tokens=args.shard_tokens,
        max_tokens=args.max_tokens,
        text_field=args.text_field,
    )
    skipped = "".join(f", {n} skipped ({why})" for why, n in manifest.num_skipped.items())
    print(
        f"{args.out}: {manifest.num_documents:,} documents{skipped}; "
        f"{manifest.num_tokens('train'):,} training and {manifest.num_tokens('val'):,} validation "
        f"tokens; vocabulary {manifest.tokenizer['vocab_size']:,} ({manifest.tokenizer['kind']})"
    )
    print(f"Next: nanogpt-tpu train --preset demo --data {args.out} --out RUN")
    return manifest.to_dict()


def _inspect(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.inspection import inspect

    found = inspect(args.data)
    for split, count in found["num_tokens"].items():
        print(f"{split}: {count:,} tokens in {len(found['splits'][split])} shard(s)")
    print(f"{found['num_documents']:,} documents, {found['num_eot']:,} end-of-text ids")
    for problem in found["problems"]:
        print(f"problem: {problem}")
    if not found["problems"]:
        print("Every hash, length and id is right.")
    return found


def _train(args: argparse.Namespace) -> Values:
    given = vars(args)
    names = (*typing.get_type_hints(TrainConfig), *typing.get_type_hints(ModelConfig))
    changes = {name: given[name] for name in names if name in given}
    if args.config is None:
        config = preset(changes.pop("preset", "gpt2"), **changes)
    else:
        config = _read_config(Path(args.config)).replace(**changes)
    env.patch_tpu_env(config.device)  # before torch_xla or accelerate is imported
    from nanogpt_tpu.report import report
    from nanogpt_tpu.train import train

    result = train(config)
    print(f"Ended: {result.stopped_because} at step {result.step}; run folder {result.run_dir}")
    print(f"Loss curve: {report(result.run_dir)}")
    if result.stopped_because in ("session", "step", "signal"):
        print("To go on, start the same command again: it resumes from here.")
    elif result.stopped_because == "done":
        print(f"Next: nanogpt-tpu sample {result.run_dir} --prompt 'Once upon a time'")
    return {
        "run": os.fspath(result.run_dir),
        "step": result.step,
        "val_loss": result.val_loss,
        "stopped_because": result.stopped_because,
    }


def _read_config(path: Path) -> TrainConfig:
    try:
        return TrainConfig.from_dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"config {path} cannot be read ({error}): give a config.json") from error


def _sample(args: argparse.Namespace) -> Values:
    env.patch_tpu_env(args.device)
    from nanogpt_tpu.load import load_checkpoint
    from nanogpt_tpu.runtime import Runtime
    from nanogpt_tpu.sample import sample

    model, tokenizer, _ = load_checkpoint(args.run_dir)
    runtime = Runtime(args.device, "fp32")
    runtime.prepare(model)
    samples, tokens_per_s = sample(
        model,
        tokenizer,
        os.fsencode(args.prompt).decode("utf-8", "replace"),  # right in any locale
        num_samples=args.num_samples,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        runtime=runtime,
    )
    for number, drawn in enumerate(samples, start=1):
        print(f"--- sample {number} ({len(drawn.tokens)} tokens, {drawn.finish_reason}) ---")
        print(drawn.text)
    print(f"--- {tokens_per_s:,.1f} tokens/s ---")
    return {"samples": [asdict(drawn) for drawn in samples], "tokens_per_s": tokens_per_s}


def _eval(args: argparse.Namespace) -> Values:
    env.patch_tpu_env(args.device)
    from nanogpt_tpu.evaluate import evaluate
    from nanogpt_tpu.load import load_checkpoint
    from nanogpt_tpu.runtime import Runtime

    model, _, _ = load_checkpoint(args.run_dir)
    runtime = Runtime(args.device, "fp32")
    scores = evaluate(
        model, args.data, split=args.split, max_tokens=args.max_tokens, runtime=runtime,
        sequences_per_batch=8 * runtime.num_devices,
    )  # fmt: skip
    print(
        f"loss {scores['val_loss']:.4f}, perplexity {scores['perplexity']:.2f}, "
        f"{scores['bits_per_byte']:.4f} bits per byte, over {scores['num_tokens']:,} tokens"
    )
    return scores


def _report(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.report import report

    path = report(args.run_dir)
    print(f"Loss curve: {path}")
    return {"loss_picture": os.fspath(path)}
