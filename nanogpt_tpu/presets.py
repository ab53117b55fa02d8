"""The presets: named settings, each with a sentence of where it comes from. Data only.

What a preset does not name is the default of TrainConfig or ModelConfig: GPT-2 124M on 10B tokens.
"""

from typing import Any

# The parts of later recipes that the 124M presets below share.
_MODERN: dict[str, Any] = {
    "norm": "rmsnorm", "mlp": "relu2", "position": "rope", "qk_norm": True, "bias": False,
    "zero_init_residual": True,
}  # fmt: skip

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "Ours, for tests: GPT-2's architecture at a size that trains in a blink.",
        {
            "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 257,
            "micro_batch_size": 2, "tokens_per_step": 512, "num_steps": 20, "warmup_steps": 2,
            "learning_rate": 3e-3, "precision": "fp32", "log_every": 1, "eval_every": 10,
            "eval_tokens": 512, "checkpoint_every": 10, "sample_every": None,
        },
    ),
    "demo": (
        "Ours, for laptops: a 4.2M-parameter GPT with the parts that learn fastest at this size "
        "(RoPE, RMSNorm, QK-norm, squared ReLU), about two minutes on two cores.",
        {
            **_MODERN,
            "n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "vocab_size": 4096,
            "micro_batch_size": 2, "tokens_per_step": 4096, "num_steps": 200, "warmup_steps": 20,
            "learning_rate": 3e-3, "min_lr_ratio": 0.05, "precision": "fp32", "log_every": 5,
            "eval_every": 100, "eval_tokens": 32_768, "checkpoint_every": 50, "sample_every": 100,
        },
    ),
    "gpt2": (
        "The 124M model of Radford et al. 2019; batch, learning rate and warmup from the GPT-3 "
        "paper's table for this size (Brown et al. 2020), 10B tokens.",
        {},
    ),
    "gpt2-untied": (
        "GPT-2 as the from-scratch book builds it (Raschka 2024): a head of its own, no bias in "
        "queries, keys and values, dropout 0.1; 163M parameters.",
        {"tie_embeddings": False, "qkv_bias": False, "dropout": 0.1},
    ),
    "blog": (
        "The first public PyTorch recipe for a Kaggle TPU: GPT-2 with RoPE, QK-norm, squared ReLU, "
        "zero-init projections, attention in fp32 and recomputed blocks. Our baseline.",
        {
            "position": "rope", "qk_norm": True, "mlp": "relu2", "zero_init_residual": True,
            "attention_fp32": True, "gradient_checkpointing": True, "micro_batch_size": 32,
        },
    ),
    "tpu-fast": (
        "Ours, for the TPU: heads of 128 for its 128-wide units, the parts of the speed-runs, "
        "hidden matrices trained with Muon.",
        {
            **_MODERN,
            "n_head": 6, "optimizer": "muon", "schedule": "wsd", "min_lr_ratio": 0.0,
            "num_steps": 5000, "warmup_steps": 100, "learning_rate": 2e-3,
        },
    ),
    "gpt2-medium": (
        "The 350M model of Radford et al. 2019, rate from the GPT-3 paper's table.",
        {"n_layer": 24, "n_head": 16, "n_embd": 1024, "learning_rate": 3e-4, "micro_batch_size": 8},
    ),
    "gpt2-large": (
        "The 774M model of Radford et al. 2019, rate from the GPT-3 paper's table.",
        {
            "n_layer": 36, "n_head": 20, "n_embd": 1280, "learning_rate": 2.5e-4,
            "micro_batch_size": 4, "gradient_checkpointing": True,
        },
    ),
    "gpt2-xl": (
        "The 1.5B model of Radford et al. 2019, rate from the GPT-3 paper's table.",
        {
            "n_layer": 48, "n_head": 25, "n_embd": 1600, "learning_rate": 2e-4,
            "micro_batch_size": 2, "gradient_checkpointing": True,
        },
    ),
    "lyrics": (
        "Ours, for a small corpus in any language: 12M parameters, own vocabulary, dropout "
        "against learning it by heart.",
        {
            **_MODERN,
            "n_layer": 6, "n_head": 3, "n_embd": 384, "block_size": 256, "vocab_size": 4096,
            "dropout": 0.1, "micro_batch_size": 4, "tokens_per_step": 8192, "num_steps": 1000,
            "warmup_steps": 50, "learning_rate": 2e-3, "min_lr_ratio": 0.05, "log_every": 10,
            "eval_every": 250, "eval_tokens": 65_536, "checkpoint_every": 250, "sample_every": 250,
        },
    ),
}  # fmt: skip
