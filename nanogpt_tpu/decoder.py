"""Text a token at a time: keys and values of what was read are kept, only the new token is run.

Two programs: reading the rows from their start, and one token more for each. On XLA both have one
shape, whatever the lengths.

Letters: n rows, T tokens, S = block_size, H heads, D = head size, C = n_embd, P = padded
vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from nanogpt_tpu.attention import MASKED, causal_attention
from nanogpt_tpu.fused import count
from nanogpt_tpu.model import GPT, Block, Rope
from nanogpt_tpu.runtime import Runtime

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder:
    """Logits after rows that grow by a token at each call.

    A row that outgrows the context forgets the older half of it and is read anew: positions begin
    at 0 again, and that is done once in S/2 tokens.
    """

    def __init__(self, model: GPT, runtime: Runtime) -> None:
        self._model, self._runtime = model, runtime
        self._keys: list[torch.Tensor] = []  # a layer each, (n, H, S, D) fp32
        self._values: list[torch.Tensor] = []
        self._begins: list[int] = []  # where in its row the first kept token of each is
        self._num_read = 0  # tokens of the first row that were read; all grow alike

    @torch.no_grad()
    def __call__(self, rows: list[list[int]]) -> torch.Tensor:
        """fp32 logits (n, V) on the host after the last token of each row.

        The first call reads the rows, each later one the token that was appended to each.
        """
        context = self._model.config.block_size
        grew = len(rows[0]) - self._num_read == 1 and len(rows) == len(self._begins)
        if not grew:
            self._begins = [max(0, len(row) - context) for row in rows]
        lengths = [len(row) - begin for row, begin in zip(rows, self._begins, strict=True)]
        self._num_read = len(rows[0])
        if grew and max(lengths) <= context:
            x = self._read_one([row[-1] for row in rows], lengths)
        else:
            for n, length in enumerate(lengths):
                if length > context:
                    self._begins[n] += length - context // 2 - 1
            x = self._read_all([r[b:] for r, b in zip(rows, self._begins, strict=True)])
        with self._runtime.autocast():
            logits = self._model.head(x)  # (n, P)
        self._runtime.cut()  # XLA: or keys and values would stay a graph that grows
        return logits[:, : self._model.config.vocab_size].float().cpu()

    def _read_all(self, rows: list[list[int]]) -> torch.Tensor:
        """Hidden states (n, C) after the last token of each row; fills keys and values.

        XLA: rows are padded on the right to the whole context, which causal attention never looks
        at, and which later tokens overwrite: one shape, one program.
        """
        size = self._model.config.block_size
        longest = size if self._runtime.is_xla else max(map(len, rows))
        idx = torch.zeros(len(rows), longest, dtype=torch.int64)
        for n, row in enumerate(rows):
            idx[n, : len(row)] = torch.tensor(row)
        last = torch.tensor([len(row) - 1 for row in rows]).to(self._runtime.device)
        self._keys, self._values = [], []

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for cache, part in ((self._keys, k), (self._values, v)):
                cache.append(F.pad(part, (0, 0, 0, size - longest)))
            return causal_attention(q, k, v)

        with self._runtime.autocast():
            x, rope = self._model.embed(idx.to(self._runtime.device))
            x = self._run(x, rope, attend)
        return x[count(len(rows), x.device).long(), last]

    def _read_one(self, tokens: list[int], lengths: list[int]) -> torch.Tensor:
        """Hidden states (n, C) after one more token for each row, the last of `lengths`."""
        device, model = self._runtime.device, self._model
        end = model.config.block_size if self._runtime.is_xla else max(lengths)
        idx = torch.tensor(tokens)[:, None].to(device)  # (n, 1)
        position = (torch.tensor(lengths) - 1).to(device)  # (n,)
        each = count(len(tokens), device).long()
        is_seen = (count(end, device) <= position[:, None])[:, None, None]  # (n, 1, 1, end)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for cache, part in ((self._keys, k), (self._values, v)):
                cache[layer][each, :, position] = part[:, :, 0]
            keys, values = self._keys[layer][:, :, :end], self._values[layer][:, :, :end]
            scores = q @ keys.transpose(-2, -1) / math.sqrt(q.size(-1))  # (n, H, 1, end)
            return scores.masked_fill(~is_seen, MASKED).softmax(-1) @ values

        with self._runtime.autocast():
            x, rope = model.embed(idx, position)
            return self._run(x, rope, attend)[:, 0]

    def _run(self, x: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """The blocks on (n, T, C) with `attend(layer, q, k, v)` for attention, in fp32."""
        for layer, block in enumerate(self._model.h):
            assert isinstance(block, Block)
            q, k, v = block.attn.heads(block.ln_1(x), rope)  # (n, H, T, D)
            with torch.autocast(x.device.type, enabled=False):
                y = attend(layer, q.float(), k.float(), v.float())
            x = x + block.attn.c_proj(y.transpose(1, 2).flatten(2).to(x.dtype))
            x = x + block.mlp(block.ln_2(x))
        return self._model.ln_f(x)
