"""To and from Hugging Face: the real transformers computes the same logits, both ways."""

import json

import pytest
import torch

import nanogpt_tpu as ng

ng.patch_tpu_env("cpu")  # before transformers imports accelerate

from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from nanogpt_tpu.checkpoint import save_checkpoint
from nanogpt_tpu.cli import main
from nanogpt_tpu.config import ModelConfig
from nanogpt_tpu.hf_format import architecture
from nanogpt_tpu.tokenizer import load_tokenizer

SHAPES = {  # layers, heads, width: all of GPT-2's layers for small, two of them for the others
    "small": (12, 12, 768),
    "medium": (2, 16, 1024),
    "large": (2, 20, 1280),
    "xl": (2, 25, 1600),
}
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 48, "block_size": 32, "vocab_size": 257}


def randomize(model):
    """Nothing stays zero or one: biases and gains count too."""
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        is_gain = param.dim() < 2 and name.endswith("weight")
        torch.nn.init.normal_(param, mean=float(is_gain), std=0.05)
    return model.eval()


def make_run(folder, preset="tiny", **changes):
    """A run folder with random weights, as training leaves it."""
    config = ng.preset(preset, **{**SMALL, **changes})
    model, tokenizer = randomize(ng.GPT(config.model)), load_tokenizer("bytes")
    state = {
        "step": 3, "tokens": 30, "val_loss": 2.5, "model_class": "GPT", "config": config.to_dict(),
        "tokenizer": tokenizer.describe(),
        "data": {"source": "songs", "num_tokens": 99, "identity": "0"},
    }  # fmt: skip
    folder.mkdir()
    save_checkpoint(folder, state, dict(model.state_dict()), {}, tokenizer, 1)
    return model


def logits_of(model, vocab_size=257, num_tokens=32):
    torch.manual_seed(2)
    idx = torch.randint(vocab_size, (2, num_tokens))
    with torch.no_grad():
        found = model(idx)
    return found[0] if isinstance(found, tuple) else found.logits


def load_exported(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_gpt2_is_exact_both_ways(tmp_path, gpt2_files, shape):
    n_layer, n_head, n_embd = SHAPES[shape]
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    theirs = randomize(GPT2LMHeadModel(GPT2Config(**sizes)))
    theirs.save_pretrained(tmp_path / "theirs")
    found = ng.import_hf(tmp_path / "theirs", tmp_path / "run")
    ours, tokenizer, state = ng.load_checkpoint(tmp_path / "run")
    assert found["num_params"] == sum(p.numel() for p in theirs.parameters())
    assert (tokenizer.kind, state["step"]) == ("gpt2", 0)
    expected = logits_of(theirs, 50257, 64)
    assert float((logits_of(ours, 50257, 64) - expected).abs().max()) < 1e-4
    found = ng.export_hf(tmp_path / "run", tmp_path / "back")
    assert found["architecture"] == "GPT2LMHeadModel"
    assert found["max_logit_difference"] < 1e-4
    back = load_exported(tmp_path / "back")
    assert float((logits_of(back, 50257, 64) - expected).abs().max()) < 1e-4


def test_the_published_sizes():
    small = ng.GPT(ng.preset("gpt2").model)
    assert small.num_params() == 124_439_808
    assert ng.GPT(ng.preset("gpt2-untied").model).num_params() == 163_009_536


@pytest.mark.parametrize(
    "changes, name",
    [
        ({}, "GPT2LMHeadModel"),
        ({"bias": False}, "GPT2LMHeadModel"),
        ({"tie_embeddings": False, "qkv_bias": False}, "GPT2LMHeadModel"),
        ({"preset": "tpu-fast"}, "Qwen3ForCausalLM"),
        ({"preset": "tpu-fast", "mlp": "swiglu", "tie_embeddings": False}, "Qwen3ForCausalLM"),
        ({"preset": "tpu-fast", "qkv_bias": True}, "NanoGPTForCausalLM"),
        ({"preset": "tpu-fast", "qk_norm": False}, "NanoGPTForCausalLM"),
        ({"preset": "tpu-fast", "mlp": "gelu"}, "NanoGPTForCausalLM"),
        ({"preset": "blog"}, "NanoGPTForCausalLM"),
        ({"preset": "blog", "tie_embeddings": False, "mlp": "swiglu"}, "NanoGPTForCausalLM"),
        ({"qk_norm": True}, "NanoGPTForCausalLM"),
    ],
)
def test_every_recipe_leaves_with_the_same_logits(tmp_path, changes, name):
    ours = make_run(tmp_path / "run", **changes)
    found = ng.export_hf(tmp_path / "run", tmp_path / "out")
    assert found["architecture"] == architecture(ours.config) == name
    theirs = load_exported(tmp_path / "out")
    assert float((logits_of(ours) - logits_of(theirs)).abs().max()) < 1e-4
    assert theirs.get_input_embeddings().weight.shape == (257, 48)  # no padding rows
    assert float(logits_of(ours).std()) > 0.05
    card = (tmp_path / "out" / "README.md").read_text()
    assert "songs, 99 tokens" in card
    assert ("trust_remote_code=True" in card) == (name == "NanoGPTForCausalLM")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("preset", ["gpt2", "tpu-fast", "blog"])
def test_the_tokenizer_gives_the_same_ids_and_the_model_writes(tmp_path, preset):
    make_run(tmp_path / "run", preset)
    ng.export_hf(tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    text = "héllo  wörld\n 你好 😀"
    assert tokenizer(text)["input_ids"] == load_tokenizer("bytes").encode(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = load_exported(tmp_path / "out")
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    alone = model.generate(**tokenizer("abc", return_tensors="pt"), **settings)[0]
    tokenizer.padding_side = "left"
    batch = tokenizer(["abc", "a longer one"], return_tensors="pt", padding=True)
    both = model.generate(**batch, **settings)
    assert both.shape[1] == len("a longer one") + 6
    assert both[0, -9:].tolist() == alone.tolist()


def test_a_padded_row_gives_what_it_gives_alone(tmp_path):
    """Left padding, as batched generation makes it: positions start at the first real token."""
    make_run(tmp_path / "run", "blog")
    ng.export_hf(tmp_path / "run", tmp_path / "out")
    model, row = load_exported(tmp_path / "out"), torch.tensor([[97, 98, 99]])
    padded = torch.cat((torch.full((1, 2), 256), row), 1)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        alone = model(row, labels=row)
        beside = model(padded, attention_mask=mask).logits[:, 2:]
    assert float((alone.logits - beside).abs().max()) < 1e-5
    assert float(alone.loss) > 0


def test_our_class_accumulates_gradients_and_grows(tmp_path):
    """As Trainer does it: each part's loss is a sum, divided by the tokens of all parts."""
    make_run(tmp_path / "run", "blog")
    ng.export_hf(tmp_path / "run", tmp_path / "out")
    model = load_exported(tmp_path / "out")
    rows = torch.randint(256, (4, 9))
    with torch.no_grad():
        parts = [model(part, labels=part, num_items_in_batch=32).loss for part in rows.chunk(2)]
        whole = model(rows, labels=rows).loss
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-5)
    model.resize_token_embeddings(260)
    assert model(torch.tensor([[1, 259]])).logits.shape == (1, 2, 260)


def test_a_folder_of_the_user_stays(tmp_path, capsys):
    make_run(tmp_path / "run")
    (tmp_path / "out_partial").mkdir()
    (tmp_path / "out_partial" / "thesis").touch()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    assert "out_partial' exists" in capsys.readouterr().err
    assert (tmp_path / "out_partial" / "thesis").is_file()
    assert not (tmp_path / "out").exists()


def test_folders_made_on_the_way_go_too(tmp_path, monkeypatch, capsys):
    """Here because transformers, of an old version, does not know the architecture."""

    def refuse(*args, **kwargs):
        raise KeyError("qwen3")

    make_run(tmp_path / "run", "tpu-fast")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "a" / "b" / "c")]) == 2
    assert "does not load the exported model ('qwen3')" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "a" / ("b" * 300))]) == 2
    assert "too long" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_nothing_is_written_over(tmp_path, capsys):
    make_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_wrong_translation_is_not_delivered(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run", "tpu-fast")
    monkeypatch.setattr("nanogpt_tpu.hf_format._QK_FACTOR", 2.0**-9)  # epsilon now counts
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    assert "logits of the exported model differ" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_json(tmp_path, capsys):
    make_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "GPT2LMHeadModel"
    assert found["max_logit_difference"] < 1e-4
    assert found["num_params"] == ng.GPT(ModelConfig(**SMALL)).num_params()
