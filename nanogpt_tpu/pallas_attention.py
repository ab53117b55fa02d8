"""The attention kernel: QK-norm, rotation and causal attention on packed queries, keys, values.

    python -m nanogpt_tpu.pallas_attention          # writes payloads.json.xz; jax 0.6.2

One program instance holds all rows of 128 lanes: one head of 128, or two of 64. All T rows fit the
TPU's vector memory, so there is no online softmax: four blocks of rows, each against the keys up to
its end (5/8 of the square). With QK-norm scores are bounded and the exponential needs no maximum.
Nothing but the output is kept for the backward pass.

Letters: B sequences, T tokens, H heads, D = head size, L = 128 lanes.
"""

import base64
import functools
import io
import json
import lzma
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from nanogpt_tpu.attention import QK_EPS
from nanogpt_tpu.config import ModelConfig, preset
from nanogpt_tpu.kernels import LANES, PAYLOADS, kernel_key

ROWS = 256  # of a block
LOG2_E = math.log2(math.e)
VMEM_BYTES = 64 * 2**20
SHIPPED = {"tpu-fast": (8, 16, 24, 32), "gpt2": (8, 16, 24, 32)}  # micro-batch sizes, T = 1024
_NT, _NN, _TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


def _dot(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _normed(x: jax.Array, config: ModelConfig) -> tuple[jax.Array, Any]:
    """QK-norm in fp32 and its scale; x itself and 1 without QK-norm."""
    x = x.astype(jnp.float32)
    if not config.qk_norm:
        return x, 1.0
    scale = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + QK_EPS)
    return x * scale, scale


def _rotated(x: jax.Array, tables: tuple[jax.Array, ...]) -> jax.Array:
    if not tables:
        return x
    cos, signed_sin = tables
    return x * cos + pltpu.roll(x, x.shape[1] // 2, 1) * signed_sin


def _rotated_back(grad: jax.Array, tables: tuple[jax.Array, ...]) -> jax.Array:
    if not tables:
        return grad
    cos, signed_sin = tables
    return grad * cos + pltpu.roll(grad * signed_sin, grad.shape[1] // 2, 1)


def _exponentials(q: jax.Array, k: jax.Array, is_bounded: bool) -> jax.Array:
    """Softmax numerators of the last block of rows against all keys: (ROWS, n) fp32."""
    scores = _dot(q, k, _NT)
    before, n = scores.shape[1] - scores.shape[0], scores.shape[0]
    row = lax.broadcasted_iota(jnp.int32, (n, n), 0)
    column = lax.broadcasted_iota(jnp.int32, (n, n), 1)
    corner = jnp.where(column <= row, scores[:, before:], -1e30)
    scores = jnp.concatenate([scores[:, :before], corner], 1) if before else corner
    if not is_bounded:
        scores = scores - jnp.max(scores, 1, keepdims=True)
    return jnp.exp2(scores)


def _heads(config: ModelConfig) -> Iterator[tuple[slice, slice, slice, slice]]:
    """For each head of an instance: its lanes of the output, and of packed q, k, v."""
    size = config.head_size
    for start in range(0, LANES, size):
        yield tuple(slice(at + start, at + start + size) for at in (0, 0, LANES, 2 * LANES))  # type: ignore[misc]


def forward_kernel(qkv: Any, *refs: Any, config: ModelConfig) -> None:
    """The qkv block is (1, T, 3L), tables (T, D), the output block (1, T, L)."""
    y = refs[-1]
    tables = tuple(table[...] for table in refs[:-1])
    scale = LOG2_E / math.sqrt(config.head_size)
    for out, at_q, at_k, at_v in _heads(config):
        q = _rotated(_normed(qkv[0, :, at_q], config)[0], tables) * scale
        k = _rotated(_normed(qkv[0, :, at_k], config)[0], tables)
        q, k, v = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), qkv[0, :, at_v]
        for start in range(0, q.shape[0], ROWS):
            end = start + ROWS
            e = _exponentials(q[start:end], k[:end], config.qk_norm)
            total = jnp.sum(e, 1, keepdims=True)
            y[0, start:end, out] = (_dot(e.astype(jnp.bfloat16), v[:end], _NN) / total).astype(
                y.dtype
            )


def backward_kernel(qkv: Any, *refs: Any, config: ModelConfig) -> None:
    """As forward, then the output, its gradient, the gradient of qkv; scratch for k and v."""
    y, grad, grad_qkv, grad_k, grad_v = refs[-5:]
    tables = tuple(table[...] for table in refs[:-5])
    scale = 1 / math.sqrt(config.head_size)
    for out, at_q, at_k, at_v in _heads(config):
        q_normed, q_scale = _normed(qkv[0, :, at_q], config)
        k_normed, k_scale = _normed(qkv[0, :, at_k], config)
        q = (_rotated(q_normed, tables) * (scale * LOG2_E)).astype(jnp.bfloat16)
        k = _rotated(k_normed, tables).astype(jnp.bfloat16)
        v = qkv[0, :, at_v]
        grad_k[...], grad_v[...] = jnp.zeros_like(grad_k), jnp.zeros_like(grad_v)
        for start in range(0, q.shape[0], ROWS):
            end = start + ROWS
            rows = slice(start, end)
            e = _exponentials(q[rows], k[:end], config.qk_norm)
            inverse = 1.0 / jnp.sum(e, 1, keepdims=True)
            grad_y = grad[0, rows, out].astype(jnp.float32)
            inner = jnp.sum(grad_y * y[0, rows, out].astype(jnp.float32), 1, keepdims=True)
            share = (grad_y * inverse).astype(jnp.bfloat16)
            error = (e * (_dot(share, v[:end], _NT) - inner * inverse)).astype(jnp.bfloat16)
            grad_v[:end, :] += _dot(e.astype(jnp.bfloat16), share, _TN)
            grad_k[:end, :] += _dot(error, q[rows], _TN)
            grad_q = _dot(error, k[:end], _NN) * scale
            here = tuple(table[rows] for table in tables)
            grad_qkv[0, rows, at_q] = _grad_of_input(
                grad_q, here, q_normed[rows], q_scale[rows] if config.qk_norm else None
            ).astype(grad_qkv.dtype)
        grad_qkv[0, :, at_k] = _grad_of_input(
            grad_k[...] * (1 / LOG2_E), tables, k_normed, k_scale if config.qk_norm else None
        ).astype(grad_qkv.dtype)
        grad_qkv[0, :, at_v] = grad_v[...].astype(grad_qkv.dtype)


def _grad_of_input(
    grad: jax.Array, tables: tuple[jax.Array, ...], normed: jax.Array, scale: Any
) -> jax.Array:
    """Back through rotation and QK-norm."""
    grad = _rotated_back(grad, tables)
    if scale is None:
        return grad
    return (grad - normed * jnp.mean(grad * normed, -1, keepdims=True)) * scale


def _call(
    kernel: Any, config: ModelConfig, inputs: list[jax.Array], width: int, **more: Any
) -> Any:
    """Run a kernel over (sequence, 128 lanes of heads); `width` lanes of output each."""
    batch, seq_len, packed = inputs[0].shape
    num_groups = packed // (3 * LANES)

    def spec(array: Any) -> pl.BlockSpec:
        if array.ndim == 2:
            return pl.BlockSpec(array.shape, lambda b, h: (0, 0))
        lanes = array.shape[2] // num_groups
        return pl.BlockSpec((1, seq_len, lanes), lambda b, h: (b, 0, h))

    out = jax.ShapeDtypeStruct((batch, seq_len, width * num_groups), jnp.bfloat16)
    if not more.get("interpret"):
        more["compiler_params"] = pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES
        )
    return pl.pallas_call(
        functools.partial(kernel, config=config),
        grid=(batch, num_groups),
        in_specs=[spec(array) for array in inputs],
        out_specs=spec(out),
        out_shape=out,
        name="main",  # the old libtpu looks for this name
        **more,
    )(*inputs)


def forward(config: ModelConfig, *inputs: jax.Array, **more: Any) -> jax.Array:
    """Inputs qkv (B, T, 3C) bf16 and, with rope, two tables (T, D): output (B, T, C)."""
    return _call(forward_kernel, config, list(inputs), LANES, **more)


def backward(config: ModelConfig, *inputs: jax.Array, **more: Any) -> jax.Array:
    """Inputs of `forward`, its output and the gradient of it: the gradient of qkv."""
    scratch = [pltpu.VMEM((inputs[0].shape[1], config.head_size), jnp.float32)] * 2
    return _call(backward_kernel, config, list(inputs), 3 * LANES, scratch_shapes=scratch, **more)


def payloads(config: ModelConfig, micro_batch_size: int, seq_len: int) -> list[str]:
    """Serialized forward and backward kernels, for `torch_xla._XLAC._xla_tpu_custom_call`."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    batch, width = (micro_batch_size, seq_len), config.n_embd
    inputs = [bf16((*batch, 3 * width))]
    if config.position == "rope":
        inputs += [jax.ShapeDtypeStruct((seq_len, config.head_size), jnp.float32)] * 2
    both = ((forward, inputs), (backward, [*inputs, *[bf16((*batch, width))] * 2]))
    return [_payload(functools.partial(function, config), args) for function, args in both]


def _payload(function: Any, inputs: list[Any]) -> str:
    lowered = jax.jit(function).trace(*inputs).lower(lowering_platforms=("tpu",))
    found: list[str] = []

    def visit(operation: Any) -> None:
        if operation.name == "stablehlo.custom_call":
            found.append(operation.attributes["backend_config"].value)
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)

    visit(lowered.compiler_ir("stablehlo").operation)
    (payload,) = found
    settings = json.loads(payload)
    call = settings["custom_call_config"]
    call["body"] = _without_locations(call["body"])
    return json.dumps(settings)


def _without_locations(body: str) -> str:
    """A base64 program without the file and line each operation came from: they are in no result.

    With them a payload would change with every edit above its kernel, and with the reader's path.
    """
    context = ir.Context()
    context.allow_unregistered_dialects = True
    with context:
        module = ir.Module.parse(base64.b64decode(body))
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        stripped = io.BytesIO()
        module.operation.write_bytecode(stripped, desired_version=0)
    return base64.b64encode(stripped.getvalue()).decode()


def all_payloads() -> dict[str, list[str]]:
    """Every shipped kernel's forward and backward, by key."""
    found = {}
    for name, sizes in SHIPPED.items():
        model = preset(name).model
        for size in sizes:
            key = kernel_key(size, model.block_size, model)
            found[key] = payloads(model, size, model.block_size)
    return found


if __name__ == "__main__":
    PAYLOADS.write_bytes(lzma.compress(json.dumps(all_payloads()).encode(), preset=9))
