"""Attention kernels for the TPU, compiled ahead by `pallas_attention` and shipped with the package.

A kernel is bound to its shape and to the compiler's dialect version, so it is chosen by a key; at
run time it needs no jax. (The jax on Kaggle's TPU image makes kernels that its libtpu refuses.)
"""

import json
import lzma
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from nanogpt_tpu.config import ModelConfig

LANES = 128  # a TPU vector's
PAYLOADS = Path(__file__).parent / "payloads.json.xz"
LIBTPU = ("0.0.17",)  # versions that the payloads were compiled with, through `preflight`


@dataclass(frozen=True)
class Kernel:
    """Serialized forward and backward of one shape."""

    key: str
    forward: str
    backward: str


def kernel_key(micro_batch_size: int, seq_len: int, config: ModelConfig) -> str:
    """The name of a kernel: everything that its program depends on."""
    parts = [f"{micro_batch_size}x{seq_len}", f"{config.n_head}x{config.head_size}"]
    parts += ["qk_norm"] * config.qk_norm + ["rope"] * (config.position == "rope")
    return " ".join(parts)


def find(micro_batch_size: int, seq_len: int, config: ModelConfig) -> Kernel | None:
    """The kernel for sequences of this shape, if there is one and it may run here.

    `attention="pallas"` takes it anywhere (it runs on a TPU only, but can be traced on any
    machine); "auto" on a TPU with a libtpu that the kernels are known to work with.
    """
    if config.attention == "auto" and not _is_known_tpu():
        return None
    if config.attention not in ("auto", "pallas"):
        return None
    return _kernels().get(kernel_key(micro_batch_size, seq_len, config))


def describe(micro_batch_size: int, seq_len: int, config: ModelConfig) -> str:
    """How a TPU would compute attention, and why not in a kernel if not."""
    if config.attention == "sdpa" or config.attention_fp32 or config.dropout > 0:
        return "plain (attention_fp32, dropout or sdpa ask for it)"
    if find(micro_batch_size, seq_len, config) is not None:
        return "a kernel"
    if config.attention == "auto" and not _is_known_tpu():
        return f"matrix products (kernels are for TPUs with libtpu {' or '.join(LIBTPU)})"
    if config.attention == "xla":
        return "matrix products, as asked"
    known = ", ".join(sorted(_kernels()))
    key = kernel_key(micro_batch_size, seq_len, config)
    return f"matrix products (no kernel of shape {key}; there are: {known})"


def _is_known_tpu() -> bool:
    return os.environ.get("PJRT_DEVICE") == "TPU" and is_known_libtpu()


@cache
def is_known_libtpu() -> bool:
    """Whether the compiler installed here is one that the shipped kernels were tried with."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("libtpu") in LIBTPU
    except PackageNotFoundError:
        return False


@cache
def _kernels() -> dict[str, Kernel]:
    payloads = json.loads(lzma.decompress(PAYLOADS.read_bytes()))
    return {key: Kernel(key, *pair) for key, pair in payloads.items()}


def call_kernel(payload: str, inputs: list[torch.Tensor], shape: list[int]) -> torch.Tensor:
    """Put a kernel into the lazy graph; its one output is bf16 of `shape`."""
    import torch_xla

    call = torch_xla._XLAC._xla_tpu_custom_call
    (result,) = call(inputs, payload, [shape], [torch.bfloat16])
    return result
