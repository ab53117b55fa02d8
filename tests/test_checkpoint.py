"""Commit, verification, rotation and refusal of checkpoints; no training here."""

import json
import re

import pytest
import torch

from nanogpt_tpu.checkpoint import (
    fill,
    find_checkpoints,
    newest_valid,
    open_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from nanogpt_tpu.config import preset
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.optim import make_optimizer
from nanogpt_tpu.ties import check_tied, find_ties
from nanogpt_tpu.tokenizer import load_tokenizer


def save(run_dir, step, keep_last=2):
    tensors = {"weight": torch.full((4,), float(step))}
    moments = {"exp_avg/weight": torch.zeros(4)}
    tokenizer = load_tokenizer("bytes")
    return save_checkpoint(run_dir, {"step": step}, tensors, moments, tokenizer, keep_last)


def test_a_checkpoint_holds_its_tensors_tokenizer_and_state(tmp_path):
    folder = save(tmp_path, 500)
    assert folder == tmp_path / "checkpoints" / "step_00000500"
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json"}
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.step == 500
    assert checkpoint.load("model.safetensors")["weight"].tolist() == [500.0] * 4
    latest = json.loads((tmp_path / "checkpoints" / "latest.json").read_text())
    assert latest["step"] == 500
    assert latest["folder"] == folder.name


def test_only_the_last_few_are_kept(tmp_path):
    for step in range(1, 11):
        save(tmp_path, step, keep_last=3)
    assert [c.step for c in find_checkpoints(tmp_path)] == [10, 9, 8]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4  # and latest.json


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step_00000007"])
def test_run_checkpoint_and_the_folder_between_all_open(tmp_path, place):
    save(tmp_path, 7)
    assert open_checkpoint(tmp_path / place).step == 7


def test_a_folder_without_its_mark_does_not_exist(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "state.json").unlink()
    assert open_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["half", "empty", "flip", "gone"])
def test_a_damaged_newest_is_named_and_passed_over(tmp_path, name, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes(
            {"half": content[: len(content) // 2], "empty": b"", "flip": flipped}[damage]
        )
    checkpoint, complaints = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert len(complaints) == 1
    assert name in complaints[0]
    assert "step_00000002" in complaints[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 3}', '{"format_version": 1}', "null"])
def test_a_torn_or_foreign_mark_is_no_mark(tmp_path, content):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "state.json").write_text(content)
    assert open_checkpoint(tmp_path).step == 1


def test_leftovers_of_a_killed_save_are_ignored(tmp_path):
    folder = save(tmp_path, 1)
    leftover = folder.with_name(".step_00000002.tmp")
    leftover.mkdir()
    for path in folder.iterdir():
        (leftover / path.name).write_bytes(path.read_bytes())
    assert open_checkpoint(tmp_path).step == 1
    assert save(tmp_path, 2).is_dir()
    assert not leftover.exists()


def test_nothing_there_says_so(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in or below"):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")


def test_a_save_that_fails_leaves_the_last_one_and_no_stump(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nanogpt_tpu.checkpoint.save_file", full_disk)
    with pytest.raises(UserError, match=r"No space left.*make room"):
        save(tmp_path, 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "latest.json",
        "step_00000001",
    ]
    assert open_checkpoint(tmp_path).step == 1


def stepped_optimizer(width=3):
    torch.manual_seed(0)
    layer = torch.nn.Linear(width, 2)
    optimizer = make_optimizer(layer, preset("tiny"))
    for _ in range(3):
        layer(torch.randn(4, width)).square().sum().backward()
        optimizer.step()
    return optimizer, {param: name for name, param in layer.named_parameters()}


def test_optimizer_state_round_trips():
    optimizer, names = stepped_optimizer()
    saved = {k: v.clone() for k, v in optimizer_tensors(optimizer, names).items()}
    assert {key.split("/")[0] for key in saved} == {"step", "exp_avg", "exp_avg_sq"}
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    restore_optimizer(optimizer, names, saved)
    restored = optimizer_tensors(optimizer, names)
    assert all(torch.equal(restored[key], saved[key]) for key in saved)


def test_state_of_another_model_is_refused():
    saved = optimizer_tensors(*stepped_optimizer(width=5))
    optimizer, names = stepped_optimizer()
    with pytest.raises(UserError, match=r"weight has shape \(2, 5\).*\(2, 3\)"):
        restore_optimizer(optimizer, names, saved)
    del saved["exp_avg/bias"], saved["exp_avg_sq/bias"], saved["step/bias"]
    with pytest.raises(UserError, match="'bias'"):
        restore_optimizer(optimizer, names, saved)


def weights_of(**shapes):
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "saved, words",
    [
        (weights_of(weight=(4, 3), bias=(4,)), "weight has shape (4, 3) there, (4, 2) in the"),
        (weights_of(weight=(4, 2)), "the model needs bias"),
        (weights_of(weight=(4, 2), bias=(4,), gain=(1,)), "the model has no gain"),
    ],
)
def test_weights_of_another_shape_name_both(saved, words):
    with pytest.raises(UserError, match=re.escape(words)):
        fill(torch.nn.Linear(2, 4), saved, "there")


class Tied(torch.nn.Module):
    """A foreign model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 2)
        self.head = torch.nn.Linear(2, 6, bias=False)
        self.head.weight = self.table.weight


def test_tied_weights_are_one_again_after_loading():
    model = Tied()
    tensors = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    fill(model, tensors, "there")
    assert model.head.weight is model.table.weight
    assert torch.equal(model.head.weight, tensors["table.weight"])


def test_weights_saved_apart_are_not_loaded_into_one():
    tensors = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    tensors["head.weight"] += 1
    with pytest.raises(UserError, match=r"head.weight and table.weight differ"):
        fill(Tied(), tensors, "there")


def test_a_broken_tie_is_loud():
    model = Tied()
    ties = find_ties(model)
    assert ties == [("head.weight", "table.weight")]
    check_tied(model, ties)
    model.head.weight = torch.nn.Parameter(model.table.weight.detach().clone())
    with pytest.raises(UserError, match="one parameter and are two on the device"):
        check_tied(model, ties)
