"""Tokens/s of our training loop beside a plain PyTorch loop of the same shape, on the CPU.

    python benchmarks/training_loop.py

The plain loop is the way nanoGPT trains: one batch of random crops from a memory-mapped file, a
forward and backward, clip, a fused AdamW step, nothing logged. Ours is `nanogpt_tpu.train` as users
call it: Accelerate, the shard loader, metrics, progress bar, learning-rate schedule. Both train the
same shape (6 layers, width 256, T 256, batch 16, vocabulary of the data) in fp32, in turns, so that
a busy machine slows both; the first steps of each turn are not counted.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import nanogpt_tpu as ng

ng.patch_tpu_env("cpu")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanogpt_tpu.manifest import list_shards
from nanogpt_tpu.metrics import read_metrics
from nanogpt_tpu.shardfile import read_shard

N_LAYER, N_HEAD, N_EMBD, SEQ_LEN, BATCH = 6, 8, 256, 256, 16
WARMUP_STEPS = 2


class PlainBlock(nn.Module):
    """A GPT-2 layer, written the usual way."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(N_EMBD), nn.LayerNorm(N_EMBD)
        self.attn, self.proj = nn.Linear(N_EMBD, 3 * N_EMBD), nn.Linear(N_EMBD, N_EMBD)
        self.fc, self.out = nn.Linear(N_EMBD, 4 * N_EMBD), nn.Linear(4 * N_EMBD, N_EMBD)

    def forward(self, x):
        batch, seq_len, _ = x.shape
        q, k, v = self.attn(self.ln_1(x)).split(N_EMBD, dim=2)
        heads = (batch, seq_len, N_HEAD, N_EMBD // N_HEAD)
        q, k, v = (part.view(heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq_len, N_EMBD))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 with a tied head."""

    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, N_EMBD), nn.Embedding(SEQ_LEN, N_EMBD)
        self.blocks = nn.Sequential(*(PlainBlock() for _ in range(N_LAYER)))
        self.ln_f = nn.LayerNorm(N_EMBD)
        for param in self.parameters():
            if param.dim() > 1:  # as nanoGPT: PyTorch's own init makes wide logits, slow to exp
                nn.init.normal_(param, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight
        logits = F.linear(self.ln_f(self.blocks(x)), self.wte.weight)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def plain_loop(data, vocab_size, num_steps):
    """Tokens/s of the plain loop."""
    torch.manual_seed(0)
    tokens = read_shard(list_shards(data, "train")[0])
    model = PlainGPT(vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    for step in range(num_steps):
        if step == WARMUP_STEPS:
            start_s = time.perf_counter()
        starts = torch.randint(len(tokens) - SEQ_LEN - 1, (BATCH,))
        crops = [tokens[s : s + SEQ_LEN + 1].astype(np.int64) for s in starts.tolist()]
        batch = torch.from_numpy(np.stack(crops))
        _, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (num_steps - WARMUP_STEPS) * BATCH * SEQ_LEN / (time.perf_counter() - start_s)


def our_loop(data, num_steps, micro_batch_size, run_dir):
    """Tokens/s of `train`, by its own log."""
    config = ng.preset(
        "gpt2", data=str(data), out=str(run_dir), device="cpu", precision="fp32",
        n_layer=N_LAYER, n_head=N_HEAD, n_embd=N_EMBD, block_size=SEQ_LEN,
        micro_batch_size=micro_batch_size, tokens_per_step=BATCH * SEQ_LEN, num_steps=num_steps,
        warmup_steps=1, learning_rate=1e-3, log_every=WARMUP_STEPS, eval_every=None,
        checkpoint_every=None, resume="never",
    )  # fmt: skip
    ng.train(config)
    rates = [record["tokens_per_s"] for record in read_metrics(run_dir)]
    return statistics.harmonic_mean(rates[1:])


def main():
    """Take turns and print the table's row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        manifest = ng.prepare("demo", data, train_tokenizer=4096)
        vocab_size = manifest.tokenizer["vocab_size"]
        rows = {"plain loop, batch 16": [], "ours, 1 x 16": [], "ours, 8 x 2": []}
        for number in range(args.rounds):
            rows["plain loop, batch 16"].append(plain_loop(data, vocab_size, args.steps))
            for name, micro in (("ours, 1 x 16", 16), ("ours, 8 x 2", 2)):
                run_dir = Path(folder) / f"run_{number}_{micro}"
                rows[name].append(our_loop(data, args.steps, micro, run_dir))
    base = statistics.median(rows["plain loop, batch 16"])
    for name, rates in rows.items():
        median = statistics.median(rates)
        print(
            f"{name:24} {median:8,.0f} tokens/s  x{median / base:.2f}   {[round(r) for r in rates]}"
        )


if __name__ == "__main__":
    main()
