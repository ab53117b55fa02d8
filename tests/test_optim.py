"""Parameter groups and the learning-rate table."""

import pytest
import torch

from nanogpt_tpu.config import preset
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.model import GPT
from nanogpt_tpu.optim import (
    MUON_MOMENTUM,
    Muon,
    learning_rate,
    make_optimizer,
    orthogonalize,
    param_groups,
    set_step,
)


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    model = GPT(preset("tiny").model)
    groups = param_groups(model, 0.1)
    members = [id(param) for group in groups for param in group["params"]]
    assert sorted(members) == sorted(id(param) for param in model.parameters())
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, param in model.named_parameters():
        is_matrix = not name.endswith("bias") and ".ln_" not in name and "ln_f" not in name
        assert decay[id(param)] == (0.1 if is_matrix else 0.0), name


SCHEDULES = {  # peak 1.0 at step 10 of 110, then to 0.1
    "cosine": {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.868198, 60: 0.55, 85: 0.231802, 110: 0.1, 120: 0.1},
    "linear": {1: 0.1, 10: 1.0, 35: 0.775, 60: 0.55, 85: 0.325, 110: 0.1, 120: 0.1},
    "wsd": {1: 0.1, 10: 1.0, 66: 1.0, 77: 0.775, 88: 0.55, 99: 0.325, 110: 0.1, 120: 0.1},
    "constant": {1: 0.1, 10: 1.0, 35: 1.0, 110: 1.0},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_learning_rate_follows_the_table(schedule):
    config = preset(
        "tiny",
        schedule=schedule,
        learning_rate=1.0,
        warmup_steps=10,
        num_steps=110,
        min_lr_ratio=0.1,
    )
    for step, rate in SCHEDULES[schedule].items():
        assert learning_rate(config, step) == pytest.approx(rate, abs=1e-6), step


def test_without_warmup_the_first_step_has_nearly_the_full_rate():
    config = preset("tiny", learning_rate=1.0, warmup_steps=0, num_steps=100)
    assert learning_rate(config, 1) == pytest.approx(1.0, abs=1e-3)


def test_gpt2_reaches_its_published_rates():
    config = preset("gpt2")
    assert learning_rate(config, 715) == 6e-4
    assert learning_rate(config, 19_073) == pytest.approx(6e-5)


def test_the_update_is_adamw_as_published():
    """One step of Loshchilov and Hutter's algorithm 2 by hand."""
    config = preset("tiny", weight_decay=0.1, beta1=0.9, beta2=0.95)
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, -2.0]])
    optimizer = make_optimizer(layer, config)
    optimizer.param_groups[0]["lr"] = 0.01
    layer.weight.grad = torch.tensor([[0.5, 4.0]])
    optimizer.step()
    # After one step the bias-corrected moments are the gradient and its square: a step of +-lr.
    expected = torch.tensor([[1.0, -2.0]]) * (1 - 0.01 * 0.1) - 0.01 * torch.tensor([[1.0, 1.0]])
    assert torch.allclose(layer.weight.data, expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 32, 32), (5, 16, 64), (2, 33, 70)])
def test_orthogonalize_keeps_directions_and_evens_out_lengths(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, singular, v = torch.linalg.svd(matrices, full_matrices=False)
    result = orthogonalize(matrices)
    for got, left, right, lengths in zip(result, u, v, singular, strict=True):
        along = left.T @ got @ right.T  # diagonal where the directions are kept
        assert torch.allclose(along, along.diag().diag(), atol=1e-3)
        well_above_zero = lengths > lengths.max() * 0.02
        assert along.diag()[well_above_zero].min() > 0.7
        assert along.diag().max() < 1.2


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6])
def test_orthogonalize_is_safe_for_any_size_and_rank(size):
    generator = torch.Generator().manual_seed(0)
    rank_one = torch.randn(1, 64, 1, generator=generator) @ torch.randn(1, 1, 64)
    result = orthogonalize(rank_one * size)
    assert torch.isfinite(result).all()
    assert torch.linalg.svdvals(result).max() < 1.2
    assert torch.equal(orthogonalize(torch.zeros(2, 8, 8)), torch.zeros(2, 8, 8))


def test_muon_takes_the_matrices_in_blocks_and_nothing_else():
    model = GPT(preset("tiny").model)
    optimizer = make_optimizer(model, preset("tiny", optimizer="muon"))
    (muon,) = (group for group in optimizer.param_groups if "num_parts" in group)
    names = {param: name for name, param in model.named_parameters()}
    assert {names[param] for param in muon["params"]} == {
        f"h.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    members = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(members) == sorted(id(param) for param in model.parameters())
    with pytest.raises(UserError, match="blocks named 'h'"):
        make_optimizer(torch.nn.Linear(2, 2), preset("tiny", optimizer="muon"))


def test_a_muon_step_is_that_of_its_paper():
    """Momentum, Nesterov, the nearest orthogonal matrix of q, k and v apart, AdamW's size."""
    config = preset("tiny", optimizer="muon", weight_decay=0.1)
    torch.manual_seed(0)
    model = GPT(config.model)
    optimizer = make_optimizer(model, config)
    assert isinstance(optimizer, Muon)
    weight = model.h[0].attn.c_attn.weight
    before = weight.detach().clone()
    gradients = [torch.randn_like(weight) for _ in range(2)]
    momentum = torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        weight.grad = gradient.clone()
        set_step(optimizer, config.replace(learning_rate=0.01, warmup_steps=0), step, float)
        optimizer.step()
        beta = MUON_MOMENTUM[0] + (MUON_MOMENTUM[1] - MUON_MOMENTUM[0]) * step / MUON_MOMENTUM[2]
        momentum = beta * momentum + (1 - beta) * gradient
        look_ahead = beta * momentum + (1 - beta) * gradient
        parts = [orthogonalize(part[None])[0] for part in look_ahead.chunk(3)]
        rate = optimizer.param_groups[-1]["lr"]
        before = before * (1 - rate * 0.1) - rate * 0.2 * 32**0.5 * torch.cat(parts)
    assert torch.allclose(weight, before, atol=1e-5)


def test_tall_and_wide_matrices_take_the_same_step():
    config = preset("tiny", optimizer="muon", weight_decay=0.0, learning_rate=0.01)
    torch.manual_seed(0)
    model = GPT(config.model)
    optimizer = make_optimizer(model, config)
    tall, wide = model.h[0].mlp.c_fc.weight, model.h[0].mlp.c_proj.weight
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    tall.grad = torch.randn_like(tall)
    wide.grad = tall.grad.T.clone()
    before = tall.detach().clone(), wide.detach().clone()
    set_step(optimizer, config, 10, float)
    optimizer.step()
    assert torch.allclose(tall - before[0], (wide - before[1]).T, atol=1e-6)
    assert (tall - before[0]).abs().sum() > 0
