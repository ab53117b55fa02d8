"""The pieces of a GPT in the form a TPU runs fastest, each beside its plain reference.

On XLA under bf16 autocast every function here runs lean: bf16 in and out, sums in fp32, weight
gradients in fp32, and for the backward pass only what it needs is kept. Anywhere else it is
PyTorch's own operator. Autograd's way costs a TPU twice the time (benchmarks/preflight.md): fp32
copies of the stream, bit-packed masks, seven passes over the logits.

Letters: B sequences, T tokens, C = n_embd, F features, N = B T, P = padded vocabulary.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

BF16 = torch.bfloat16
_LARGEST_GAP = 80.0  # e^80 is far inside fp32 and bf16


def is_lean(tensor: torch.Tensor) -> bool:
    """Whether a computation on this tensor takes the lean form."""
    return tensor.device.type == "xla" and torch.is_autocast_enabled("xla")


def count(size: int, device: torch.device) -> torch.Tensor:
    """0, 1, ..., size - 1 as int32 (size,).

    XLA: torch.arange would be made on the host and sent anew in every micro step.
    """
    if device.type != "xla":
        return torch.arange(size, device=device, dtype=torch.int32)
    return _count_on_xla(size, str(device))


@cache
def _count_on_xla(size: int, device: str) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32).to(device)


def embed(weight: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """Rows of weight (P, C) at idx (B, T): (B, T, C), bf16 if lean."""
    if not is_lean(weight):
        return F.embedding(idx, weight)
    return _Embed.apply(weight, idx.flatten()).view(*idx.shape, -1)


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight.to(BF16).index_select(0, ids)  # (N, C)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids,) = ctx.saved_tensors
        zeros = torch.zeros(ctx.shape, device=grad.device)
        return zeros.index_add(0, ids, grad.float()), None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x (B, T, C) by weight (F, C) and add bias (F,): (B, T, F)."""
    if not is_lean(x):
        return F.linear(x, weight, bias)
    return product("btc,fc->btf", "f", x, weight, bias)


def product(
    equation: str,
    bias_letters: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """einsum(equation, x, weight) + bias in bf16; `bias_letters` are the bias's dimensions."""
    return _Product.apply(equation, bias_letters, x, weight, bias)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        equation: str,
        bias_letters: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        x, weight = x.to(BF16), weight.to(BF16)
        ctx.save_for_backward(x, weight)
        inputs, ctx.out = equation.split("->")
        ctx.x, ctx.weight = inputs.split(",")
        ctx.bias = None if bias is None else bias_letters
        y = torch.einsum(equation, x, weight)
        if bias is None:
            return y
        where = [size if c in bias_letters else 1 for c, size in zip(ctx.out, y.shape, strict=True)]
        return y + bias.to(BF16).view(where)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x = torch.einsum(f"{ctx.out},{ctx.weight}->{ctx.x}", grad, weight)
        grad_weight = torch.einsum(f"{ctx.out},{ctx.x}->{ctx.weight}", grad, x).float()
        grad_bias = None
        if ctx.bias is not None:
            others = [i for i, letter in enumerate(ctx.out) if letter not in ctx.bias]
            grad_bias = grad.float().sum(others)
        return None, None, grad_x, grad_weight, grad_bias


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to root mean square 1, in fp32, without gain (Zhang, Sennrich 2019).

    Any shape and float dtype; the dtype is kept.
    """
    if is_lean(x):
        return _RMSNorm.apply(x, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (B, T, 1)
        ctx.save_for_backward(x, scale)
        return (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grad.float()
        mean = (grad * normed).mean(-1, keepdim=True)
        return ((grad - normed * mean) * scale).to(x.dtype), None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Layer normalization of the last dimension (Ba et al. 2016), in fp32; the dtype is kept."""
    if not is_lean(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)  # (B, T, 1)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.has_bias = bias is not None
        y = (wide - mean) * scale * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        normed, grad = (x.float() - mean) * scale, grad.float()
        others = list(range(x.dim() - 1))
        inner = grad * weight
        centred = inner - inner.mean(-1, keepdim=True)
        grad_x = (centred - normed * (inner * normed).mean(-1, keepdim=True)) * scale
        grad_bias = grad.sum(others) if ctx.has_bias else None
        return grad_x.to(x.dtype), (grad * normed).sum(others), grad_bias, None


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared (So et al. 2021)."""
    return _ReLU2.apply(x) if is_lean(x) else F.relu(x).square()


class _ReLU2(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * (2 * F.relu(x))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in the tanh form of GPT-2 (Hendrycks, Gimpel 2016)."""
    return _GELU.apply(x) if is_lean(x) else F.gelu(x, approximate="tanh")


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x.float(), approximate="tanh").to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x, root = x.float(), math.sqrt(2 / math.pi)
        tanh = torch.tanh(root * (x + 0.044715 * x**3))
        slope = 0.5 * x * (1 - tanh * tanh) * root * (1 + 3 * 0.044715 * x * x)
        return (grad.float() * (0.5 * (1 + tanh) + slope)).to(BF16)


def head_loss(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, ignored: int
) -> torch.Tensor:
    """Mean cross-entropy of x (B, T, C) against the head weight (P, C), without making logits.

    targets (B, T); those equal to `ignored` do not count. Lean only: its reference is
    F.cross_entropy of the logits. One exponential, with the target's logit c for the maximum:
    E = exp(logit - c), loss = log sum E. A token's loss is exact up to 80 nats and cut there.
    """
    x = x.flatten(0, 1).to(BF16)
    return _HeadLoss.apply(x, weight, targets.flatten(), vocab_size, ignored)


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        ignored: int,
    ) -> torch.Tensor:
        counts = (targets != ignored).float()[:, None]  # (N, 1)
        ids = targets.clamp(min=0)
        narrow = weight.to(BF16)
        own = (x.float() * narrow.index_select(0, ids).float()).sum(-1, keepdim=True)  # (N, 1)
        logits = (x @ narrow.t()).float()  # (N, P)
        # One minimum keeps the exponential finite and takes out the columns that only pad.
        column = count(weight.size(0), x.device)
        cap = torch.where(column < vocab_size, _LARGEST_GAP, -1e30)  # (P,)
        e = torch.exp(torch.minimum(logits - own, cap))
        total = e.sum(-1, keepdim=True)  # (N, 1)
        share = counts / counts.sum().clamp(min=1)
        ctx.save_for_backward(x, narrow, ids, e.to(BF16), total, share)
        return (total.log() * share).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, narrow, ids, e, total, share = ctx.saved_tensors
        scale = grad * share / total  # (N, 1)
        # Probability minus one at the target, times total: in place of E there, so no scatter.
        column = count(e.size(1), e.device)
        is_target = column[None, :] == ids.int()[:, None]
        error = torch.where(is_target, (1 - total).to(BF16), e)  # (N, P)
        grad_x = ((error @ narrow).float() * scale).to(x.dtype)
        grad_weight = (error.t() @ (x.float() * scale).to(BF16)).float()
        return grad_x, grad_weight, None, None, None
