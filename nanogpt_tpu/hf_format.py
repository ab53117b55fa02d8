"""Our weights and settings in Hugging Face's forms, and GPT-2's in ours: names, shapes, no files.

A model goes out as GPT2LMHeadModel or Qwen3ForCausalLM where one of them is the same function, else
as our own class, whose code then travels with the weights (`modeling_nanogpt_tpu.py`).

Letters: C = n_embd, D = head size, V = vocab_size.
"""

import re
from dataclasses import asdict
from typing import Any

import torch

from nanogpt_tpu.config import ModelConfig
from nanogpt_tpu.errors import UserError

Weights = dict[str, torch.Tensor]
GPT2, QWEN3, OWN = "GPT2LMHeadModel", "Qwen3ForCausalLM", "NanoGPTForCausalLM"
OWN_CODE = "modeling_nanogpt_tpu"
_CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # GPT-2 keeps these as (in, out)
_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)$")  # causal masks in old files
_TABLES = ("wte.weight", "lm_head.weight")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Our names of sizes, and those that a GPT2Config may have them under; it may hold several.
_SIZES = {
    "n_layer": ("n_layer", "num_hidden_layers"),
    "n_head": ("n_head", "num_attention_heads"),
    "n_embd": ("n_embd", "hidden_size"),
    "vocab_size": ("vocab_size",),
    "block_size": ("n_positions", "max_position_embeddings"),
}
# What of a GPT2Config changes the function, and the values that are ours.
_GPT2_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
# Our QK-norm has next to no epsilon, Qwen3's has that of all norms. The norm does not see a factor
# on queries and keys, beside which an epsilon of 1e-5 vanishes; powers of two are exact.
_QK_FACTOR = 2.0**8


def architecture(config: ModelConfig) -> str:
    """The class in `transformers` that computes what a GPT of this config does."""
    if (config.norm, config.mlp, config.position) == ("layernorm", "gelu", "learned"):
        return OWN if config.qk_norm else GPT2
    is_gated = config.mlp in ("relu2", "swiglu")
    is_qwen3 = is_gated and (config.norm, config.position) == ("rmsnorm", "rope")
    if is_qwen3 and config.qk_norm and not config.bias and not config.qkv_bias:
        return QWEN3
    return OWN


def to_hf(config: ModelConfig, weights: Weights, eot_id: int) -> tuple[dict[str, Any], Weights]:
    """config.json and tensors of a GPT's state dict; rows that pad the vocabulary are left out."""
    weights = {
        name: tensor[: config.vocab_size] if name in _TABLES else tensor
        for name, tensor in weights.items()
    }
    name = architecture(config)
    values, tensors = _WRITERS[name](config, weights)
    common = {
        "architectures": [name],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings and name != OWN,  # there it is no second name
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "torch_dtype": "float32",
    }
    return {**values, **common}, {key: tensor.contiguous() for key, tensor in tensors.items()}


def _to_gpt2(config: ModelConfig, weights: Weights) -> tuple[dict[str, Any], Weights]:
    tensors = {}
    for name, tensor in weights.items():
        is_head = name == "lm_head.weight"
        tensors[name if is_head else f"transformer.{name}"] = (
            tensor.t() if _CONV1D.search(name) else tensor
        )
        bias = name.replace(".weight", ".bias")
        if name not in (*_TABLES, "wpe.weight") and bias not in weights:
            tensors[f"transformer.{bias}"] = torch.zeros(tensor.size(0))
    values = {
        "model_type": "gpt2",
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        **{name: allowed[0] for name, allowed in _GPT2_ONLY.items()},
    }
    return values, tensors


def _to_qwen3(config: ModelConfig, weights: Weights) -> tuple[dict[str, Any], Weights]:
    ones, head_ones = torch.ones(config.n_embd), torch.ones(config.head_size)
    tensors = {"model.embed_tokens.weight": weights["wte.weight"], "model.norm.weight": ones}
    if "lm_head.weight" in weights:
        tensors["lm_head.weight"] = weights["lm_head.weight"]
    for n in range(config.n_layer):
        q, k, v = weights[f"h.{n}.attn.c_attn.weight"].chunk(3)
        first = weights[f"h.{n}.mlp.c_fc.weight"]
        # max(z, 0)^2 is max(z, 0) z: a gated layer whose gate is its value.
        gate, value = (first, first) if config.mlp == "relu2" else first.chunk(2)
        layer = {
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
            "self_attn.q_norm": head_ones,
            "self_attn.k_norm": head_ones,
            "self_attn.q_proj": q * _QK_FACTOR,
            "self_attn.k_proj": k * _QK_FACTOR,
            "self_attn.v_proj": v,
            "self_attn.o_proj": weights[f"h.{n}.attn.c_proj.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": value,
            "mlp.down_proj": weights[f"h.{n}.mlp.c_proj.weight"],
        }
        # Clones: safetensors refuses tensors that share memory.
        tensors |= {f"model.layers.{n}.{key}.weight": t.clone() for key, t in layer.items()}
    values = {
        "model_type": "qwen3",
        "hidden_size": config.n_embd,
        "intermediate_size": tensors["model.layers.0.mlp.up_proj.weight"].size(0),
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "head_dim": config.head_size,
        "hidden_act": "relu" if config.mlp == "relu2" else "silu",
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope_theta": 10_000.0,  # transformers 4 reads this, 5 the next line
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return values, tensors


def _to_own(config: ModelConfig, weights: Weights) -> tuple[dict[str, Any], Weights]:
    classes = {"AutoConfig": "NanoGPTConfig", "AutoModelForCausalLM": OWN}
    values = {
        "model_type": "nanogpt_tpu",
        "auto_map": {kind: f"{OWN_CODE}.{name}" for kind, name in classes.items()},
        **asdict(config),
    }
    return values, weights


_WRITERS = {GPT2: _to_gpt2, QWEN3: _to_qwen3, OWN: _to_own}


def config_of_gpt2(values: dict[str, Any], origin: object) -> ModelConfig:
    """The ModelConfig of a GPT2Config's values; what they leave out is GPT-2 124M's.

    Raises:
        UserError: another architecture, or a setting under which it is not our function.
    """
    if values.get("model_type") != "gpt2":
        raise UserError(
            f"{origin}: model_type is {values.get('model_type')!r}, only 'gpt2' can be imported "
            "(openai-community/gpt2, -medium, -large, -xl, distilgpt2 and their like)"
        )
    given: dict[str, Any] = {}
    for name, theirs in _SIZES.items():
        for key in theirs:
            if key in values and given.setdefault(name, values[key]) != values[key]:
                raise UserError(f"{origin}: {key} is {values[key]!r}, {theirs[0]} {given[name]!r}")
    config = ModelConfig(**given, tie_embeddings=values.get("tie_word_embeddings", True))
    for name, allowed in {**_GPT2_ONLY, "n_inner": (None, 4 * config.n_embd)}.items():
        if (value := values.get(name, allowed[0])) not in allowed:
            raise UserError(f"{origin}: {name} is {value!r}, this GPT has {allowed[0]!r} only")
    return config


def weights_of_gpt2(config: ModelConfig, tensors: Weights, origin: object) -> Weights:
    """A GPT2Model's or GPT2LMHeadModel's tensors as a GPT's state dict, fp32.

    Raises:
        UserError: the tables or the number of layers are not those of `config`, a tied head
            differs, a tensor is there twice, or is none of floating-point numbers.
    """
    weights: Weights = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("transformer.")
        if _BUFFER.fullmatch(name):
            continue
        if name in weights:
            raise UserError(f"{origin}: {name} is there twice, with 'transformer.' and without")
        if tensor.dtype not in _FLOATS:
            raise UserError(
                f"{origin}: {full_name} is of {tensor.dtype}: quantized weights cannot be imported"
            )
        is_turned = tensor.dim() == 2 and _CONV1D.search(name)
        weights[name] = tensor.float().t() if is_turned else tensor.float()
    _check_sizes(config, weights, origin)
    if config.tie_embeddings and "lm_head.weight" in weights:
        head = weights.pop("lm_head.weight")
        if "wte.weight" in weights and not torch.equal(head, weights["wte.weight"]):
            raise UserError(
                f"{origin}: lm_head.weight differs from wte.weight although tie_word_embeddings is "
                "on: set it to false in config.json to import both"
            )
    padding = config.padded_vocab_size - config.vocab_size
    for name in _TABLES:
        if name in weights:
            weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, padding))
    return weights


def _check_sizes(config: ModelConfig, weights: Weights, origin: object) -> None:
    """Refuse settings that the weights do not bear out, before a model of that size is made."""
    width = config.n_embd
    tables = {"wpe.weight": config.block_size, **dict.fromkeys(_TABLES, config.vocab_size)}
    for name, rows in tables.items():
        if name not in weights and name != "lm_head.weight":
            raise UserError(f"{origin}: weights do not fit: the model needs {name}")
        if name in weights and weights[name].shape != (rows, width):
            raise UserError(
                f"{origin}: {name} has shape {tuple(weights[name].shape)}, its config.json says "
                f"({rows}, {width})"
            )
    layers = {name.split(".")[1] for name in weights if name.startswith("h.")}
    if len(layers) != config.n_layer:
        raise UserError(f"{origin}: weights of {len(layers)} layers, n_layer is {config.n_layer}")
