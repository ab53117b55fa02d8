"""The flags of the command line: one table, and the parser made of it.

Every field of TrainConfig and ModelConfig is a flag of `train`, named and typed as there.
"""

import argparse
import ast
import inspect
import itertools
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn

from nanogpt_tpu import __version__
from nanogpt_tpu.config import ModelConfig, TrainConfig
from nanogpt_tpu.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are a line of ours instead of its usage text."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise UserError(f"{message} (see {self.prog} --help)")


class _Joined(argparse.Action):
    """Several words as one text: `--data A:0.8 B:0.2`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, *_: object) -> None:
        """Join them."""
        setattr(namespace, self.dest, " ".join(values))


def whole_number(text: str) -> int:
    """A whole number; 1e9 and 1_000 too."""
    number = float(text)
    if not number.is_integer():  # inf and nan are none either
        raise ValueError(text)
    return int(text) if text.lstrip("+-").isdecimal() else int(number)


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, or None for the word none."""

    def parse_or_none(text: str) -> Any:
        return None if text.lower() == "none" else parse(text)

    parse_or_none.__name__ = parse.__name__  # argparse names the kind of value by it
    return parse_or_none


whole_number.__name__ = "whole number"


_RUN: dict[str, Any] = {"RUN": {"help": "a run or checkpoint folder"}}
_DEVICE: dict[str, Any] = {"--device": {"default": "auto", "help": "as for train"}}
_NUMBER: dict[str, Any] = {"type": whole_number}
_MAYBE: dict[str, Any] = {"type": optional(whole_number), "default": None}

SOURCES = (
    "demo, poems, fineweb-edu, fineweb, fineweb-shards[:N], hf:owner/name[:config], or files, "
    "folders, globs: .txt .md .jsonl .parquet (.gz .zst)"
)

# command: (help, flags with what argparse takes for each)
COMMANDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "demo": (
        "built-in text to a trained, sampled model in about two minutes",
        {"--out": {"help": "folder for data/ and run/ (default: runs/demo)"}, **_DEVICE},
    ),
    "prepare": (
        "documents to verified token shards",
        {
            "source": {"nargs": "+", "help": f"{SOURCES}; see README"},
            "--out": {"required": True, "help": "data folder to make"},
            "--tokenizer": {"default": "gpt2", "help": "gpt2, bytes or a tokenizer.json"},
            "--train-tokenizer": {**_MAYBE, "metavar": "VOCAB", "help": "train a BPE first"},
            "--val-tokens": {**_NUMBER, "default": 1_048_576},
            "--shard-tokens": {**_NUMBER, "default": 100_000_000},
            "--max-tokens": _MAYBE,
            "--max-output-bytes": {**_MAYBE, "help": "stop before the folder is larger"},
            "--part": {"metavar": "I/N", "help": "prepare only the I-th of N parts"},
            "--text-field": {"help": "field or column with the text (default: text, or guessed)"},
            "--workers": {**_MAYBE, "help": "encoding processes (default: one a core)"},
            "--strip-html": {"action": "store_true", "help": "keep the text of HTML only"},
            "--collapse-blank": {"action": "store_true", "help": "one empty line at most"},
            "--min-chars": {**_MAYBE, "help": "drop shorter documents"},
            "--script": {"help": "drop documents mostly not in it, such as Han"},
            "--drop-duplicates": {"choices": ("exact", "near")},
        },
    ),
    "merge": (
        "several data folders as one, without copying",
        {"data": {"nargs": "+", "metavar": "DIR"}, "--out": {"required": True}},
    ),
    "inspect": (
        "verify hashes and ids of a data folder, count and draw its documents",
        {"data": {}, "--block-size": {**_NUMBER, "default": 1024, "help": "the model's context"}},
    ),
    "train": (
        "train, or go on training",
        {"--config": {"help": "config.json of an earlier run, to run it again"}},
    ),
    "sample": (
        "let a trained model write",
        {
            **_RUN,
            "--prompt": {"default": "", "help": "text to continue (default: a new document)"},
            "--num-samples": {**_NUMBER, "default": 1},
            "--max-new-tokens": {**_NUMBER, "default": 128},
            "--temperature": {"type": float, "default": 0.8, "help": "0: the likeliest token"},
            "--top-k": {**_MAYBE, "default": 50, "help": "none turns it off"},
            "--top-p": {"type": optional(float), "default": None},
            "--seed": {**_NUMBER, "default": 1337},
            **_DEVICE,
        },
    ),
    "eval": (
        "loss, perplexity and bits per byte of a trained model",
        {
            **_RUN,
            "--data": {"required": True},
            "--split": {"default": "val", "choices": ("val", "train")},
            "--max-tokens": _MAYBE,
            **_DEVICE,
        },
    ),
    "preflight": (
        "what the TPU's own compiler says of a run: does it fit, how fast, what dominates",
        {
            "--topology": {"default": "v5e:2x4", "help": "v5e:2x4, v5e:4x4, v5e:16x16, v6e:2x4"},
            "--sweep": {"metavar": "micro_batch_size", "help": "try several, take the fastest"},
            "--picture": {"metavar": "FILE.png", "help": "draw where time and memory go"},
        },
    ),
    "export": (
        "a run as a folder that Hugging Face transformers loads",
        {**_RUN, "--out": {"required": True, "help": "folder to make"}},
    ),
    "import-hf": (
        "GPT-2 weights in Hugging Face's form as a run: to sample, score, train on",
        {
            "DIR": {"help": "folder with config.json, model.safetensors, tokenizer.json"},
            "--out": {"required": True, "help": "run folder to make"},
        },
    ),
    "report": (
        "write the run card and the loss picture of a run, also of one that died",
        _RUN,
    ),
}


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands by name."""
    parser = Parser(prog="nanogpt-tpu", description="Train your own GPT from scratch.")
    parser.add_argument("--version", action="version", version=f"nanogpt-tpu {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name, (help, flags) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        for flag, options in flags.items():
            sub.add_argument(flag, **options)
        commands[name] = sub
    for name in ("train", "preflight"):
        _add_fields(commands[name], TrainConfig)
        _add_fields(commands[name], ModelConfig)
    commands["preflight"].set_defaults(preset="gpt2")
    return parser, commands


def _add_fields(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for every field of a config class; absent ones leave no attribute."""
    described = _describe_fields(config)
    for name, hint in typing.get_type_hints(config).items():
        help = described.get(name)
        flag = "--" + name.replace("_", "-")
        options = typing.get_args(hint)
        kind = next((o for o in options if o is not types.NoneType), hint)
        parsers: dict[Any, Callable[[str], Any]] = {int: whole_number, float: float, str: str}
        if name == "data":
            parser.add_argument(
                flag, nargs="+", action=_Joined, default=argparse.SUPPRESS, help=help
            )
        elif kind is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=argparse.SUPPRESS, help=help)
        elif kind in parsers:
            parse = parsers[kind]
            parse = optional(parse) if types.NoneType in options else parse
            parser.add_argument(flag, type=parse, default=argparse.SUPPRESS, help=help)


def _describe_fields(config: type) -> dict[str, str]:
    """A line of help for each field: the text below it in the source, and its default."""
    body = ast.parse(inspect.getsource(config)).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, after in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = after.value.value + " " if is_text else ""
            default = ast.unparse(field.value) if field.value else "none"
            texts[field.target.id] = f"{text}(default {default})".replace("%", "%%")
    return texts
