"""The command line: `nanogpt-tpu`, flags over the Python functions and nothing more.

Every field of TrainConfig and ModelConfig is a flag of `train`. A user's mistake ends in one line
on stderr and exit code 2. With --json, stdout holds one JSON object and nothing else; what people
read goes to stderr then.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanogpt_tpu import env
from nanogpt_tpu.config import ModelConfig, TrainConfig, preset
from nanogpt_tpu.errors import UserError, unknown_name
from nanogpt_tpu.flags import make_parser

Values = dict[str, Any]


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
    except BrokenPipeError:  # who read our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (OSError, RecursionError, MemoryError) as error:  # a name too long, a file too deep
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    parser, commands = make_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        raise unknown_name("command", argv[0], commands)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = commands[args.command]._option_string_actions
        kind = "option" if unknown[0].startswith("-") else "argument"
        raise unknown_name(kind, unknown[0].split("=")[0], known)
    with _stdout_to_stderr() if args.json else contextlib.nullcontext():
        values = _RUN[args.command](args)
    if args.json and env.is_main_process():
        print(json.dumps(_finite(values), ensure_ascii=False))
    return 1 if values.get("problems") or values.get("stopped_because") == "nan" else 0


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep stdout for one JSON object: what people read, and what C++ libraries print, moves."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _text(argument: str) -> str:
    """A command-line argument as text, right in any locale."""
    return os.fsencode(argument).decode("utf-8", "replace")


def _demo(args: argparse.Namespace) -> Values:
    env.patch_tpu_env(args.device)  # before torch_xla or accelerate is imported
    from nanogpt_tpu.demo import demo

    return demo(Path(args.out) if args.out else None, args.device)


def _prepare(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.prepare import prepare

    given = {name: value for name, value in vars(args).items() if name not in ("command", "json")}
    if args.text_field is not None:
        given["text_field"] = _text(args.text_field)
    manifest = prepare(**given)
    print(f"{args.out}: {manifest}")
    print(f"Next: nanogpt-tpu train --preset demo --data {args.out} --out RUN")
    return manifest.to_dict()


def _merge(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.merge import merge

    manifest = merge(args.data, args.out)
    print(f"{args.out}: {manifest}")
    return manifest.to_dict()


def _inspect(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.inspection import describe, inspect

    found = inspect(args.data, args.block_size, draw=True)
    print("\n".join(describe(found)))
    return found


_ENDINGS = {
    "done": "Finished",
    "session": "Session limit reached, saved",
    "signal": "Stopped by a signal, saved",
    "step": "Stopped as planned, saved",
    "nan": "Stopped because the loss is not finite",
}


def _finite(values: Values) -> Values:
    """JSON has no NaN: such a score becomes null."""
    bad = {key for key, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {key: None if key in bad else value for key, value in values.items()}


def _changes(args: argparse.Namespace) -> Values:
    """The fields of a config that were given as flags."""
    names = (*typing.get_type_hints(TrainConfig), *typing.get_type_hints(ModelConfig))
    given = {**vars(args)}
    if args.command == "preflight":
        del given["preset"]
    return {name: given[name] for name in names if name in given}


def _train(args: argparse.Namespace) -> Values:
    changes = _changes(args)
    if args.config is None:
        config = preset(changes.pop("preset", "gpt2"), **changes)
    else:
        config = _read_config(Path(args.config)).replace(**changes)
    env.patch_tpu_env(config.device)  # before torch_xla or accelerate is imported
    from nanogpt_tpu.report import report
    from nanogpt_tpu.train import train

    result = train(config)
    values = {
        "run": os.fspath(result.run_dir),
        "step": result.step,
        "val_loss": result.val_loss,
        "stopped_because": result.stopped_because,
    }
    if not env.is_main_process():
        return values
    print(f"{_ENDINGS[result.stopped_because]} at step {result.step}; run folder {result.run_dir}")
    try:
        print(f"Run card: {report(result.run_dir)}")
    except UserError as error:  # nothing worth a picture, such as a first loss that is NaN
        print(f"No run card: {error}")
    if result.stopped_because in ("session", "signal"):
        print("To go on, start the same command again: it resumes from here.")
    elif result.stopped_because == "step":
        print("To go on, start the same command without --stop-after-step: it resumes from here.")
    elif result.stopped_because == "done":
        run_dir = shlex.quote(os.fspath(result.run_dir))
        print(f"Next: nanogpt-tpu sample {run_dir} --prompt 'Once upon a time'")
    return values


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

    model, tokenizer, _ = load_checkpoint(args.RUN)
    runtime = Runtime(args.device, "fp32")
    runtime.prepare(model)
    samples, tokens_per_s = sample(
        model,
        tokenizer,
        _text(args.prompt),
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

    model, _, _ = load_checkpoint(args.RUN)
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


def _preflight(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.preflight import describe, draw, preflight, sweep

    config = preset(args.preset, **_changes(args))
    if args.sweep is not None:
        results = sweep(config, args.topology, args.sweep)
        best = max(results, key=lambda found: (found["fits"], found["tokens_per_s"] or 0.0))
    else:
        best = preflight(config, args.topology)
        results = [best]
    print("\n".join(describe(best)))
    if args.picture is not None:
        draw(results, Path(args.picture))
    return best if args.sweep is None else {**best, "sweep": results}


def _export(args: argparse.Namespace) -> Values:
    env.patch_tpu_env("cpu")
    from nanogpt_tpu.export import export_hf

    found = export_hf(args.RUN, args.out)
    print("{out}: {architecture}, {num_params:,} parameters".format(**found))
    print(f"Logits against transformers: {found['compared']}")
    return found


def _import_hf(args: argparse.Namespace) -> Values:
    env.patch_tpu_env("cpu")
    from nanogpt_tpu.export import import_hf

    found = import_hf(args.DIR, args.out)
    print("{run}: {num_params:,} parameters, tokenizer {tokenizer}".format(**found))
    print(f"Next: nanogpt-tpu sample {shlex.quote(found['run'])} --prompt 'Once upon a time'")
    return found


def _report(args: argparse.Namespace) -> Values:
    from nanogpt_tpu.report import report

    path = report(args.RUN)
    print(f"Run card: {path}")
    return {"run_card": os.fspath(path), "loss_picture": os.fspath(path.with_name("loss.png"))}


_RUN: dict[str, Callable[[argparse.Namespace], Values]] = {
    "demo": _demo,
    "prepare": _prepare,
    "merge": _merge,
    "inspect": _inspect,
    "train": _train,
    "sample": _sample,
    "eval": _eval,
    "report": _report,
    "preflight": _preflight,
    "export": _export,
    "import-hf": _import_hf,
}
