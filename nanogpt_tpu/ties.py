"""Tied weights: one parameter under two names, which must stay one on every device and disk."""

import torch
from torch import nn

from nanogpt_tpu.errors import UserError

Ties = list[tuple[str, str]]


def find_ties(model: nn.Module) -> Ties:
    """(name, first name) of each parameter that has a second name."""
    first_name: dict[nn.Parameter, str] = {}
    ties = []
    for name, param in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(param, name)
        if first != name:
            ties.append((name, first))
    return ties


def tie(model: nn.Module, ties: Ties) -> None:
    """Make the parameters of each pair one again, the first."""
    for name, first in ties:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


def check_tied(model: nn.Module, ties: Ties) -> None:
    """Refuse to go on with a model whose tied parameters have come apart.

    Raises:
        UserError: two names of what was one parameter now hold two.
    """
    for name, first in ties:
        if model.get_parameter(name) is not model.get_parameter(first):
            raise UserError(
                f"{name} and {first} were one parameter and are two on the device: they would "
                "train apart; tie them again, or compute the head with F.linear(x, table.weight)"
            )


def check_tied_values(tensors: dict[str, torch.Tensor], ties: Ties, origin: object) -> None:
    """Refuse saved weights whose values differ where the model has one parameter.

    Raises:
        UserError: they do; loading would silently keep one of the two.
    """
    for name, first in ties:
        if name in tensors and first in tensors and not torch.equal(tensors[name], tensors[first]):
            raise UserError(
                f"{origin}: {name} and {first} differ, in the model they are one parameter: the "
                "weights were saved from a model whose tie was broken; load them untied"
            )
