"""The loader: which batch belongs to which step.

Where a batch comes from is a pure function of (seed, step): resuming needs no stored position, and
the number of devices changes nothing. Shards are memory-mapped, one copy a host.

Letters: n sequences, T = seq_len, W windows of T + 1 tokens in all shards of a split.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from nanogpt_tpu.errors import UserError, one_of
from nanogpt_tpu.manifest import Manifest, list_shards, parse_data
from nanogpt_tpu.shardfile import DataPath, read_shard

if TYPE_CHECKING:
    import torch

PACKINGS = ("continuous", "aligned")
_STEPS_AHEAD = 32
CYCLE = 1000  # a mixture's shares are kept exactly in every so many sequences


class _Corpus:
    """The windows of one data folder's split."""

    def __init__(self, data: str, split: str, seq_len: int, packing: str) -> None:
        self.files = list_shards(data, split)
        tokenizer = Manifest.load(data).tokenizer
        self._seq_len, self.vocab_size = seq_len, tokenizer["vocab_size"]
        self.shards = [read_shard(path, data) for path in self.files]
        windows = [max(0, shard.size - 1) // seq_len for shard in self.shards]
        self._starts: list[np.ndarray] | None = None  # of every window, where they are not regular
        if packing == "aligned":
            eot_id = tokenizer["eot_id"]
            self._starts = [_aligned_starts(shard, seq_len, eot_id) for shard in self.shards]
            windows = [len(starts) for starts in self._starts]
        self._ends = np.cumsum(windows)  # shard k holds windows [ends[k-1], ends[k])
        self.num_windows = int(self._ends[-1])
        self.num_dropped_tokens = sum(
            shard.size - num * seq_len for shard, num in zip(self.shards, windows, strict=True)
        ) - sum(1 for num in windows if num)

    def read(self, ids: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy windows `ids` into `rows` of `out`, (n, T + 1): a gather from each shard."""
        shard_of = np.searchsorted(self._ends, ids, side="right")
        firsts = ids - np.concatenate([[0], self._ends])[shard_of]
        for k in np.unique(shard_of).tolist():
            mask, shard = shard_of == k, self.shards[k]
            within = firsts[mask]
            starts = self._starts[k][within] if self._starts else within * self._seq_len
            # Row i of the view is what begins at token i: one NumPy call copies all rows.
            shape = shard.size - self._seq_len, self._seq_len + 1
            view = np.lib.stride_tricks.as_strided(shard, shape, 2 * shard.strides)
            out[rows[mask]] = view[starts]


def _aligned_starts(shard: np.ndarray, seq_len: int, eot_id: int) -> np.ndarray:
    """Where windows of T + 1 tokens start if each is to begin with a document, int64.

    The next one begins with the first document that starts after it; a document of several
    windows' length gives all of those that fit into it. The rest is dropped, and counted.
    """
    documents = np.flatnonzero(shard == eot_id)
    if not documents.size or documents[0] > 0:
        documents = np.concatenate([[0], documents])  # goes on from the shard before
    lengths = np.diff(documents, append=shard.size)
    num_windows = np.maximum(1, (lengths - 1) // seq_len)
    following = np.searchsorted(documents, documents + num_windows * seq_len).tolist()
    chosen, k = [], 0
    while k < len(following):
        chosen.append(k)
        k = following[k]
    repeats = num_windows[chosen]
    within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    starts = np.repeat(documents[chosen], repeats) + within * seq_len
    return starts[starts + seq_len < shard.size]


class ShardLoader:
    """Batches of a split: `loader(step)` gives (idx, targets), each int64 (n, T) on the host.

    Every shard is cut into windows of T + 1 tokens that overlap by one, so that each token but the
    first is a target once; a tail shorter than a window is counted in `num_dropped_tokens`. With
    packing "aligned" each window begins with a document instead, and more is dropped. Each epoch
    visits the windows in an order of its own. `step` counts from 0. Of a mixture, every thousand
    sequences hold each corpus in its share.

    Raises:
        UserError: the split has fewer windows than one batch; file, length and need are given.
    """

    def __init__(
        self,
        data: DataPath,
        split: str,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        shuffle: bool = True,
        packing: str = "continuous",
    ) -> None:
        one_of("packing", packing, PACKINGS)
        for name, value, low in (
            ("seq_len", seq_len, 1),
            ("sequences_per_step", sequences_per_step, 1),
            ("seed", seed, 0),
        ):
            if value < low:
                raise UserError(f"{name} is {value}: it must be at least {low}")
        Manifest.load(data)  # of a mixture: refuses corpora of several tokenizers
        self.seq_len, self.sequences_per_step = seq_len, sequences_per_step
        self._seed, self._shuffle = seed, shuffle
        parts = parse_data(data)
        self._corpora = [_Corpus(folder, split, seq_len, packing) for folder, _ in parts]
        shares = np.cumsum([share for _, share in parts])
        self._slots = np.concatenate([[0], np.rint(shares * CYCLE).astype(np.int64)])
        self._ahead: tuple[int, np.ndarray, np.ndarray] = (-1, np.zeros(0), np.zeros(0))
        self.num_windows = sum(corpus.num_windows for corpus in self._corpora)
        self.num_dropped_tokens = sum(corpus.num_dropped_tokens for corpus in self._corpora)
        for corpus in self._corpora:
            if corpus.num_windows < (sequences_per_step if len(parts) == 1 else 1):
                raise UserError(self._too_short(corpus, split))

    def _too_short(self, corpus: _Corpus, split: str) -> str:
        n, seq_len = self.sequences_per_step, self.seq_len
        most = corpus.num_windows * seq_len
        at_most = f" (tokens_per_step to at most {most})" if most else ""
        longest = max(range(len(corpus.files)), key=lambda k: corpus.shards[k].size)
        return (
            f"{corpus.files[longest]} holds {corpus.shards[longest].size:,} tokens and all {split} "
            f"shards {corpus.num_windows} sequences of {seq_len} + 1; one step needs "
            f"{n} sequences ({n * seq_len + 1:,} tokens): "
            "add data, or lower tokens_per_step or seq_len" + at_most
        )

    def _windows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each row of the batch, the corpus and the window in it; int64 (n,) each."""
        block, nth = divmod(step, _STEPS_AHEAD)
        if self._ahead[0] != block:  # many steps at once: NumPy's cost is by call, not by row
            self._ahead = block, *self._plan(block * _STEPS_AHEAD)
        rows = slice(nth * self.sequences_per_step, (nth + 1) * self.sequences_per_step)
        return self._ahead[1][rows], self._ahead[2][rows]

    def _plan(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Corpus and window of every row from `step` on, a pure function of seed and step."""
        first = step * self.sequences_per_step
        places = first + np.arange(_STEPS_AHEAD * self.sequences_per_step, dtype=np.int64)
        if len(self._corpora) == 1:
            return np.zeros_like(places), self._order(self._corpora[0], places)
        cycles, slots = np.divmod(places, CYCLE)
        corpus_of, own = np.empty_like(places), np.empty_like(places)
        for cycle in np.unique(cycles):
            rows = cycles == cycle
            corpora, ranks = self._cycle(int(cycle))
            corpus_of[rows], own[rows] = corpora[slots[rows]], ranks[slots[rows]]
        for k, corpus in enumerate(self._corpora):
            rows = corpus_of == k
            places[rows] = self._order(corpus, own[rows])
        return corpus_of, places

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each of a cycle's sequences, its corpus and its number in that corpus's own order."""
        slots = np.arange(CYCLE, dtype=np.int64)
        if self._shuffle:
            slots = permute(slots, CYCLE, self._seed + 1, cycle)
        corpus_of, ranks = np.searchsorted(self._slots, slots, side="right") - 1, slots
        for k in range(len(self._corpora)):
            mine = corpus_of == k
            num_slots = int(mine.sum())
            ranks[mine] = cycle * num_slots + np.arange(num_slots)
        return corpus_of, ranks

    def _order(self, corpus: _Corpus, places: np.ndarray) -> np.ndarray:
        """The windows at `places` of the endless sequence of a corpus's epochs."""
        epochs, places = np.divmod(places, corpus.num_windows)
        if not self._shuffle:
            return places
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            ids[rows] = permute(places[rows], corpus.num_windows, self._seed, int(epoch))
        return ids

    def __call__(self, step: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """The batch of `step`: inputs and targets, which are the inputs shifted by one."""
        import torch  # here, so that prepare and inspect start without it

        if step < 0:
            raise UserError(f"step is {step}: it counts from 0")
        tokens = np.empty((self.sequences_per_step, self.seq_len + 1), dtype=np.int64)
        corpus_of, windows = self._windows(step)
        for k, corpus in enumerate(self._corpora):
            rows = np.flatnonzero(corpus_of == k)
            corpus.read(windows[rows], rows, tokens)
            if (highest := int(tokens[rows].max(initial=0))) >= corpus.vocab_size:
                raise UserError(  # XLA: it would be clamped in silence
                    f"the batch of step {step + 1} has id {highest}, outside the vocabulary of "
                    f"{corpus.vocab_size}: find it with nanogpt-tpu inspect"
                )
        both = torch.from_numpy(tokens)  # (n, T + 1)
        return both[:, :-1], both[:, 1:]


def permute(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where each of `places` in [0, size) goes in a pseudo-random permutation: int64, same shape.

    A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway
    2002): no table to build or to store, and the same order under every version of NumPy.
    """
    half_bits = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = [_mix(np.uint64(seed) ^ (np.uint64(epoch) << np.uint64(32)), r) for r in range(6)]
    result = places.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        value = result[outside]
        left, right = value >> shift, value & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key, 0) & mask)
        result[outside] = (left << shift) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _mix(value: Any, salt: int) -> Any:
    """splitmix64's finalizer: scatters the bits of uint64 values."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15) * np.uint64(salt + 1)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
