"""Every setting of a run: its default, its check, and all arithmetic on batch sizes.

`preset("demo", data=..., out=...)` gives a frozen `TrainConfig`, which holds a `ModelConfig` and
makes a `BatchPlan`. A wrong value is refused here, with its number and the fix, before anything
is written. Knows no torch, no file, no device: standard library only.
"""

import os
from dataclasses import asdict, dataclass, field, fields
from dataclasses import replace as dataclass_replace
from typing import Any

from nanogpt_tpu.errors import UserError, between, one_of, positive, unknown_name, well_typed
from nanogpt_tpu.presets import PRESETS

VOCAB_MULTIPLE = 128  # XLA: a TPU multiplies in 128-wide tiles; the vocabulary is padded to them


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT, in GPT-2's names; the defaults are GPT-2 124M itself."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    """The longest context, in tokens."""
    vocab_size: int = 50257
    norm: str = "layernorm"
    """layernorm, or rmsnorm (without gain)."""
    mlp: str = "gelu"
    """gelu (tanh form, as GPT-2), relu2 (squared, So et al. 2021) or swiglu (Shazeer 2020)."""
    position: str = "learned"
    """learned (GPT-2) or rope (Su et al. 2021)."""
    qk_norm: bool = False
    """Normalize queries and keys per head (Henry et al. 2020): bounds attention logits."""
    bias: bool = True
    qkv_bias: bool | None = None
    """Bias of queries, keys and values alone; as `bias` unless given."""
    tie_embeddings: bool = True
    dropout: float = 0.0
    zero_init_residual: bool = False
    """Start the projections into the residual stream at zero instead of small and random."""
    attention: str = "auto"
    """auto, sdpa (PyTorch's own), xla (matrix products), pallas (a kernel for the TPU)."""
    attention_fp32: bool = False
    """Compute attention in fp32 also under bf16 autocast."""

    def __post_init__(self) -> None:
        well_typed(self)
        positive(self, "n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        one_of("norm", self.norm, ("layernorm", "rmsnorm"))
        one_of("mlp", self.mlp, ("gelu", "relu2", "swiglu"))
        one_of("position", self.position, ("learned", "rope"))
        one_of("attention", self.attention, ("auto", "sdpa", "xla", "pallas"))
        between(self, 0.0, 0.99, "dropout")
        if self.mlp == "swiglu" and self.n_embd % 3:
            raise UserError(
                f"swiglu's inner width is 8/3 of n_embd (as many parameters as the others), "
                f"n_embd {self.n_embd} is no multiple of 3: try {self.n_embd // 3 * 3}"
            )
        if self.n_embd % self.n_head:
            near = round(self.n_embd / self.n_head) or 1
            raise UserError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}: "
                f"try n_embd {near * self.n_head}"
            )
        if self.position == "rope" and self.head_size % 2:
            raise UserError(
                f"rope rotates pairs, the head size n_embd/n_head = {self.head_size} is odd: "
                f"try n_embd {self.n_head * (self.head_size + 1)}"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is cut up: the only place that multiplies batch sizes.

    A micro step runs `micro_batch_size` sequences on each of `num_devices` devices at once;
    `num_micro_steps` of them are accumulated into one optimizer step.
    """

    micro_batch_size: int
    seq_len: int
    num_devices: int
    tokens_per_step: int

    def __post_init__(self) -> None:
        well_typed(self)
        positive(self, "micro_batch_size", "seq_len", "num_devices")
        unit = self.tokens_per_micro_step
        if self.tokens_per_step < 1 or self.tokens_per_step % unit:
            below = self.tokens_per_step // unit * unit
            near = f"{below} or {below + unit}" if below > 0 else f"{unit}"
            raise UserError(
                f"tokens_per_step {self.tokens_per_step} is not a positive multiple of {unit} "
                f"(micro_batch_size {self.micro_batch_size} x seq_len {self.seq_len} x "
                f"{self.num_devices} device(s)): nearest valid {near}"
            )

    @property
    def sequences_per_micro_step(self) -> int:
        """Sequences in one forward over all devices."""
        return self.micro_batch_size * self.num_devices

    @property
    def tokens_per_micro_step(self) -> int:
        """Tokens in one forward over all devices."""
        return self.sequences_per_micro_step * self.seq_len

    @property
    def num_micro_steps(self) -> int:
        """Micro steps accumulated into one optimizer step."""
        return self.tokens_per_step // self.tokens_per_micro_step

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step."""
        return self.sequences_per_micro_step * self.num_micro_steps


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run. `*_every` counts optimizer steps; None means off."""

    data: str | None = None
    """Folder made by `prepare`, or several with shares: "A:0.8 B:0.2"."""
    out: str | None = None
    """Run folder: metrics, checkpoints, pictures."""
    preset: str = "gpt2"
    device: str = "auto"
    """auto, tpu, xla-cpu:N (rehearses the TPU on N virtual devices), cuda, mps or cpu."""
    seed: int = 1337
    num_steps: int = 19_073
    stop_after_step: int | None = None
    """End this session at that step; schedule and num_steps stay as they are."""
    session_hours: float | None = None
    """Save and stop cleanly this long after the process started (Kaggle kills at 9 h)."""
    seq_len: int | None = None
    """Tokens in a training sequence; block_size unless given."""
    packing: str = "continuous"
    """continuous (every token is used) or aligned (each sequence begins with a document)."""
    micro_batch_size: int = 16
    """Sequences per device in one forward."""
    tokens_per_step: int = 524_288
    learning_rate: float = 6e-4
    min_lr_ratio: float = 0.1
    schedule: str = "cosine"
    """Of the learning rate after warmup: cosine, linear, wsd or constant (see `optim`)."""
    warmup_steps: int = 715
    weight_decay: float = 0.1
    optimizer: str = "adamw"
    """adamw, or muon for the matrices inside blocks and AdamW for the rest."""
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float | None = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    precision: str = "bf16"
    """bf16 (autocast over fp32 weights) or fp32."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more work."""
    log_every: int = 10
    eval_every: int | None = 250
    eval_tokens: int = 10_485_760
    checkpoint_every: int | None = 1000
    checkpoint_minutes: float | None = 20.0
    keep_last: int = 2
    sample_every: int | None = 1000
    init_from: str | None = None
    """A run or checkpoint whose weights and model settings a new run begins with."""
    resume: str = "auto"
    """auto (newest valid checkpoint in `out`), never, or a path to a run or checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        for name in ("data", "out", "init_from", "resume"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        well_typed(self)
        if self.seq_len is None:
            object.__setattr__(self, "seq_len", self.model.block_size)
        positive(self, "seq_len", "micro_batch_size", "num_steps", "log_every", "keep_last")
        positive(self, "eval_every", "eval_tokens", "checkpoint_every", "sample_every")
        positive(self, "stop_after_step")
        one_of("schedule", self.schedule, ("cosine", "linear", "wsd", "constant"))
        one_of("optimizer", self.optimizer, ("adamw", "muon"))
        one_of("packing", self.packing, ("continuous", "aligned"))
        one_of("precision", self.precision, ("bf16", "fp32"))
        between(self, 0, 1e9, "learning_rate", "weight_decay", "warmup_steps")
        between(self, 0.0, 1.0, "min_lr_ratio")
        between(self, 0.0, 0.999999, "beta1", "beta2")
        between(self, 0, 2**31 - 1, "seed")
        positive(self, "grad_clip", "session_hours", "checkpoint_minutes")
        if self.context > self.model.block_size:
            raise UserError(
                f"seq_len {self.seq_len} is over the model's block_size {self.model.block_size}: "
                f"lower seq_len or raise block_size"
            )

    @property
    def context(self) -> int:
        """`seq_len` once resolved: never None."""
        assert self.seq_len is not None
        return self.seq_len

    def plan(self, num_devices: int) -> BatchPlan:
        """The batch arithmetic of this run on `num_devices` devices.

        Raises:
            UserError: tokens_per_step is no multiple of one micro step.
        """
        return BatchPlan(self.micro_batch_size, self.context, num_devices, self.tokens_per_step)

    @property
    def eval_share(self) -> float:
        """Share of the run's work that evaluations are; a forward is a third of a training pass."""
        if self.eval_every is None:
            return 0.0
        num_evals = self.num_steps / self.eval_every + 1  # the one before step 1
        eval_work = num_evals * self.eval_tokens / 3
        return eval_work / (eval_work + self.num_steps * self.tokens_per_step)

    def replace(self, **changes: Any) -> "TrainConfig":
        """A copy with fields of this class or of `ModelConfig` changed, checked again."""
        if (name := changes.get("preset", self.preset)) != self.preset:
            raise UserError(f"preset is {self.preset!r} here: to have {name!r}, begin with it")
        return _with(self, changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the model's nested under "model"; `from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "TrainConfig":
        """Build from `to_dict`'s form (config.json).

        Raises:
            UserError: an unknown field, named with its nearest neighbour; a value that is wrong.
        """
        if not isinstance(values, dict) or not isinstance(values.get("model", {}), dict):
            raise UserError("a config is an object of settings, the model's in one named 'model'")
        return _with(TrainConfig(), {**values.get("model", {}), **values, "model": ModelConfig()})


MODEL_FIELDS = tuple(f.name for f in fields(ModelConfig))
TRAIN_FIELDS = tuple(f.name for f in fields(TrainConfig) if f.name != "model")


def _with(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """`config` with flat `changes` applied, each sent to the class that owns the field."""
    for name in changes:
        if name not in MODEL_FIELDS and name not in TRAIN_FIELDS and name != "model":
            raise unknown_name("setting", name, (*TRAIN_FIELDS, *MODEL_FIELDS))
    model = changes.get("model", config.model)
    model_changes = {name: changes[name] for name in changes if name in MODEL_FIELDS}
    if model_changes and isinstance(model, ModelConfig):
        model = dataclass_replace(model, **model_changes)
    train_changes = {name: changes[name] for name in changes if name in TRAIN_FIELDS}
    if config.seq_len == config.model.block_size:
        train_changes.setdefault("seq_len", None)  # it followed block_size: let it follow again
    return dataclass_replace(config, model=model, **train_changes)


def presets() -> dict[str, str]:
    """Names of the presets, each with a sentence of where it comes from."""
    return {name: provenance for name, (provenance, _) in PRESETS.items()}


def preset(name: str, **changes: Any) -> TrainConfig:
    """The `TrainConfig` of a named preset, with any field of it or of its model changed.

    Raises:
        UserError: unknown preset or field (the nearest name is given), or values that clash.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return _with(TrainConfig(), {**PRESETS[name][1], "preset": name, **changes})
