"""Run in a process of its own by test_kernels.py: jax and forks do not go together.

Prints one JSON object: relative errors of the kernels in Pallas' interpret mode against plain fp32
attention, and whether the payloads made anew are the shipped ones.
"""

import json
import lzma

import jax
import torch
import torch.nn.functional as F

from nanogpt_tpu import fused, kernels, pallas_attention, preset
from nanogpt_tpu.attention import QK_EPS, rope_tables, rotate

SHAPES = [
    ("tpu-fast", 1, 1024, 2),
    ("tpu-fast", 2, 512, 1),
    ("gpt2", 1, 1024, 2),
    ("gpt2", 2, 256, 4),
]


def plain(qkv, config):
    """fp32 attention on packed (B, T, 3C): each 128 lanes' queries, keys and values together."""
    batch, seq_len, packed = qkv.shape
    groups = packed // (3 * kernels.LANES)
    parts = qkv.view(batch, seq_len, groups, 3, kernels.LANES).unbind(3)
    heads = (batch, seq_len, config.n_head, config.head_size)
    q, k, v = (part.reshape(heads).transpose(1, 2) for part in parts)
    if config.qk_norm:
        q, k = fused.rms_norm(q, QK_EPS), fused.rms_norm(k, QK_EPS)
    if config.position == "rope":
        tables = rope_tables(seq_len, config.head_size)
        q, k = rotate(q, *tables), rotate(k, *tables)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, seq_len, packed // 3)


def relative_error(value, reference):
    return float((value - reference).norm() / reference.norm())


def to_torch(array):
    return torch.tensor(jax.device_get(array.astype("float32")))


def to_jax(tensor):
    return jax.numpy.asarray(tensor.detach().numpy(), dtype="bfloat16")


def errors(name, batch, seq_len, n_head):
    """Of the output and of the gradient."""
    size = 128 if name == "tpu-fast" else 64
    config = preset(name, n_head=n_head, n_embd=n_head * size, block_size=seq_len).model
    torch.manual_seed(0)
    qkv = torch.randn(batch, seq_len, 3 * config.n_embd).bfloat16().float().requires_grad_()
    grad = torch.randn(batch, seq_len, config.n_embd).bfloat16().float()
    reference = plain(qkv, config)
    reference.backward(grad)
    inputs = [to_jax(qkv)]
    if config.position == "rope":
        cos, sin = rope_tables(seq_len, config.head_size)
        signed = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        inputs += [jax.numpy.asarray(table.numpy()) for table in signed]
    y = pallas_attention.forward(config, *inputs, interpret=True)
    grad_qkv = pallas_attention.backward(config, *inputs, y, to_jax(grad), interpret=True)
    return [
        relative_error(to_torch(y), reference.detach()),
        relative_error(to_torch(grad_qkv), qkv.grad),
    ]


def error_of_large_scores():
    """Without QK-norm the kernel subtracts the maximum: e^200 would not be finite."""
    config = preset("gpt2", n_head=2, n_embd=128, block_size=256).model
    torch.manual_seed(0)
    qkv = torch.randn(1, 256, 384)
    qkv[..., :256] *= 10  # queries and keys: scores of some hundreds
    qkv = qkv.bfloat16().float()
    y = pallas_attention.forward(config, to_jax(qkv), interpret=True)
    return relative_error(to_torch(y), plain(qkv, config))


if __name__ == "__main__":
    shipped = json.loads(lzma.decompress(kernels.PAYLOADS.read_bytes()))
    result = {
        "jax": jax.__version__,
        "errors": [errors(*shape) for shape in SHAPES],
        "large_scores": error_of_large_scores(),
        "same_payloads": pallas_attention.all_payloads() == shipped,
    }
    print(json.dumps(result))
