"""A trained model back from disk: run folder to (model, tokenizer, state)."""

import os
from typing import Any

from nanogpt_tpu.checkpoint import MODEL, load_weights, open_checkpoint
from nanogpt_tpu.config import ModelConfig
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.model import GPT
from nanogpt_tpu.tokenizer import Tokenizer, load_tokenizer


def load_checkpoint(
    source: str | os.PathLike[str],
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """The newest valid checkpoint in or below `source`, its model in eval mode on the CPU.

    Args:
        source: a run folder, a checkpoint folder, or a folder that holds one somewhere below.

    Returns:
        The model (fp32), its tokenizer, and the contents of state.json.

    Raises:
        UserError: nothing there, damaged, or weights that are not this configuration's.
    """
    checkpoint = open_checkpoint(source)
    state = checkpoint.state
    try:
        config = ModelConfig(**state["config"]["model"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint.folder}: state.json has no model of ours ({error})"
        ) from error
    if state.get("model_class") != GPT.__qualname__:
        raise UserError(
            f"{checkpoint.folder} holds the weights of a {state.get('model_class')}, not of a GPT: "
            f"build that model yourself and load {MODEL} into it"
        )
    model = GPT(config)
    load_weights(model, checkpoint)
    tokenizer = load_tokenizer(checkpoint.folder)
    if tokenizer.sha256 != state["tokenizer"]["sha256"]:
        raise UserError(f"{checkpoint.folder}: tokenizer.json is not the one it was trained with")
    model.tokenizer_sha256 = tokenizer.sha256
    return model.eval(), tokenizer, state
