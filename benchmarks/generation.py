"""How fast a model writes: against a loop without a cache, and against the speed of memory.

    python benchmarks/generation.py

The 124M shape, fp32, random weights. The loop without a cache is nanoGPT's way: the whole row again
for each token, logits of the last position only; it is timed where its rows are of average length.
The limit is reading every matrix once a token, as matrix-vector products. In turns, three rounds.
"""

import statistics
import time

import nanogpt_tpu as ng

ng.patch_tpu_env("cpu")

import torch

from nanogpt_tpu.decoder import Decoder
from nanogpt_tpu.runtime import Runtime

NEW_TOKENS, CACHELESS_TOKENS, ROUNDS = 512, 12, 3


def seconds(run) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def cached(model, num_rows: int) -> float:
    """Tokens/s of the decoder with its choosing, all rows together."""
    from nanogpt_tpu.sample import Sampling

    sampling, generator = Sampling(0.8, 50), torch.Generator().manual_seed(1)
    rows, decoder = [[50256] for _ in range(num_rows)], Decoder(model, Runtime.around(model))

    def run() -> None:
        for _ in range(NEW_TOKENS):
            for row, logits in zip(rows, decoder(rows), strict=True):
                row.append(sampling.choose(logits, generator))

    return num_rows * NEW_TOKENS / seconds(run)


@torch.no_grad()
def cacheless(model) -> float:
    """Tokens/s of the whole row again for each token, at NEW_TOKENS / 2 tokens."""
    idx = torch.randint(50257, (1, NEW_TOKENS // 2 - CACHELESS_TOKENS // 2))

    def run() -> None:
        nonlocal idx
        for _ in range(CACHELESS_TOKENS):
            logits = model.head(model.features(idx)[:, -1])[:, :50257] / 0.8
            best, _ = logits.topk(50)
            logits[logits < best[:, [-1]]] = -float("inf")
            idx = torch.cat((idx, torch.multinomial(logits.softmax(-1), 1)), 1)

    return CACHELESS_TOKENS / seconds(run)


@torch.no_grad()
def limit(model) -> float:
    """Tokens/s if a token cost no more than each matrix times one vector."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name != "wpe.weight"]
    vectors = [torch.randn(matrix.size(1)) for matrix in matrices]

    def run() -> None:
        for _ in range(40):
            for matrix, vector in zip(matrices, vectors, strict=True):
                torch.mv(matrix, vector)

    return 40 / seconds(run)


def main() -> None:
    """Print medians and ratios."""
    torch.manual_seed(0)
    model = ng.GPT(ng.preset("gpt2").model).eval()
    measured: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, value in (
            ("limit", limit(model)),
            ("cached, 1 row", cached(model, 1)),
            ("cacheless, 1 row", cacheless(model)),
            ("cached, 8 rows", cached(model, 8)),
        ):
            measured.setdefault(name, []).append(value)
    median = {name: statistics.median(values) for name, values in measured.items()}
    one = median["cached, 1 row"]
    for name, value in median.items():
        print(f"{name:18} {value:7.1f} tokens/s, {value / one:.2f} of cached, 1 row")


if __name__ == "__main__":
    main()
