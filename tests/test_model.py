"""Properties of the GPT: shape, count, causality, initial loss, learning, numerics."""

import itertools
import math

import pytest
import torch

from nanogpt_tpu.attention import causal_attention, rope_tables, rotate
from nanogpt_tpu.config import ModelConfig, preset
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.fused import rms_norm
from nanogpt_tpu.model import GPT, IGNORED_TARGET, NORM_EPS, QK_EPS

SWITCHES = [
    {},
    {"norm": "rmsnorm", "mlp": "relu2", "position": "rope", "qk_norm": True, "bias": False},
    {"tie_embeddings": False, "zero_init_residual": True, "attention": "xla"},
    {"mlp": "swiglu", "n_embd": 36, "attention_fp32": True, "qkv_bias": False},
]


def tiny(**changes) -> ModelConfig:
    return preset("tiny", vocab_size=300, **changes).model


def batch(config: ModelConfig, rows: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, config.block_size + 1)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_gpt2_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = GPT(preset("gpt2").model)
    assert model.num_params() == 124_439_808
    assert sum(p.numel() for p in model.parameters()) == 124_475_904  # 47 rows of padding


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("gpt2-untied", 163_009_536),
        ("blog", 123_653_376),
        ("tpu-fast", 123_532_032),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_their_numbers_of_parameters(name, num_params):
    with torch.device("meta"):
        assert GPT(preset(name).model).num_params() == num_params


def test_swiglu_has_as_many_parameters_as_the_others():
    counts = {
        kind: GPT(tiny(mlp=kind, n_embd=48, bias=False)).num_params()
        for kind in ("gelu", "relu2", "swiglu")
    }
    assert len(set(counts.values())) == 1
    with pytest.raises(UserError, match=r"n_embd 32 is no multiple of 3: try 30"):
        tiny(mlp="swiglu")


def test_qkv_bias_follows_bias_unless_set():
    def has_bias(**changes):
        attention = GPT(tiny(**changes)).h[0].attn
        return attention.c_attn.bias is not None, attention.c_proj.bias is not None

    assert has_bias(bias=True) == (True, True)
    assert has_bias(bias=False) == (False, False)
    assert has_bias(bias=True, qkv_bias=False) == (False, True)


def test_attention_in_fp32_is_untouched_by_autocast(monkeypatch):
    torch.manual_seed(0)
    seen = []
    model = GPT(tiny(attention_fp32=True, attention="xla"))
    monkeypatch.setattr(
        "nanogpt_tpu.model.causal_attention",
        lambda q, *rest: seen.append(q.dtype) or causal_attention(q, *rest),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch(model.config)[0])
    assert set(seen) == {torch.float32}


def test_the_head_is_the_embedding_itself():
    names = [name for name, _ in GPT(tiny()).named_parameters()]
    assert "wte.weight" in names
    assert not any("head" in name for name in names)
    untied = GPT(tiny(tie_embeddings=False))
    assert untied.num_params() - GPT(tiny()).num_params() == 300 * 32


@pytest.mark.parametrize("changes", SWITCHES)
def test_logits_and_loss(changes):
    torch.manual_seed(0)
    config = tiny(**changes)
    model = GPT(config)
    idx, targets = batch(config)
    logits, loss = model(idx)
    assert loss is None
    assert logits.shape == (4, config.block_size, config.vocab_size)
    assert logits.dtype == torch.float32
    _, loss = model(idx, targets)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(loss, expected, atol=1e-5)
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.1


@pytest.mark.parametrize("changes", SWITCHES)
def test_no_position_sees_a_later_one(changes):
    torch.manual_seed(0)
    config = tiny(**{**changes, "zero_init_residual": False})
    model = GPT(config).eval()
    idx, _ = batch(config, rows=1)
    changed = idx.clone()
    changed[0, 20] = (changed[0, 20] + 1) % config.vocab_size
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("changes", SWITCHES)
def test_it_overfits_one_batch(changes):
    torch.manual_seed(0)
    config = tiny(**changes)
    model = GPT(config)
    idx, targets = batch(config, rows=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(idx, targets)[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
    assert all(param.grad is not None for param in model.parameters())


def test_padding_ids_get_no_probability_and_no_gradient():
    config = tiny()
    model = GPT(config)
    idx, targets = batch(config)
    padded = model.head(model.features(idx))
    assert padded.shape[-1] == 384
    assert padded.softmax(-1)[..., 300:].sum() == 0
    model(idx, targets)[1].backward()
    assert model.wte.weight.grad[300:].abs().sum() == 0
    assert model.wte.weight.grad[:300].abs().sum() > 0


def test_ignored_targets_do_not_count():
    config = tiny()
    model = GPT(config).eval()
    idx, targets = batch(config, rows=2)
    half = targets.clone()
    half[1] = IGNORED_TARGET
    assert torch.allclose(model(idx, half)[1], model(idx[:1], targets[:1])[1], atol=1e-6)


def test_one_token_is_enough_and_too_many_are_refused():
    config = tiny(qk_norm=True)
    model = GPT(config)
    assert torch.isfinite(model(torch.zeros(1, 1, dtype=torch.int32))[0]).all()
    with pytest.raises(UserError, match=r"33 tokens.*block_size 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_the_two_forms_of_attention_agree_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 3, 17, 8, generator=generator).requires_grad_() for _ in range(3)]
    results = []
    for kind in ("sdpa", "xla"):
        y = causal_attention(*qkv, kind=kind)
        results.append([y, *torch.autograd.grad(y.square().sum(), qkv)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_rope_turns_scores_into_a_function_of_distance():
    cos, sin = rope_tables(40, 16)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator).expand(1, 1, 40, 16) for _ in range(2))
    scores = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-2, -1))[0, 0]
    for one, other in itertools.pairwise(range(5, 30)):
        assert torch.allclose(scores[one, one - 4], scores[other, other - 4], atol=1e-4)
    assert torch.allclose(rotate(q, cos, sin).norm(dim=-1), q.norm(dim=-1), atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_gives_the_same_length_to_tiny_vectors(scale, dtype):
    x = (torch.randn(4, 2, 8, 16, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    lengths = rms_norm(x, QK_EPS).float().norm(dim=-1)
    assert torch.allclose(lengths, torch.full_like(lengths, 4.0), rtol=0.01)
    assert rms_norm(x, NORM_EPS).dtype == dtype


def test_bf16_autocast_stays_close_to_fp32_and_finite():
    torch.manual_seed(0)
    config = tiny(qk_norm=True, attention="xla")
    model = GPT(config)
    idx, targets = batch(config)
    exact = model(idx, targets)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, rough = model(idx, targets)
    assert rough.dtype == logits.dtype == torch.float32
    assert abs(rough.item() / exact.item() - 1) < 0.02
    assert torch.isfinite(logits).all()
