"""The GPT: a decoder-only transformer in GPT-2's module names, with the parts of later recipes.

    model = GPT(preset("gpt2").model)
    logits, loss = model(idx, targets)

Knows no device, no optimizer, no file, and prints nothing. The output head is the embedding matrix
itself, not a second parameter tied to it, so no device move can untie the two.

Letters: B sequences, T tokens, C = n_embd, H heads, D = head size, V = vocab_size, P = V rounded
up to a multiple of 128.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from nanogpt_tpu import fused, kernels
from nanogpt_tpu.attention import QK_EPS, causal_attention, largest_logit, rope_tables, rotate
from nanogpt_tpu.config import ModelConfig
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.fused_attention import lean_attention

IGNORED_TARGET = -100  # PyTorch's own: any model that uses F.cross_entropy leaves these out
NORM_EPS = 1e-5  # stated: the default of F.rms_norm depends on the dtype
_MASKED_LOGIT = -1e30
Rope = tuple[torch.Tensor, torch.Tensor] | None  # of `rope_tables`


class Linear(nn.Linear):
    """nn.Linear, lean on a TPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, F)."""
        return fused.linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, lean on a TPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., C)."""
        return fused.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """`fused.rms_norm` as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., C)."""
        return fused.rms_norm(x, NORM_EPS)


def make_norm(config: ModelConfig) -> nn.Module:
    """The normalization that the config names."""
    if config.norm == "rmsnorm":
        return RMSNorm()
    return LayerNorm(config.n_embd, eps=NORM_EPS, bias=config.bias)


class Attention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=qkv_bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        batch, seq_len, width = x.shape
        dropout = self.config.dropout if self.training else 0.0
        if self._is_lean(x, dropout):
            kernel = kernels.find(batch, seq_len, self.config)
            return lean_attention(x, self.c_attn, self.c_proj, self.config, rope, kernel)
        q, k, v = self.heads(x, rope)
        if self.config.attention_fp32:
            # Autocast would cast fp32 products back to bf16: it must be off, not only left alone.
            with torch.autocast(x.device.type, enabled=False):
                q, k, v = q.float(), k.float(), v.float()
                y = causal_attention(q, k, v, dropout, self.config.attention)
        else:
            y = causal_attention(q, k, v, dropout, self.config.attention)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(batch, seq_len, width)
        return self.resid_dropout(self.c_proj(y))

    def heads(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys, normed and rotated, and values: (B, T, C) -> each (B, H, T, D)."""
        parts = self.c_attn(x).chunk(3, dim=2)
        shape = (*x.shape[:2], self.config.n_head, self.config.head_size)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        if self.config.qk_norm:
            q, k = fused.rms_norm(q, QK_EPS), fused.rms_norm(k, QK_EPS)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return q, k, v

    def _is_lean(self, x: torch.Tensor, dropout: float) -> bool:
        """The lean form has no dropout inside, and is not meant where another form is named."""
        is_plain = self.config.attention == "sdpa" or self.config.attention_fp32 or dropout > 0
        return fused.is_lean(x) and not is_plain


class MLP(nn.Module):
    """Two linear layers, four times as wide inside; for swiglu three, of as many parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        inner = 8 * config.n_embd // 3 if config.mlp == "swiglu" else 4 * config.n_embd
        first = 2 * inner if config.mlp == "swiglu" else inner  # gate and value in one product
        self.c_fc = Linear(config.n_embd, first, bias=config.bias)
        self.c_proj = Linear(inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = self.c_fc(x)  # (B, T, 4C), swiglu (B, T, 16C/3)
        if self.kind == "gelu":
            x = fused.gelu(x)
        elif self.kind == "relu2":
            x = fused.relu2(x)
        else:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x), rope)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT of the given shape; `model(idx, targets) -> (logits, loss)`."""

    tokenizer_sha256: str | None = None  # set by training and loading, checked before use

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = None
        self.rope_cos: torch.Tensor  # buffers, only with rope
        self.rope_sin: torch.Tensor
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            cos, sin = rope_tables(config.block_size, config.head_size)
            self.register_buffer("rope_cos", cos, persistent=False)  # (block_size, D/2)
            self.register_buffer("rope_sin", sin, persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """GPT-2's: normal 0.02, the two projections into the residual stream smaller or zero."""
        for name, param in self.named_parameters():
            if param.dim() < 2:
                nn.init.zeros_(param) if name.endswith("bias") else nn.init.ones_(param)
            elif not name.endswith("c_proj.weight"):
                nn.init.normal_(param, std=0.02)
            elif self.config.zero_init_residual:
                nn.init.zeros_(param)
            else:
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def embed(
        self, idx: torch.Tensor, position: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Rope]:
        """Token ids (B, T) -> what the first block takes: (B, T, C), and the rope tables.

        With `position` (B,), ids are (B, 1) and stand there; tables are (B, 1, 1, D/2) then.
        """
        seq_len = idx.size(1)
        if seq_len > self.config.block_size:
            raise UserError(
                f"{seq_len} tokens are over the model's block_size {self.config.block_size}: "
                "shorten the input"
            )
        x, rope = fused.embed(self.wte.weight, idx), None
        where = slice(0, seq_len) if position is None else position[:, None]
        if self.wpe is not None:
            x = x + self.wpe.weight[where].to(x.dtype)
        else:
            where = where if position is None else position[:, None, None]
            rope = (self.rope_cos[where], self.rope_sin[where])
        return self.drop(x), rope

    def features(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> final hidden states (B, T, C)."""
        x, rope = self.embed(idx)
        for block in self.h:
            x = block(x, rope)
        return self.ln_f(x)

    @torch.no_grad()
    def max_attention_logit(self, idx: torch.Tensor) -> torch.Tensor:
        """The largest attention logit of any layer for ids (B, T), a scalar: early warning."""
        (x, rope), largest = self.embed(idx), []
        for block in self.h:
            assert isinstance(block, Block)
            largest.append(largest_logit(*block.attn.heads(block.ln_1(x), rope)[:2]))
            x = block(x, rope)
        return torch.stack(largest).max()

    @property
    def head_weight(self) -> torch.Tensor:
        """The output matrix (P, C): the embedding table itself, unless the config unties them."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., C) -> fp32 logits (..., P); those of padding ids are -1e30."""
        logits = F.linear(x, self.head_weight).float()
        if self.config.vocab_size < self.config.padded_vocab_size:
            logits[..., self.config.vocab_size :] = _MASKED_LOGIT
        return logits

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logits of the next token, or the mean loss.

        Args:
            idx: ids (B, T), any int dtype, T <= block_size.
            targets: the ids that follow, (B, T); those equal to -100 do not count.

        Returns:
            Without targets: fp32 logits (B, T, V) and None. With targets: the same logits (None
            where the loss is lean: it never makes them) and the mean cross-entropy in nats, a
            scalar in fp32.

        Raises:
            UserError: more tokens than block_size.
        """
        x = self.features(idx)  # (B, T, C)
        if targets is not None and fused.is_lean(x):
            vocab_size = self.config.vocab_size
            return None, fused.head_loss(x, self.head_weight, targets, vocab_size, IGNORED_TARGET)
        logits, loss = self.head(x), None  # (B, T, P)
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
        return logits[..., : self.config.vocab_size], loss

    def check_tokenizer(self, vocab_size: int, sha256: str) -> None:
        """Refuse text of another tokenizer than the one this model was trained with.

        Raises:
            UserError: another size; or another identity, where that of training is known.
        """
        if vocab_size != self.config.vocab_size:
            raise UserError(
                f"the model has a vocabulary of {self.config.vocab_size}, the tokenizer one of "
                f"{vocab_size}: use the tokenizer.json saved with the model, and its data"
            )
        if self.tokenizer_sha256 not in (None, sha256):
            raise UserError(
                f"the tokenizer (sha256 {sha256[:8]}) is not the one that the model was trained "
                f"with ({str(self.tokenizer_sha256)[:8]}): use the one saved with it, and its data"
            )

    def num_params(self) -> int:
        """Trainable parameters, without the rows that only pad the vocabulary."""
        config = self.config
        padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
        total = sum(param.numel() for param in self.parameters())
        return total - padding * (1 if self.lm_head is None else 2)


def num_params(model: nn.Module) -> int:
    """Trainable parameters of any module; of a GPT without padding rows."""
    if isinstance(model, GPT):
        return model.num_params()
    return sum(param.numel() for param in model.parameters())
