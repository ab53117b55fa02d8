"""Choosing tokens: temperature, top-k, top-p, seeds, windows, stopping."""

import math

import pytest
import torch

from nanogpt_tpu.config import preset
from nanogpt_tpu.decoder import Decoder
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.model import GPT
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.sample import Sampling, generate, sample
from nanogpt_tpu.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("bytes")
CONTEXT = 8


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": CONTEXT}
    return GPT(preset("tiny", **shape).model).eval()


class Rigged(GPT):
    """Always gives one id the highest logit."""

    def __init__(self, token: int) -> None:
        super().__init__(preset("tiny", n_layer=1, block_size=CONTEXT).model)
        self.token = token

    def head(self, x):
        logits = torch.zeros(*x.shape[:-1], self.config.padded_vocab_size)
        logits[..., self.token] = 50.0
        return logits


def draw(logits, n=200, **settings):
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(**settings)
    return [sampling.choose(torch.tensor(logits), generator) for _ in range(n)]


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-8, 1e-3])
def test_small_temperatures_are_greedy(temperature):
    assert set(draw([1.0, 3.0, 2.0], temperature=temperature)) == {1}


def test_temperature_sharpens_and_flattens():
    def share_of_best(temperature):
        return draw([0.0, 1.0], n=2000, temperature=temperature).count(1) / 2000

    assert share_of_best(1.0) == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    assert share_of_best(0.25) > 0.95
    assert share_of_best(1e6) == pytest.approx(0.5, abs=0.04)


def test_top_k_keeps_the_k_likeliest():
    logits = [0.0, 3.0, 1.0, 2.0]
    assert set(draw(logits, top_k=1)) == {1}
    assert set(draw(logits, top_k=2)) == {1, 3}
    assert set(draw(logits, top_k=99)) == {0, 1, 2, 3}
    assert set(draw([5.0, 5.0, 5.0], top_k=2)) == {0, 1}  # ties: exactly k stay


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draw(logits, top_p=0.5)) == {0}
    assert set(draw(logits, top_p=0.6)) == {0, 1}
    assert set(draw(logits, top_p=0.9)) == {0, 1, 2}
    assert set(draw(logits, top_p=1.0)) == {0, 1, 2, 3}
    assert set(draw(logits, top_p=1e-9)) == {0}


@pytest.mark.parametrize(
    "settings",
    [{"temperature": t} for t in (-1.0, math.nan, math.inf)]
    + [{"top_k": k} for k in (0, -3)]
    + [{"top_p": p} for p in (0.0, -0.1, 1.1, math.nan)],
)
def test_settings_out_of_range_are_refused_with_their_value(settings):
    ((name, value),) = settings.items()
    with pytest.raises(UserError, match=rf"{name} is {value}"):
        Sampling(**settings)


@pytest.mark.parametrize("prompt_tokens", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("max_new_tokens", [0, 1, 20])
def test_exactly_the_tokens_asked_for_whatever_the_prompt(model, prompt_tokens, max_new_tokens):
    prompt = "x" * prompt_tokens
    (drawn,), _ = sample(model, TOKENIZER, prompt, max_new_tokens=max_new_tokens, stop_at_eot=False)
    assert len(drawn.tokens) == max_new_tokens
    assert drawn.text.startswith(prompt)
    assert drawn.finish_reason == "length"
    assert all(0 <= token < 257 for token in drawn.tokens)


def test_a_prompt_over_the_context_is_said_and_only_its_end_counts(model, capsys):
    long, end = "a" * 50 + "bcdefghi", "bcdefghi"
    texts = [generate(model, TOKENIZER, p, max_new_tokens=8, temperature=0) for p in (long, end)]
    assert texts[0].removeprefix(long) == texts[1].removeprefix(end)
    assert "59 tokens, the model sees the last 8" in capsys.readouterr().err


def test_greedy_is_the_same_for_every_seed_and_equals_top_k_one(model):
    def text(**settings):
        return generate(model, TOKENIZER, "ab", max_new_tokens=20, **settings)

    greedy = {text(temperature=0, seed=seed) for seed in (1, 2, 3)}
    assert greedy == {text(temperature=0.9, top_k=1, seed=4)}


def test_a_seed_gives_its_text_however_many_are_drawn(model):
    def texts(num_samples, seed=5):
        drawn, _ = sample(
            model, TOKENIZER, "a", num_samples=num_samples, max_new_tokens=12, seed=seed
        )
        return [one.text for one in drawn]

    assert texts(3)[:2] == texts(2)
    assert len(set(texts(3))) == 3
    assert texts(1) != texts(1, seed=6)


def test_it_stops_at_end_of_text_and_does_not_print_it():
    (drawn,), _ = sample(Rigged(256), TOKENIZER, "hi", max_new_tokens=20)
    assert (drawn.text, drawn.tokens, drawn.finish_reason) == ("hi", [256], "eot")
    (on,), _ = sample(Rigged(256), TOKENIZER, "hi", max_new_tokens=5, stop_at_eot=False)
    assert (on.text, len(on.tokens), on.finish_reason) == ("hi", 5, "length")


def test_marker_text_in_a_prompt_is_ordinary_and_stays(model):
    prompt = "a<|endoftext|>b"
    assert generate(model, TOKENIZER, prompt, max_new_tokens=3).startswith(prompt)


RECIPES = ("gpt2", "tpu-fast", "blog")


def recipe(name, context=24):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 48, "block_size": context, "vocab_size": 257}
    model = GPT(preset(name, **shape).model)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    return model.eval()


@pytest.mark.parametrize("name", RECIPES)
def test_cached_logits_are_those_of_the_whole_row_at_every_position(name):
    """Rows of different lengths side by side, until the longest fills the context."""
    model = recipe(name)
    rows = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    decoder = Decoder(model, Runtime("cpu", "fp32"))
    for step in range(18):
        together = decoder(rows)
        for row, logits in zip(rows, together, strict=True):
            alone = model(torch.tensor([row]))[0][0, -1]
            assert float((logits - alone).abs().max()) < 1e-4
            row.append((31 * step + len(row)) % 257)
    assert max(map(len, rows)) == 25


@pytest.mark.parametrize("name", RECIPES)
def test_beyond_the_context_the_older_half_is_forgotten(name):
    model = recipe(name, context=8)
    row = list(range(1, 9))
    decoder = Decoder(model, Runtime("cpu", "fp32"))
    for step in range(20):
        logits = decoder([row])[0]
        over = max(0, len(row) - 8)
        begin = 0 if over == 0 else 4 + 4 * ((over - 1) // 4)
        alone = model(torch.tensor([row[begin:]]))[0][0, -1]
        assert float((logits - alone).abs().max()) < 1e-4
        row.append((7 * step) % 257)


def test_only_new_tokens_are_run(model):
    embed, lengths = model.embed, []
    model.embed = lambda idx, *rest: lengths.append(idx.shape[1]) or embed(idx, *rest)
    try:
        generate(model, TOKENIZER, "ab", max_new_tokens=4)
    finally:
        del model.embed
    assert lengths == [3, 1, 1, 1]


def test_another_tokenizer_is_refused_with_both_sizes(model):
    from nanogpt_tpu.tokenizer import train_tokenizer

    other = train_tokenizer(["some words to learn from, some words"], 270)
    with pytest.raises(
        UserError, match=f"vocabulary of 257, the tokenizer one of {other.vocab_size}"
    ):
        generate(model, other, "a")
