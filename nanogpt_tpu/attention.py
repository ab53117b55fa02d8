"""Causal self-attention in two plain forms, the reference of `fused_attention`'s, and rotation.

Letters: B sequences, T tokens, H heads, D = head size.
"""

import math

import torch
import torch.nn.functional as F

from nanogpt_tpu.fused import count

QK_EPS = 1e-12  # far below any real q or k: tiny vectors are normalized all the same
# Finite, and representable in bf16: the lowest fp32 number would become -inf there.
MASKED = -1e30
_ROPE_BASE = 10_000.0


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, kind: str = "auto"
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v over each token and those before it.

    Args:
        q: queries (B, H, T, D), any float dtype.
        k: keys, as q.
        v: values, as q.
        dropout: share of attention weights to drop; 0 outside training.
        kind: "sdpa", "xla", or "auto": xla on an XLA device, sdpa elsewhere.

    Returns (B, H, T, D) in v's dtype.
    """
    if kind == "auto":
        kind = "xla" if q.device.type == "xla" else "sdpa"
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return _plain_attention(q, k, v, dropout)


def _plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> torch.Tensor:
    """The definition written out; the softmax runs in fp32."""
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.size(-1))  # (B, H, T, T)
    scores = scores.masked_fill(~visible(0, q.size(-2), q.device), MASKED)
    weights = F.dropout(F.softmax(scores, dim=-1), dropout, training=dropout > 0)
    return weights.to(v.dtype) @ v


def largest_logit(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The largest of q k^T / sqrt(D) that a token sees; q, k (B, H, T, D); a scalar in fp32."""
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.size(-1))  # (B, H, T, T)
    return scores.masked_fill(~visible(0, q.size(-2), q.device), MASKED).amax()


def visible(start: int, end: int, device: torch.device) -> torch.Tensor:
    """Which of the tokens before `end` the tokens start..end may look at: (end - start, end)."""
    position = count(end, device)
    return position[start:, None] >= position[None, :]


def rope_tables(seq_len: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions, each (T, D/2) fp32 (Su et al. 2021, RoFormer)."""
    rates = _ROPE_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), rates)
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x (B, H, T, D) by its positions' angles, tables (T, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
