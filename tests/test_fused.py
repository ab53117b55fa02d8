"""The lean pieces against PyTorch's own operators in fp32: values and gradients.

What is lean on a TPU is ordinary tensor code, so it runs here on the CPU once told to.
"""

import pytest
import torch
import torch.nn.functional as F

from nanogpt_tpu import fused, preset
from nanogpt_tpu.model import GPT, IGNORED_TARGET

BF16_ERROR = 0.02  # relative, in norm: a few roundings of 2^-9


@pytest.fixture
def lean(monkeypatch):
    monkeypatch.setattr(fused, "is_lean", lambda tensor: True)


def bf16_valued(*shape):
    """Random numbers that bf16 represents, so that only the arithmetic differs."""
    return torch.randn(shape).bfloat16().float()


def close(value, reference, error=BF16_ERROR):
    difference = (value.float() - reference.float()).norm()
    assert difference <= error * reference.float().norm().clamp(min=1e-6), float(difference)


def compare(lean_function, plain_function, *inputs):
    """Both functions' value and gradients on the same fp32 inputs; the first ends in any dtype."""
    outcomes = []
    for function in (lean_function, plain_function):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        y = function(*leaves)
        torch.manual_seed(1)
        y.float().mul(bf16_valued(*y.shape)).sum().backward()
        outcomes.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for value, reference in zip(*outcomes, strict=True):
        assert value.shape == reference.shape
        close(value, reference)


def test_linear(lean):
    x, weight, bias = bf16_valued(2, 5, 8), bf16_valued(12, 8), bf16_valued(12)
    compare(fused.linear, F.linear, x, weight, bias)
    compare(lambda x, w: fused.linear(x, w, None), F.linear, x, weight)


def test_weight_gradients_are_fp32(lean):
    weight = bf16_valued(12, 8).requires_grad_()
    fused.linear(bf16_valued(2, 5, 8).bfloat16(), weight, None).sum().backward()
    assert weight.grad.dtype == torch.float32


def test_product_of_heads_with_bias(lean):
    x, weight, bias = bf16_valued(2, 5, 8), bf16_valued(3, 4, 8), bf16_valued(3, 4)

    def plain(x, weight, bias):
        return torch.einsum("btc,hdc->bhtd", x, weight) + bias[None, :, None]

    compare(lambda *args: fused.product("btc,hdc->bhtd", "hd", *args), plain, x, weight, bias)


def test_embedding_adds_up_the_gradient_of_repeated_ids(lean):
    idx = torch.tensor([[1, 1, 3], [0, 1, 2]])
    compare(lambda w: fused.embed(w, idx), lambda w: F.embedding(idx, w), bf16_valued(5, 8))


def test_norms(lean):
    x, gain, bias = bf16_valued(2, 5, 8), bf16_valued(8), bf16_valued(8)
    compare(lambda x: fused.rms_norm(x, 1e-5), lambda x: F.rms_norm(x, (8,), eps=1e-5), x)
    compare(
        lambda *args: fused.layer_norm(*args, 1e-5),
        lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5),
        *(x, gain, bias),
    )


@pytest.mark.parametrize(
    ("lean_function", "plain_function"),
    [
        (fused.relu2, lambda x: F.relu(x).square()),
        (fused.gelu, lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_activations(lean, lean_function, plain_function):
    compare(lean_function, plain_function, bf16_valued(4, 64))


def test_head_loss_with_padding_and_ignored_targets(lean):
    x, weight, vocab_size = bf16_valued(2, 5, 16), bf16_valued(12, 16), 9
    targets = torch.tensor([[0, 8, 3, IGNORED_TARGET, 1], [2, IGNORED_TARGET, 7, 4, 0]])

    def plain(x, weight):
        logits = F.linear(x, weight[:vocab_size]).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED_TARGET)

    compare(
        lambda x, w: fused.head_loss(x, w, targets, vocab_size, IGNORED_TARGET), plain, x, weight
    )


def test_head_loss_survives_a_hopeless_prediction(lean):
    x = torch.full((1, 2, 16), 4.0, requires_grad=True)
    weight = torch.stack([torch.full((16,), -4.0), torch.full((16,), 4.0)])  # gap of 512 nats
    loss = fused.head_loss(x, weight, torch.zeros(1, 2, dtype=torch.long), 2, IGNORED_TARGET)
    loss.backward()
    assert float(loss) == pytest.approx(80, rel=0.01) and x.grad.isfinite().all()


SHAPE = {"n_layer": 2, "n_embd": 96, "block_size": 160, "vocab_size": 250}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tpu-fast", {"n_head": 2, "zero_init_residual": False}),
        ("gpt2", {"n_head": 4}),
        ("blog", {"n_head": 4, "attention_fp32": False, "zero_init_residual": False}),
        ("gpt2", {"n_head": 4, "mlp": "swiglu", "tie_embeddings": False}),
        ("gpt2", {"n_head": 4, "attention_fp32": True}),
    ],
)
def test_whole_model(lean, monkeypatch, name, changes):
    torch.manual_seed(0)
    model = GPT(preset(name, **SHAPE, **changes).model)
    for param in model.parameters():
        param.data.copy_(param.data.bfloat16())
    idx = torch.randint(0, 250, (2, 160))
    results = []
    for is_lean in (True, False):
        monkeypatch.setattr(fused, "is_lean", lambda tensor, value=is_lean: value)
        model.zero_grad()
        logits, loss = model(idx, idx.roll(-1, 1))
        loss.backward()
        assert (logits is None) == is_lean
        results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    (lean_loss, lean_grads), (loss, grads) = results
    assert lean_loss == pytest.approx(float(loss), rel=1e-3)
    for value, reference in zip(lean_grads, grads, strict=True):
        close(value, reference, 0.05)


def test_a_position_does_not_see_what_follows(lean):
    """The lean attention in blocks of rows is causal across their edges, too."""
    torch.manual_seed(0)
    model = GPT(preset("tpu-fast", **SHAPE, n_head=2, zero_init_residual=False).model)
    idx = torch.randint(0, 250, (1, 160))
    changed = idx.clone()
    changed[:, 130:] = (changed[:, 130:] + 1) % 250
    with torch.no_grad():
        before, after = model.features(idx), model.features(changed)
    assert torch.equal(before[:, :130], after[:, :130])
    assert not torch.equal(before[:, 130:], after[:, 130:])
