"""Parameter groups and the learning-rate table."""

import pytest
import torch

from nanogpt_tpu.config import preset
from nanogpt_tpu.model import GPT
from nanogpt_tpu.optim import learning_rate, make_optimizer, param_groups


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
