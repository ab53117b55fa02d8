"""A GPT of nanogpt_tpu for Hugging Face transformers; travels with the exported weights.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Needs torch and transformers only. Plain and without a cache: for scores, and for short texts.

Letters: B sequences, T tokens, C = n_embd, H heads, D = head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

_FIELDS = (
    "n_layer", "n_head", "n_embd", "block_size", "norm", "mlp", "position", "qk_norm", "bias",
    "qkv_bias", "tie_embeddings",
)  # fmt: skip


class NanoGPTConfig(PretrainedConfig):
    """The settings that decide the function, in nanogpt_tpu's names."""

    model_type = "nanogpt_tpu"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "block_size",
    }

    def __init__(self, **values: Any) -> None:
        for name in _FIELDS:
            setattr(self, name, values.pop(name, None))
        super().__init__(**values)


class RMSNorm(nn.Module):
    """Root mean square normalization without gain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., C)."""
        return F.rms_norm(x, x.shape[-1:], eps=1e-5)


class Attention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.config = config
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=qkv_bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """From x (B, T, C), positions (B, T), mask (B, 1, T, T) -> (B, T, C)."""
        shape = (*x.shape[:2], self.config.n_head, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        if self.config.qk_norm:
            q, k = (F.rms_norm(part, part.shape[-1:], eps=1e-12) for part in (q, k))
        if self.config.position == "rope":
            q, k = (_rotate(part, positions) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    size = x.size(-1)
    rates = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size)
    angles = positions[:, None, :, None].double() * rates  # (B, 1, T, D/2)
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Two linear layers; for swiglu three."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        inner = (8 * config.n_embd // 3) if config.mlp == "swiglu" else 4 * config.n_embd
        first = 2 * inner if config.mlp == "swiglu" else inner
        self.c_fc = nn.Linear(config.n_embd, first, bias=config.bias)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = self.c_fc(x)
        if self.kind == "gelu":
            x = F.gelu(x, approximate="tanh")
        elif self.kind == "relu2":
            x = F.relu(x).square()
        else:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        return self.c_proj(x)


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = _norm(config), _norm(config)
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x), positions, mask)
        return x + self.mlp(self.ln_2(x))


def _norm(config: NanoGPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm()
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


class NanoGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model; the head is the embedding matrix itself unless the config unties them."""

    config_class = NanoGPTConfig

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = _norm(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table."""
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Another table, as `resize_token_embeddings` makes it."""
        self.wte = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Logits (B, T, V) of ids (B, T); with labels also the loss, shifted here.

        With `num_items_in_batch` the loss is the sum over its tokens by that number: so Trainer
        accumulates.
        """
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (real.cumsum(-1) - 1).clamp(min=0)  # (B, T), padding left or right
        causal = torch.ones(input_ids.size(1), input_ids.size(1), device=real.device).tril().bool()
        own = torch.eye(input_ids.size(1), device=real.device).bool()  # a row is never all masked
        mask = (causal & real.bool()[:, None, None, :]) | own
        x = self.wte(input_ids)
        if self.config.position == "learned":
            x = x + self.wpe(positions)
        for block in self.h:
            x = block(x, positions, mask)
        head = self.wte if self.config.tie_embeddings else self.lm_head
        logits = F.linear(self.ln_f(x), head.weight)
        values: dict[str, Any] = {"logits": logits}
        if labels is not None:
            rows = logits[:, :-1].flatten(0, 1).float()
            how = "mean" if num_items_in_batch is None else "sum"
            loss = F.cross_entropy(rows, labels[:, 1:].flatten(), reduction=how)
            values["loss"] = loss if num_items_in_batch is None else loss / num_items_in_batch
        return CausalLMOutput(**values)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """The last block_size tokens, whole each time."""
        size = self.config.block_size
        if attention_mask is not None:
            attention_mask = attention_mask[:, -size:]
        return {"input_ids": input_ids[:, -size:], "attention_mask": attention_mask}
