"""Text out of a model: temperature, top-k, top-p, seed, stop at end-of-text.

    text = generate(model, tokenizer, "The future of AI is", max_new_tokens=64, seed=1)

Beyond the model's context the older half of it is forgotten (see `decoder`). Choosing the token
happens on the host, with a generator of its own for each sample, so a sample does not depend on how
many others are drawn with it.
"""

import math
import sys
import time
from dataclasses import dataclass

import torch

from nanogpt_tpu.decoder import Decoder
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.model import GPT
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One generated text."""

    text: str
    """The prompt and what follows it."""
    tokens: list[int]
    """The new ids, end-of-text included if it was drawn."""
    finish_reason: str
    """"eot" or "length"."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, in this order: temperature, top-k, top-p."""

    temperature: float = 1.0
    """0 takes the likeliest token always."""
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}: 0 (greedy) or any number above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: at least 1, or none to turn it off")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: above 0 and at most 1 (1 turns it off)")

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Draw one id from logits (V,).

        Nucleus sampling (top-p): Holtzman et al. 2020. Done in float64: a temperature of 1e-45
        is greedy, not NaN.
        """
        logits = logits.double()
        if not torch.isfinite(logits).all():
            raise UserError("the model's logits are not finite: it diverged; load an earlier step")
        if self.temperature == 0:
            return int(logits.argmax())
        kept = self._likeliest(logits)
        probs = ((logits[kept] - logits.max()) / self.temperature).softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ranked_probs, ranked = probs.sort(descending=True, stable=True)
            before = ranked_probs.cumsum(-1) - ranked_probs  # mass of the likelier ones
            probs[ranked[before >= self.top_p]] = 0.0  # the likeliest always stays
        return int(kept[torch.multinomial(probs, 1, generator=generator)])

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The ids that top-k leaves, ascending: exactly k, of equal ones the first. No sort."""
        if self.top_k is None or self.top_k >= logits.numel():
            return torch.arange(logits.numel())
        last = logits.topk(self.top_k).values[-1]
        above, equal = (logits > last).nonzero()[:, 0], (logits == last).nonzero()[:, 0]
        return torch.cat((above, equal[: self.top_k - above.numel()])).sort().values


def sample(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    num_samples: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int = 1337,
    stop_at_eot: bool = True,
    runtime: Runtime | None = None,
) -> tuple[list[Sample], float]:
    """Continue a prompt `num_samples` times; an empty prompt starts from end-of-text.

    Returns the samples and the speed in new tokens per second.

    Raises:
        UserError: a setting outside its range, or a tokenizer that is not the model's.
    """
    sampling = Sampling(temperature, top_k, top_p)
    for name, value, low in (
        ("num_samples", num_samples, 1),
        ("max_new_tokens", max_new_tokens, 0),
        ("seed", seed, 0),
    ):
        if not low <= value < 2**31:
            raise UserError(f"{name} is {value}: from {low} to 2147483647")
    model.check_tokenizer(tokenizer.vocab_size, tokenizer.sha256)
    prompt_ids = [tokenizer.eot_id, *tokenizer.encode(prompt)]
    context = model.config.block_size
    if len(prompt_ids) > context:
        print(
            f"note: the prompt has {len(prompt_ids)} tokens, the model sees the last {context}",
            file=sys.stderr,
        )
    rows = [list(prompt_ids) for _ in range(num_samples)]
    runtime = runtime or Runtime.around(model)
    start_s = time.monotonic()
    reasons = _extend(
        model, rows, max_new_tokens, sampling, seed, tokenizer.eot_id if stop_at_eot else None,
        runtime,
    )  # fmt: skip
    elapsed_s = time.monotonic() - start_s
    samples = []
    for row, reason in zip(rows, reasons, strict=True):
        new = row[len(prompt_ids) :]
        samples.append(Sample(prompt + tokenizer.decode(new), new, reason))
    return samples, sum(len(s.tokens) for s in samples) / max(elapsed_s, 1e-9)


def generate(model: GPT, tokenizer: Tokenizer, prompt: str = "", **settings: object) -> str:
    """The prompt and its continuation as one text; settings as for `sample`."""
    samples, _ = sample(model, tokenizer, prompt, **settings)  # type: ignore[arg-type]
    return samples[0].text


@torch.no_grad()
def _extend(
    model: GPT,
    rows: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_id: int | None,
    runtime: Runtime,
) -> list[str]:
    """Append new ids to each row until it stops; why each one did."""
    was_training = model.training
    model.eval()
    next_logits = Decoder(model, runtime)
    generators = [torch.Generator().manual_seed(seed + n) for n in range(len(rows))]
    reasons, ends = [""] * len(rows), [len(row) + max_new_tokens for row in rows]
    for _ in range(max_new_tokens):
        logits = next_logits(rows)  # (n, V)
        for n, row in enumerate(rows):
            row.append(sampling.choose(logits[n], generators[n]))
            if row[-1] == stop_id and not reasons[n]:
                reasons[n], ends[n] = "eot", len(row)
        if all(reasons):
            break
    for row, end in zip(rows, ends, strict=True):
        del row[end:]  # a row that had ended was run on beside the others
    model.train(was_training)
    return [reason or "length" for reason in reasons]
