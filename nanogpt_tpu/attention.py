"""Causal self-attention over heads, in two forms that agree: PyTorch's own and plain products.

Letters: B sequences, H heads, T tokens, D = head size.
"""

import math

import torch
import torch.nn.functional as F


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
    """The definition written out; XLA fuses it. The softmax runs in fp32."""
    seq_len = q.size(-2)
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.size(-1))  # (B, H, T, T)
    position = torch.arange(seq_len, device=q.device)
    future = position[None, :] > position[:, None]  # (T, T)
    # Finite, and representable in bf16: the lowest fp32 number would become -inf there.
    scores = scores.masked_fill(future, -1e30)
    weights = F.dropout(F.softmax(scores, dim=-1), dropout, training=dropout > 0)
    return weights.to(v.dtype) @ v
