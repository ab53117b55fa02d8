"""GPT-2's weights from Hugging Face: every form of them comes in whole, or is refused in a line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import logits_of, randomize

import nanogpt_tpu as ng

ng.patch_tpu_env("cpu")  # before transformers imports accelerate

from transformers import GPT2Config, GPT2LMHeadModel

from nanogpt_tpu.cli import main
from nanogpt_tpu.tokenizer import load_tokenizer


def write_gpt2(folder, change_config=None, change=None, **sizes):
    """A small folder as the hub has it; `change` edits its tensors in place."""
    names = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 257}
    model = randomize(GPT2LMHeadModel(GPT2Config(**{**names, **sizes})))
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **(change_config or {})}))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return model


def as_on_the_hub(tensors):
    """openai-community/gpt2's own names: no prefix, no head, causal masks kept as tensors."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    for n in range(2):
        tensors[f"h.{n}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        tensors[f"h.{n}.attn.masked_bias"] = torch.tensor(-1e4)


@pytest.mark.parametrize("change", [None, as_on_the_hub])
def test_names_of_the_hub(tmp_path, change):
    theirs = write_gpt2(tmp_path / "in", change=change)
    assert main(["import-hf", str(tmp_path / "in"), "--out", str(tmp_path / "run")]) == 0
    ours, tokenizer, _ = ng.load_checkpoint(tmp_path / "run")
    assert tokenizer.kind == "bytes"
    difference = logits_of(ours, num_tokens=16) - logits_of(theirs, num_tokens=16)
    assert float(difference.abs().max()) < 1e-5
    text = ng.generate(ours, tokenizer, "ab", max_new_tokens=3, seed=1)
    assert text.startswith("ab")


def test_weights_in_parts(tmp_path):
    theirs = write_gpt2(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").unlink()
    theirs.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").is_file()
    ng.import_hf(tmp_path / "in", tmp_path / "run")
    ours, _, _ = ng.load_checkpoint(tmp_path / "run")
    difference = logits_of(ours, num_tokens=16) - logits_of(theirs, num_tokens=16)
    assert float(difference.abs().max()) < 1e-5


def test_sizes_under_their_other_names(tmp_path):
    theirs = write_gpt2(tmp_path / "in", n_embd=48, n_head=4)  # 12 heads would fit as well
    path = tmp_path / "in" / "config.json"
    path.write_text(path.read_text().replace('"n_head"', '"num_attention_heads"'))
    ng.import_hf(tmp_path / "in", tmp_path / "run")
    ours, _, _ = ng.load_checkpoint(tmp_path / "run")
    difference = logits_of(ours, num_tokens=16) - logits_of(theirs, num_tokens=16)
    assert float(difference.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_come_in_as_fp32(tmp_path, dtype):
    theirs = write_gpt2(tmp_path / "in").to(dtype)
    theirs.save_pretrained(tmp_path / "in")
    ng.import_hf(tmp_path / "in", tmp_path / "run")
    ours, _, _ = ng.load_checkpoint(tmp_path / "run")
    difference = logits_of(ours, num_tokens=16) - logits_of(theirs.float(), num_tokens=16)
    assert float(difference.abs().max()) < 1e-5


def wider(tensors):
    tensors["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(32, 99)


def shorter(tensors):
    del tensors["transformer.h.1.mlp.c_fc.weight"]


def longer(tensors):
    tensors["transformer.extra"] = torch.zeros(1)


def quantized(tensors):
    tensors.update({name: (tensor * 100).to(torch.int8) for name, tensor in tensors.items()})


def twice(tensors):
    tensors["wte.weight"] = 2 * tensors["transformer.wte.weight"]


def without_positions(tensors):
    del tensors["transformer.wpe.weight"]


def another_head(tensors):
    tensors["lm_head.weight"] = torch.zeros(257, 32)


@pytest.mark.parametrize(
    "change_config, change, words",
    [
        ({"model_type": "llama"}, None, "model_type is 'llama'"),
        ({"activation_function": "gelu"}, None, "activation_function is 'gelu'"),
        ({"layer_norm_epsilon": 1e-6}, None, "layer_norm_epsilon is 1e-06"),
        ({"n_inner": 64}, None, "n_inner is 64"),
        ({"scale_attn_by_inverse_layer_idx": True}, None, "scale_attn_by_inverse_layer_idx"),
        ({"n_layer": 1_000_000_000}, None, "weights of 2 layers, n_layer is 1000000000"),
        ({"n_layer": "two"}, None, "n_layer is 'two'"),
        ({"n_embd": 1_000_000}, None, "(16, 32), its config.json says (16, 1000000)"),
        ({"n_positions": 64}, None, "wpe.weight has shape (16, 32)"),
        ({"vocab_size": 300}, None, "wte.weight has shape (257, 32)"),
        ({"num_attention_heads": 4}, None, "num_attention_heads is 4, n_head 2"),
        ({"n_positions": 10**13}, without_positions, "the model needs wpe.weight"),
        (None, quantized, "is of torch.int8: quantized weights"),
        (None, twice, "wte.weight is there twice"),
        (None, wider, "(99, 32) there, (128, 32) in the model"),
        (None, shorter, "the model needs h.1.mlp.c_fc.weight"),
        (None, longer, "the model has no extra"),
        (None, another_head, "lm_head.weight differs from wte.weight"),
    ],
)
def test_what_is_not_ours_is_refused_in_a_line(tmp_path, capsys, change_config, change, words):
    write_gpt2(tmp_path / "in", change_config, change)
    assert main(["import-hf", str(tmp_path / "in"), "--out", str(tmp_path / "run")]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert words in line
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_pickle_is_never_opened(tmp_path, capsys):
    write_gpt2(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").rename(tmp_path / "in" / "pytorch_model.bin")
    assert main(["import-hf", str(tmp_path / "in"), "--out", str(tmp_path / "run")]) == 2
    assert "only pytorch_model.bin, which can run code" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_half_a_file(tmp_path, capsys, name):
    write_gpt2(tmp_path / "in")
    content = (tmp_path / "in" / name).read_bytes()
    (tmp_path / "in" / name).write_bytes(content[: len(content) // 2])
    assert main(["import-hf", str(tmp_path / "in"), "--out", str(tmp_path / "run")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_names_that_no_file_can_have(tmp_path, capsys):
    write_gpt2(tmp_path / "in")
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"wte.weight": "\\ud800.safetensors"}}')
    assert main(["import-hf", str(tmp_path / "in"), "--out", str(tmp_path / "run")]) == 2
    assert "weights cannot be read" in capsys.readouterr().err


def test_imported_weights_are_begun_with_not_gone_on_with(tmp_path, capsys):
    write_gpt2(tmp_path / "in")
    ng.import_hf(tmp_path / "in", tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text("some words to learn from " * 60)
    own = str(tmp_path / "gpt2" / "tokenizer.json")
    ng.prepare(tmp_path / "text.txt", tmp_path / "data", own)
    run = ["train", "--preset", "tiny", "--device", "cpu", "--data", str(tmp_path / "data")]
    run += ["--num-steps", "1", "--tokens-per-step", "32", "--eval-every", "none", "--out"]
    assert main([*run, str(tmp_path / "gpt2")]) == 2
    assert "with --init-from and give another --out" in capsys.readouterr().err
    assert main([*run, str(tmp_path / "new"), "--init-from", str(tmp_path / "gpt2")]) == 0
    model, _, state = ng.load_checkpoint(tmp_path / "new")
    assert (model.config.n_embd, model.config.block_size, state["step"]) == (32, 16, 1)
