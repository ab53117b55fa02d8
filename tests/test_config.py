"""Settings and batch arithmetic: what is valid, and what the user is told when it is not."""

import json
import math
import re
from pathlib import Path

import pytest

from nanogpt_tpu.config import BatchPlan, ModelConfig, TrainConfig, preset, presets
from nanogpt_tpu.errors import UserError


def refusal(make, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        make(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("micro", "seq_len", "devices", "tokens", "micro_steps", "per_micro_step", "per_step"),
    [
        (2, 8, 1, 64, 4, 2, 8),
        (2, 8, 2, 64, 2, 4, 8),
        (2, 8, 4, 64, 1, 8, 8),
        (1, 1, 1, 1, 1, 1, 1),
        (3, 5, 7, 210, 2, 21, 42),
        (16, 1024, 8, 524_288, 4, 128, 512),
        (16, 1024, 1, 524_288, 32, 16, 512),
    ],
)
def test_batch_plan(micro, seq_len, devices, tokens, micro_steps, per_micro_step, per_step):
    plan = BatchPlan(micro, seq_len, devices, tokens)
    assert plan.num_micro_steps == micro_steps
    assert plan.sequences_per_micro_step == per_micro_step
    assert plan.tokens_per_micro_step == per_micro_step * seq_len
    assert plan.sequences_per_step == per_step
    assert per_step * seq_len == tokens


@pytest.mark.parametrize(
    ("devices", "tokens", "unit", "nearest"),
    [
        (1, 60, 16, "48 or 64"),
        (1, 8, 16, "16"),
        (1, 0, 16, "16"),
        (1, -16, 16, "16"),
        (2, 48, 32, "32 or 64"),
        (3, 64, 48, "48 or 96"),
    ],
)
def test_batch_that_does_not_divide(devices, tokens, unit, nearest):
    message = refusal(BatchPlan, 2, 8, devices, tokens)
    assert f"tokens_per_step {tokens} is not a positive multiple of {unit}" in message
    assert f"micro_batch_size 2 x seq_len 8 x {devices} device(s)" in message
    assert message.endswith(f"nearest valid {nearest}")


@pytest.mark.parametrize("name", ["micro_batch_size", "seq_len", "num_devices"])
@pytest.mark.parametrize("value", [0, -1])
def test_batch_plan_of_nothing(name, value):
    sizes = {"micro_batch_size": 2, "seq_len": 8, "num_devices": 1, "tokens_per_step": 64}
    assert f"{name} is {value}" in refusal(BatchPlan, **{**sizes, name: value})


@pytest.mark.parametrize("name", presets())
def test_presets_are_valid(name):
    config = preset(name)
    assert config.preset == name
    assert config.plan(1).num_micro_steps >= 1
    assert 0 < config.eval_share < 0.05
    assert config.warmup_steps < config.num_steps
    assert presets()[name].endswith(".")


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_presets_on_eight_devices(name):
    config = preset(name)
    assert config.plan(8).sequences_per_step == config.plan(1).sequences_per_step


def test_gpt2_preset_is_the_published_one():
    config, model = preset("gpt2"), preset("gpt2").model
    assert (model.n_layer, model.n_head, model.n_embd) == (12, 12, 768)
    assert (model.block_size, model.vocab_size, model.padded_vocab_size) == (1024, 50257, 50304)
    assert (model.norm, model.mlp, model.position) == ("layernorm", "gelu", "learned")
    assert model.bias and model.tie_embeddings and not model.qk_norm
    assert (config.tokens_per_step, config.learning_rate) == (524_288, 6e-4)
    assert config.num_steps * config.tokens_per_step == pytest.approx(10e9, rel=1e-3)


def test_eval_share_counts_the_evaluation_before_step_1():
    config = preset("tiny", num_steps=20, eval_every=10, eval_tokens=512, tokens_per_step=512)
    assert config.eval_share == pytest.approx((3 * 512 / 3) / (3 * 512 / 3 + 20 * 512))
    assert config.replace(eval_every=None).eval_share == 0


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"n_embd": 30, "n_head": 4}, ["n_embd 30", "n_head 4", "try n_embd 32"]),
        ({"n_embd": 2, "n_head": 4}, ["n_embd 2", "n_head 4", "try n_embd 4"]),
        ({"n_embd": 6, "n_head": 2, "position": "rope"}, ["3 is odd", "try n_embd 8"]),
        ({"seq_len": 64}, ["seq_len 64", "block_size 32"]),
        ({"micro_batch_size": 0}, ["micro_batch_size is 0"]),
        ({"num_steps": -3}, ["num_steps is -3"]),
        ({"eval_every": 0}, ["eval_every is 0", "above 0 or none"]),
        ({"grad_clip": 0.0}, ["grad_clip is 0", "above 0 or none"]),
        ({"learning_rate": -1e-3}, ["learning_rate is -0.001", "between 0 and"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "0.99"]),
        ({"beta2": 1.0}, ["beta2 is 1.0", "0.999999"]),
        ({"seed": -1}, ["seed is -1", "between 0 and"]),
        ({"norm": "layer_norm"}, ["'layer_norm'", "'layernorm'"]),
        ({"schedule": "cos"}, ["unknown schedule 'cos'", "'cosine'"]),
        ({"precision": "fp16"}, ["'fp16'", "'bf16'"]),
    ],
)
def test_wrong_values(changes, parts):
    message = refusal(preset, "tiny", **changes)
    assert all(part in message for part in parts), message


NO_NUMBER = (math.nan, math.inf, -math.inf, "0.1", True, None, [0.1])


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "beta1", "dropout"])
@pytest.mark.parametrize("value", NO_NUMBER)
def test_values_that_are_no_number(name, value):
    assert f"{name} is {value!r}: it must be a finite number" in refusal(
        preset, "tiny", **{name: value}
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_steps", "20", "a whole number"),
        ("num_steps", 20.0, "a whole number"),
        ("num_steps", math.inf, "a whole number"),
        ("num_steps", None, "a whole number"),
        ("micro_batch_size", True, "a whole number"),
        ("eval_every", "none", "a whole number or none"),
        ("grad_clip", math.nan, "a finite number or none"),
        ("session_hours", "8", "a finite number or none"),
        ("n_layer", 2.5, "a whole number"),
        ("vocab_size", False, "a whole number"),
        ("qk_norm", 1, "true or false"),
        ("gradient_checkpointing", "no", "true or false"),
        ("data", 3, "text or none"),
        ("device", None, "text"),
        ("norm", 1, "text"),
        ("model", {"n_layer": 2}, "ModelConfig"),
    ],
)
def test_values_of_another_type(name, value, wanted):
    assert refusal(preset, "tiny", **{name: value}) == f"{name} is {value!r}: it must be {wanted}"
    if name != "model":
        section = {"model": {name: value}} if hasattr(ModelConfig, name) else {name: value}
        assert refusal(TrainConfig.from_dict, section).startswith(f"{name} is {value!r}")


def test_whole_numbers_pass_where_floats_are_asked():
    config = preset("tiny", learning_rate=1, grad_clip=2, checkpoint_minutes=5, weight_decay=0)
    assert (config.learning_rate, config.grad_clip, config.checkpoint_minutes) == (1, 2, 5)


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [
        (lambda: preset("gtp2"), "unknown preset 'gtp2'", "'gpt2'"),
        (lambda: preset("gpt2", lerning_rate=1e-3), "'lerning_rate'", "'learning_rate'"),
        (lambda: preset("tiny").replace(n_heads=2), "'n_heads'", "'n_head'"),
        (lambda: TrainConfig.from_dict({"num_step": 3}), "'num_step'", "'num_steps'"),
        (lambda: TrainConfig.from_dict({"xyzzy": 3}), "'xyzzy'", "known: data, out"),
        (lambda: TrainConfig.from_dict({"model": {"n_layers": 3}}), "'n_layers'", "'n_layer'"),
    ],
)
def test_unknown_names_get_the_nearest_one(make, wrong, right):
    message = refusal(make)
    assert wrong in message and right in message


@pytest.mark.parametrize("values", [[], [["seed", 1]], "tiny", None, {"model": []}, {"model": 3}])
def test_config_that_is_no_object(values):
    assert "object of settings" in refusal(TrainConfig.from_dict, values)


@pytest.mark.parametrize("name", presets())
def test_config_survives_json(name):
    config = preset(name, data="d", out="o", session_hours=8.5, grad_clip=None, seq_len=16, seed=3)
    again = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.model == config.model and isinstance(again.model, ModelConfig)


def test_partial_config_keeps_the_defaults():
    config = TrainConfig.from_dict({"seed": 5, "model": {"n_layer": 3}})
    assert (config.seed, config.model.n_layer) == (5, 3)
    assert config.replace(seed=1337, n_layer=12) == TrainConfig()


def test_replace_changes_fields_of_both_classes_and_nothing_else():
    before = preset("tiny")
    after = before.replace(seed=9, n_layer=3)
    assert (after.seed, after.model.n_layer) == (9, 3)
    assert after.replace(seed=before.seed, n_layer=before.model.n_layer) == before


def test_seq_len_follows_block_size_unless_it_was_given():
    assert preset("tiny").replace(block_size=64).context == 64
    assert preset("tiny", seq_len=16).replace(block_size=64).context == 16
    assert preset("tiny", block_size=16).context == 16
    assert preset("gpt2", model=ModelConfig(block_size=128)).context == 128


def test_preset_is_no_label_to_change_afterwards():
    message = refusal(preset("tiny").replace, preset="gpt2")
    assert "'tiny'" in message and "'gpt2'" in message
    assert preset("tiny").replace(preset="tiny") == preset("tiny")


def test_folders_may_be_paths():
    config = preset("tiny", data=Path("some") / "data", out=Path("run"), resume=Path("old"))
    assert config == preset("tiny", data=str(Path("some/data")), out="run", resume="old")
    json.dumps(config.to_dict())


@pytest.mark.parametrize(("size", "padded"), [(1, 128), (128, 128), (129, 256), (50257, 50304)])
def test_vocabulary_is_padded_to_tiles(size, padded):
    assert ModelConfig(vocab_size=size).padded_vocab_size == padded


def test_messages_are_one_line():
    for changes in ({"n_embd": 31}, {"seq_len": 99}, {"sede": 1}, {"norm": ""}):
        assert re.fullmatch(r"[^\n]+", refusal(preset, "tiny", **changes))
