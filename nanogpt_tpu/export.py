"""To and from Hugging Face: a run as a folder `transformers` loads, GPT-2's weights as a run.

    export_hf("runs/mine", "mine-hf")          # config, weights, tokenizer, model card
    import_hf("gpt2", "runs/gpt2")             # a downloaded openai-community/gpt2

Both write the whole folder or nothing.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanogpt_tpu import env
from nanogpt_tpu.checkpoint import fill, open_checkpoint, save_checkpoint
from nanogpt_tpu.config import TrainConfig
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.hf_format import (
    OWN,
    OWN_CODE,
    Weights,
    config_of_gpt2,
    to_hf,
    weights_of_gpt2,
)
from nanogpt_tpu.load import load_checkpoint
from nanogpt_tpu.model import GPT
from nanogpt_tpu.model_card import model_card
from nanogpt_tpu.shardfile import hash_file
from nanogpt_tpu.tokenizer import FILE_NAME, Tokenizer, load_tokenizer

_WEIGHTS = "model.safetensors"
_TOLERANCE = 1e-4  # of logits, relative once they are above 1


def export_hf(run: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the newest checkpoint of a run as a folder for `AutoModelForCausalLM`, in fp32.

    If `transformers` is installed, its logits on a whole context of random ids are compared with
    ours before the folder appears.

    Args:
        run: a run or checkpoint folder.
        out: the folder to make.

    Returns:
        {"out", "architecture", "num_params", "max_logit_difference" (None if not compared),
        "compared": the same for people}.

    Raises:
        UserError: no checkpoint there, `out` exists, or the logits differ by more than 1e-4.
    """
    model, tokenizer, state = load_checkpoint(run)
    values, tensors = to_hf(model.config, dict(model.state_dict()), tokenizer.eot_id)
    found = {
        "out": os.fspath(out),
        "architecture": values["architectures"][0],
        "num_params": model.num_params(),
    }

    def write(folder: Path) -> None:
        _write_json(folder / "config.json", values)
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        _write_tokenizer(folder, tokenizer, model.config.block_size)
        if found["architecture"] == OWN:
            shutil.copyfile(Path(__file__).with_name(f"{OWN_CODE}.py"), folder / f"{OWN_CODE}.py")
        picture = open_checkpoint(run).folder.parent.parent / "loss.png"
        if picture.is_file():
            shutil.copyfile(picture, folder / picture.name)
        card = model_card(state, values, found["num_params"], picture.is_file())
        (folder / "README.md").write_text(card, "utf-8")
        found.update(_compare(model, folder))

    _write_whole(Path(out), write)
    return found


def import_hf(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Make a run of GPT-2 weights in Hugging Face's form: GPT2LMHeadModel or GPT2Model.

    Args:
        folder: holds config.json, model.safetensors (or its parts and their index) and, unless
            the vocabulary is GPT-2's own, tokenizer.json.
        out: the run folder to make; its checkpoint is of step 0.

    Returns:
        {"run", "num_params", "tokenizer": its kind}.

    Raises:
        UserError: another architecture, weights that do not fit it, no safetensors, no tokenizer,
            or `out` exists.
    """
    folder = Path(folder)
    config = config_of_gpt2(_read_json(folder / "config.json"), folder)
    path, tensors = _read_weights(folder)
    weights = weights_of_gpt2(config, tensors, path)
    model = GPT(config)
    fill(model, weights, path)
    has_own = (folder / FILE_NAME).is_file() or config.vocab_size != 50257
    try:
        tokenizer = load_tokenizer(folder if has_own else "gpt2")
    except UserError as error:
        raise UserError(f"{folder}: copy the model's tokenizer.json there ({error})") from error
    model.check_tokenizer(tokenizer.vocab_size, tokenizer.sha256)
    run = TrainConfig(model=config).to_dict()
    state = {
        "step": 0,
        "tokens": 0,
        "val_loss": None,
        "config": run,
        "model_class": GPT.__qualname__,
        "num_params": model.num_params(),
        "git_commit": env.git_commit(),
        "tokenizer": tokenizer.describe(),
        "data": {"identity": hash_file(path), "source": f"imported: {folder}", "num_tokens": 0},
    }

    def write(run_dir: Path) -> None:
        tokenizer.save(run_dir)
        _write_json(run_dir / "config.json", run)
        save_checkpoint(run_dir, state, dict(model.state_dict()), {}, tokenizer, keep_last=1)

    _write_whole(Path(out), write)
    return {
        "run": os.fspath(out),
        "num_params": model.num_params(),
        "tokenizer": tokenizer.kind,
    }


def _write_whole(out: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder that appears as `out` once it is whole; else nothing is left."""
    if out.exists():
        raise UserError(f"out {str(out)!r} exists: give a folder that does not")
    partial = out.with_name(f"{out.name}_partial")
    missing = [path for path in out.parents if not path.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _make_new(partial)
        try:
            write(partial)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"out {str(out)!r} cannot be written ({error}): make room") from error
    finally:
        with suppress(OSError):  # only empty ones go: not those above a folder that was made
            for path in missing:
                path.rmdir()


def _make_new(folder: Path) -> None:
    """Make a folder; one that is there is the user's or another command's, and stays as it is."""
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise UserError(
            f"{str(folder)!r} exists: the same command is running or was killed; if it is not "
            "running, move that folder away"
        ) from error


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): give a folder, as made by "
            "hf download openai-community/gpt2 --local-dir gpt2-folder"
        ) from error
    return values


def _read_weights(folder: Path) -> tuple[Path, Weights]:
    """All tensors of a folder, and the file that names or holds them."""
    index = folder / f"{_WEIGHTS}.index.json"
    path = index if index.is_file() else folder / _WEIGHTS
    if not path.is_file():
        others = [p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".h5", ".ot")]
        seen = f", only {', '.join(others)}, which can run code" if others else ""
        raise UserError(f"{folder} holds no {_WEIGHTS}{seen}: download that file of the model")
    names = {_WEIGHTS}
    if path == index:
        table = _read_json(index).get("weight_map")
        if not isinstance(table, dict):
            raise UserError(f"{index} has no weight_map: download it again")
        names = {Path(str(name)).name for name in table.values()}  # never outside the folder
    try:
        parts = [load_file(folder / name) for name in sorted(names)]
    except (OSError, SafetensorError, UnicodeError) as error:
        raise UserError(f"{folder}: weights cannot be read ({error}): download again") from error
    return path, {name: tensor for part in parts for name, tensor in part.items()}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """The files that `AutoTokenizer` and `generate` read; end-of-text is the only control token."""
    tokenizer.save(folder)
    eot = "<|endoftext|>"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot,
        "eos_token": eot,
        "unk_token": eot,
        "pad_token": eot,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot_id)
    drawing = {"do_sample": True, "temperature": 0.8, "top_k": 50}
    _write_json(folder / "generation_config.json", {**ids, **drawing})


def _compare(model: GPT, folder: Path) -> dict[str, Any]:
    """The largest difference between our logits and those of the folder just written.

    Raises:
        UserError: they are not the same function.
    """
    try:
        import transformers
    except ImportError:
        reason = "not compared, transformers is not installed (pip install transformers)"
        return {"max_logit_difference": None, "compared": reason}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:  # each version has its own for what it does not know
        raise UserError(
            f"transformers {transformers.__version__} does not load the exported model ({error}): "
            "nothing was written; try version 5.12"
        ) from error
    generator = torch.Generator().manual_seed(0)
    shape = (1, model.config.block_size)
    idx = torch.randint(model.config.vocab_size, shape, generator=generator)
    with torch.no_grad():
        logits, other = model(idx)[0], theirs.eval()(idx).logits.float()
    assert logits is not None
    difference = float((logits - other).abs().max())
    limit = _TOLERANCE * max(1.0, float(logits.abs().max()))
    if not difference <= limit:
        raise UserError(
            f"logits of the exported model differ by {difference:.2g} (at most {limit:.2g}) in "
            f"transformers {transformers.__version__}: nothing was written; try version 5.12"
        )
    same = f"at most {difference:.1g} apart, transformers {transformers.__version__}"
    return {"max_logit_difference": difference, "compared": same}
