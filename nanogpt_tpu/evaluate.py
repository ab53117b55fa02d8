"""How good a model is on held-out text: loss, perplexity, bits per byte."""

import math
import os
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nanogpt_tpu.errors import UserError
from nanogpt_tpu.manifest import Manifest
from nanogpt_tpu.model import GPT, IGNORED_TARGET
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.shards import ShardLoader
from nanogpt_tpu.tokenizer import load_tokenizer


class Evaluator:
    """A fixed set of validation windows, always the same and always in batches of one shape."""

    def __init__(
        self,
        data: str | os.PathLike[str],
        split: str,
        seq_len: int,
        sequences_per_batch: int,
        max_tokens: int | None = None,
    ) -> None:
        """Choose the windows: the first `max_tokens` tokens of the split (None: all of them).

        Raises:
            UserError: the split has not one whole window.
        """
        self._loader = ShardLoader(data, split, seq_len, 1, seed=0, shuffle=False)
        wanted = self._loader.num_windows
        if max_tokens is not None:
            wanted = min(wanted, max(1, max_tokens // seq_len))
        self.num_windows = wanted
        self.num_tokens = wanted * seq_len
        self._rows = sequences_per_batch
        self._data = data

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(idx, targets, number of real rows): (n, T) each, the last batch padded to n rows.

        XLA: a shorter last batch would be another shape and so another program.
        """
        first = index * self._rows
        rows = range(first, min(first + self._rows, self.num_windows))
        windows = [self._loader(row) for row in rows]
        idx = torch.cat([window[0] for window in windows])
        targets = torch.cat([window[1] for window in windows])
        missing = self._rows - len(rows)
        if missing:
            idx = torch.cat([idx, idx[:1].expand(missing, -1)])
            ignored = torch.full((missing, idx.size(1)), IGNORED_TARGET, dtype=targets.dtype)
            targets = torch.cat([targets, ignored])
        return idx, targets, len(rows)

    def loss(self, model: nn.Module, runtime: Runtime) -> float:
        """Mean loss in nats per token over all windows, dropout off; one host read."""
        was_training = model.training
        model.eval()
        total = runtime.zero()
        with torch.no_grad():
            for index in range(-(-self.num_windows // self._rows)):
                idx, targets, num_real = self.batch(index)
                with runtime.autocast():
                    _, loss = model(*runtime.place(idx, targets))
                if rows := runtime.rows_here(num_real, self._rows):
                    share = rows * runtime.num_processes / self.num_windows
                    total = total + loss * runtime.scalar(share)
                runtime.cut()
        model.train(was_training)
        return runtime.read(total)[0]

    @cached_property
    def tokens_per_byte(self) -> float:
        """Predicted tokens divided by the bytes of text they stand for; end-of-text has none."""
        lengths = load_tokenizer(self._data).token_num_bytes()
        num_bytes = 0
        for row in range(self.num_windows):
            num_bytes += int(lengths[self._loader(row)[1].numpy()].sum())
        return self.num_tokens / max(1, num_bytes)


def evaluate(
    model: nn.Module,
    data: str | os.PathLike[str],
    *,
    split: str = "val",
    seq_len: int | None = None,
    max_tokens: int | None = None,
    sequences_per_batch: int = 8,
    runtime: Runtime | None = None,
) -> dict[str, Any]:
    """Loss of a model on a data folder.

    Args:
        model: a GPT, or any module with forward(idx, targets) -> (logits, loss) and seq_len given.
        data: folder made by `prepare`, with the tokenizer the model was trained with.
        split: "val" or "train".
        seq_len: tokens in a window; the model's block_size unless given.
        max_tokens: use the first so many tokens only.
        sequences_per_batch: windows in a forward, over all devices.
        runtime: where to compute; the CPU in fp32 unless given.

    Returns:
        {"val_loss": nats per token, "perplexity", "bits_per_byte", "num_tokens"}.

    Raises:
        UserError: no such data or split, or a vocabulary that the model does not have.
    """
    config = getattr(model, "config", None)
    manifest = Manifest.load(data)
    if isinstance(model, GPT):
        model.check_tokenizer(manifest.tokenizer["vocab_size"], manifest.tokenizer["sha256"])
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}: it must be at least 1")
    seq_len = seq_len or getattr(config, "block_size", None)
    if seq_len is None:
        raise UserError("evaluate: this model has no block_size; give seq_len")
    runtime = runtime or Runtime.around(model)
    evaluator = Evaluator(data, split, seq_len, sequences_per_batch, max_tokens)
    loss = evaluator.loss(runtime.prepare(model), runtime)
    return {
        "val_loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) * evaluator.tokens_per_byte,
        "num_tokens": evaluator.num_tokens,
    }
