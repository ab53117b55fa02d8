"""The attention layer in the forms a TPU runs fastest: one kernel, or blocks of matrix products.

Both are lean as the pieces of `fused` are; `attention` holds the reference.

Letters: B sequences, T tokens, C = n_embd, H heads, D = head size, R rows of a block.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from nanogpt_tpu.attention import MASKED, QK_EPS, visible
from nanogpt_tpu.config import ModelConfig
from nanogpt_tpu.fused import BF16, count, product
from nanogpt_tpu.kernels import LANES, Kernel, call_kernel

_NUM_BLOCKS = 4  # of rows: what lies above the diagonal blocks is never computed

Tables = tuple[torch.Tensor, torch.Tensor]


def lean_attention(
    x: torch.Tensor,
    c_attn: nn.Linear,
    c_proj: nn.Linear,
    config: ModelConfig,
    rope: Tables | None,
    kernel: Kernel | None,
) -> torch.Tensor:
    """The whole attention layer in bf16, projections, QK-norm and rotation included.

    Args:
        x: (B, T, C).
        c_attn: to queries, keys and values.
        c_proj: from the heads' outputs back.
        config: shape and parts.
        rope: cosines and sines (T, D/2), if the config wants rotation.
        kernel: from `kernels.find`; without one it is made of matrix products.

    Returns (B, T, C) bf16.
    """
    width, bias = config.n_embd, c_attn.bias
    if kernel is not None:
        # The kernel wants 128 lanes of queries, of keys and of values beside each other.
        weight = c_attn.weight.view(3, -1, LANES, width).transpose(0, 1).reshape(3 * width, width)
        packed = None
        if bias is not None:
            packed = bias.view(3, -1, LANES).transpose(0, 1).reshape(3 * width)
        qkv = product("btc,fc->btf", "f", x, weight, packed)
        tables = () if rope is None else _signed_tables(*rope)
        y = _KernelAttention.apply(kernel, qkv, *tables)  # (B, T, C)
        return product("btc,fc->btf", "f", y, c_proj.weight, c_proj.bias)
    heads = (config.n_head, config.head_size)
    weights = c_attn.weight.view(3, *heads, width).unbind()
    biases = [None] * 3 if bias is None else bias.view(3, *heads).unbind()
    q, k, v = (
        product("btc,hdc->bhtd", "hd", x, *part) for part in zip(weights, biases, strict=True)
    )
    q, k = (_norm_and_rotate(part, config.qk_norm, rope) for part in (q, k))
    y = _BlockAttention.apply(q, k, v, config.qk_norm)  # (B, H, T, D)
    return product("bhtd,chd->btc", "c", y, c_proj.weight.view(width, *heads), c_proj.bias)


def _signed_tables(cos: torch.Tensor, sin: torch.Tensor) -> Tables:
    """Tables (T, D) for x cos + roll(x, D/2) sin."""
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def _norm_and_rotate(x: torch.Tensor, is_normed: bool, rope: Tables | None) -> torch.Tensor:
    if not is_normed and rope is None:
        return x
    return _NormRotate.apply(x, is_normed, *(rope or (None, None)))


class _NormRotate(Function):
    """QK-norm and rotation of (B, H, T, D) together."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        is_normed: bool,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.tables = None if cos is None or sin is None else _signed_tables(cos, sin)
        scale = None
        if is_normed:
            scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + QK_EPS)
        ctx.save_for_backward(x, scale)
        y = x.float() if ctx.tables is None else _rotated(x, *ctx.tables)
        return (y if scale is None else y * scale).to(BF16)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, scale = ctx.saved_tensors
        grad = grad.float()
        if ctx.tables is not None:
            cos, sin = ctx.tables
            grad = grad * cos + _half_turned((grad * sin).to(BF16)).float()
        if scale is not None:
            normed = x.float() * scale
            grad = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * scale
        return grad.to(BF16), None, None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x.float() * cos + _half_turned(x).float() * sin


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    """The halves of the last dimension exchanged.

    XLA: as a product with a permutation matrix, exact in bf16: slices of half a tile cost more.
    """
    size = x.size(-1)
    index = count(size, x.device)
    swap = (index[:, None] == (index[None, :] + size // 2) % size).to(BF16)
    return x @ swap


class _BlockAttention(Function):
    """Attention of (B, H, T, D) in blocks of rows that skip what is above the diagonal.

    With QK-norm no score is over sqrt(D), so the exponential needs no maximum.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_bounded: bool
    ) -> torch.Tensor:
        ctx.scale = 1 / math.sqrt(q.size(-1))
        es: list[torch.Tensor] = []
        totals: list[torch.Tensor] = []
        ys: list[torch.Tensor] = []
        for start, end in _blocks(q.size(2)):
            scores = torch.einsum("bhqd,bhkd->bhqk", q[:, :, start:end], k[:, :, :end])
            scores = scores.float() * ctx.scale
            scores = torch.where(visible(start, end, q.device), scores, MASKED)
            top = 0.0 if is_bounded else scores.amax(-1, keepdim=True)
            e = torch.exp(scores - top)  # (B, H, R, end)
            total = e.sum(-1, keepdim=True)
            e = e.to(BF16)
            y = torch.einsum("bhqk,bhkd->bhqd", e, v[:, :, :end]).float() / total
            es, totals, ys = [*es, e], [*totals, total], [*ys, y.to(BF16)]
        y = torch.cat(ys, 2)
        ctx.save_for_backward(q, k, v, y, *es, *totals)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, y, *rest = ctx.saved_tensors
        blocks = _blocks(q.size(2))
        es, totals = rest[: len(blocks)], rest[len(blocks) :]
        inner = (grad.float() * y.float()).sum(-1, keepdim=True)  # (B, H, T, 1)
        grad_q: list[torch.Tensor] = []
        grad_k: list[Any] = [0] * len(blocks)
        grad_v: list[Any] = [0] * len(blocks)
        for (start, end), e, total in zip(blocks, es, totals, strict=True):
            rows = slice(start, end)
            share = (grad[:, :, rows].float() / total).to(BF16)
            grad_e = torch.einsum("bhqd,bhkd->bhqk", share, v[:, :, :end]).float()
            error = (e.float() * (grad_e - inner[:, :, rows] / total)).to(BF16)
            grad_q.append(torch.einsum("bhqk,bhkd->bhqd", error, k[:, :, :end]))
            to_k = torch.einsum("bhqk,bhqd->bhkd", error, q[:, :, rows])
            to_v = torch.einsum("bhqk,bhqd->bhkd", e, share)
            for i, (first, last) in enumerate(blocks[: blocks.index((start, end)) + 1]):
                grad_k[i] = grad_k[i] + to_k[:, :, first:last].float()
                grad_v[i] = grad_v[i] + to_v[:, :, first:last].float()
        q_, k_, v_ = (torch.cat(parts, 2).float() for parts in (grad_q, grad_k, grad_v))
        return (q_ * ctx.scale).to(BF16), (k_ * ctx.scale).to(BF16), v_.to(BF16), None


def _blocks(seq_len: int) -> list[tuple[int, int]]:
    """Rows (start, end) of each block."""
    rows = max(LANES, -(-seq_len // _NUM_BLOCKS))
    return [(start, min(start + rows, seq_len)) for start in range(0, seq_len, rows)]


class _KernelAttention(Function):
    """QK-norm, rotation and attention in one Pallas kernel, on packed (B, T, 3C)."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, qkv: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        shape = [qkv.size(0), qkv.size(1), qkv.size(2) // 3]
        y = call_kernel(kernel.forward, [qkv, *tables], shape)
        ctx.kernel, ctx.num_tables = kernel, len(tables)
        ctx.save_for_backward(qkv, *tables, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        qkv = ctx.saved_tensors[0]
        inputs = [*ctx.saved_tensors, grad.to(BF16)]
        grad_qkv = call_kernel(ctx.kernel.backward, inputs, list(qkv.shape))
        return None, grad_qkv, *[None] * ctx.num_tables
