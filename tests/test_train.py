"""The loop on the CPU: one step's arithmetic, exact resume, refusals, what is written."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import nanogpt_tpu as ng
from nanogpt_tpu.checkpoint import find_checkpoints, hash_file
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.metrics import read_metrics
from nanogpt_tpu.runtime import Runtime
from nanogpt_tpu.step import TrainStep
from nanogpt_tpu.train import train

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8}


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Three small training shards of bytes, so that short runs cross shard edges."""
    folder = tmp_path_factory.mktemp("shards")
    text = folder / "text.txt"
    text.write_text(" ".join(f"line {n} of {n * n}" for n in range(120)))
    ng.prepare(text, folder / "data", "bytes", shard_tokens=700, val_tokens=200)
    assert len(list((folder / "data").glob("train_*.bin"))) == 3
    return folder / "data"


def small(data, out, **changes):
    settings = {**SMALL, "device": "cpu", "tokens_per_step": 32, "eval_every": None, **changes}
    return ng.preset("tiny", data=str(data), out=str(out), **settings)


def losses(run_dir):
    return [record["loss"] for record in read_metrics(Path(run_dir)) if "loss" in record]


def tensors(run_dir):
    folder = find_checkpoints(Path(run_dir))[0].folder
    files = ("model.safetensors", "optimizer.safetensors")
    return {
        f"{file}:{name}": tensor
        for file in files
        for name, tensor in load_file(folder / file).items()
    }


def assert_same_weights(run_a, run_b):
    a, b = tensors(run_a), tensors(run_b)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def one_step(micro_batch_size, **changes):
    """The step object after one update on the same eight sequences."""
    config = ng.preset(
        "tiny", **SMALL, micro_batch_size=micro_batch_size, tokens_per_step=64, **changes
    )
    torch.manual_seed(0)
    tokens = torch.randint(257, (8, 9), generator=torch.Generator().manual_seed(1))
    step = TrainStep(ng.GPT(config.model), config, config.plan(1), Runtime("cpu", "fp32"))
    step.run(1, tokens[:, :-1], tokens[:, 1:])
    return step


@pytest.mark.parametrize("grad_clip", [1.0, 0.01, None])
def test_accumulated_micro_steps_equal_one_large_batch(grad_clip):
    whole = one_step(8, grad_clip=grad_clip)
    for micro_batch_size in (2, 1):
        parts = one_step(micro_batch_size, grad_clip=grad_clip)
        assert parts.loss.item() == pytest.approx(whole.loss.item(), abs=1e-5)
        assert parts.grad_norm.item() == pytest.approx(whole.grad_norm.item(), rel=1e-4)
        for (name, one), other in zip(
            whole.model.named_parameters(), parts.model.parameters(), strict=True
        ):
            # AdamW's first step is the gradient's sign: where a gradient is nearly zero, rounding
            # may decide it, so compare what the step saw, the first moment.
            moments = [s.optimizer.state[p]["exp_avg"] for s, p in ((whole, one), (parts, other))]
            assert torch.allclose(*moments, atol=1e-7), name


def test_clipping_happens_once_and_is_logged_before():
    free, clipped = one_step(2, grad_clip=None), one_step(2, grad_clip=0.01)
    assert clipped.grad_norm.item() == pytest.approx(free.grad_norm.item())
    assert free.grad_norm.item() > 0.1

    def seen(step):  # the first moment is (1 - beta1) times the gradient that AdamW was given
        parts = [state["exp_avg"].flatten() for state in step.optimizer.state.values()]
        return torch.cat(parts).norm().item() / 0.1

    assert seen(free) == pytest.approx(free.grad_norm.item(), rel=1e-4)
    assert seen(clipped) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_activations_change_nothing(shards, tmp_path, dropout):
    for on in (False, True):
        out = tmp_path / str(on)
        train(small(shards, out, num_steps=5, dropout=dropout, gradient_checkpointing=on))
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    assert_same_weights(tmp_path / "True", tmp_path / "False")


RESUMED = {"num_steps": 20, "dropout": 0.1, "checkpoint_every": None}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stops", [(7,), (1,), (19,), (3, 11, 12)])
def test_stopped_and_resumed_is_the_same_run(shards, tmp_path, stops, optimizer):
    run = {**RESUMED, "optimizer": optimizer}
    assert train(small(shards, tmp_path / "straight", **run)).stopped_because == "done"
    for stop in stops:
        result = train(small(shards, tmp_path / "parts", **run, stop_after_step=stop))
        assert (result.step, result.stopped_because) == (stop, "step")
    assert train(small(shards, tmp_path / "parts", **run)).step == 20

    assert losses(tmp_path / "parts") == losses(tmp_path / "straight")
    assert_same_weights(tmp_path / "parts", tmp_path / "straight")
    steps = [(r["session"], r["step"]) for r in read_metrics(tmp_path / "parts")]
    sessions = [1 + sum(step > stop for stop in stops) for step in range(1, 21)]
    assert steps == list(zip(sessions, range(1, 21), strict=True))


def test_a_resumed_session_runs_only_the_steps_that_are_left(shards, tmp_path, monkeypatch):
    train(small(shards, tmp_path / "run", **RESUMED, stop_after_step=7))
    ran = []
    run = TrainStep.run
    monkeypatch.setattr(
        TrainStep, "run", lambda self, step, *batch: (ran.append(step), run(self, step, *batch))
    )
    train(small(shards, tmp_path / "run", **RESUMED))
    assert ran == list(range(8, 21))


def test_damaged_moments_would_show(shards, tmp_path):
    """Guards the test above it: were moments not restored, resuming would not be exact."""
    train(small(shards, tmp_path / "run", **RESUMED, stop_after_step=7))
    shutil.copytree(tmp_path / "run", tmp_path / "damaged")
    folder = find_checkpoints(tmp_path / "damaged")[0].folder
    moments = load_file(folder / "optimizer.safetensors")
    save_file(
        {k: t if k.startswith("step/") else torch.zeros_like(t) for k, t in moments.items()},
        folder / "optimizer.safetensors",
    )
    state = json.loads((folder / "state.json").read_text())
    state["sha256"]["optimizer.safetensors"] = hash_file(folder / "optimizer.safetensors")
    (folder / "state.json").write_text(json.dumps(state))
    for run in ("run", "damaged"):
        train(small(shards, tmp_path / run, **RESUMED))
    assert losses(tmp_path / "run") != losses(tmp_path / "damaged")


def test_a_finished_run_says_so_and_touches_nothing(shards, tmp_path, capsys):
    config = small(shards, tmp_path / "run", num_steps=4)
    train(config)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files(tmp_path)}
    capsys.readouterr()
    result = train(config)
    assert (result.step, result.stopped_because) == (4, "done")
    assert "Already finished: step 4 of 4" in capsys.readouterr().out
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files(tmp_path)} == before


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_more_steps_can_be_added_after_the_end(shards, tmp_path):
    train(small(shards, tmp_path / "run", num_steps=4))
    result = train(small(shards, tmp_path / "run", num_steps=6))
    assert (result.step, result.stopped_because) == (6, "done")
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_lines_logged_after_the_last_checkpoint_are_run_and_written_once(shards, tmp_path):
    """As after kill -9: the log has steps that no checkpoint holds."""
    config = small(shards, tmp_path / "run", num_steps=9, checkpoint_every=3)
    train(config)
    expected = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000009")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 10, "lo')
    train(config)
    assert losses(tmp_path / "run") == expected


@pytest.fixture(scope="module")
def two_steps(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "run"
    train(small(shards, out, num_steps=20, stop_after_step=2))
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 32}, "n_embd is 32 now and 16 there"),
        ({"block_size": 16}, "block_size is 16 now and 8 there"),
        ({"seq_len": 4}, "seq_len is 4 now and 8 there"),
        ({"tokens_per_step": 64}, "tokens_per_step is 64 now and 32 there"),
        ({"seed": 2}, "seed is 2 now and 1337 there"),
    ],
)
def test_resuming_another_run_is_refused_with_both_values(shards, two_steps, changes, message):
    before = [path.read_bytes() for path in files(two_steps)]
    with pytest.raises(UserError, match=message):
        train(small(shards, two_steps, num_steps=20, **changes))
    assert [path.read_bytes() for path in files(two_steps)] == before


def test_data_of_another_tokenizer_is_refused(shards, two_steps, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("other words in another corpus, " * 200)
    ng.prepare(text, tmp_path / "bpe", train_tokenizer=300)
    with pytest.raises(UserError, match=r"tokenizer is bpe of \d+ ids.* now and bytes of 257"):
        train(small(tmp_path / "bpe", two_steps, num_steps=20))
    ng.prepare(text, tmp_path / "bytes", "bytes")
    with pytest.raises(UserError, match=r"data is .* there"):
        train(small(tmp_path / "bytes", two_steps, num_steps=20))


def test_a_run_goes_on_from_attached_read_only_input(shards, two_steps, tmp_path, monkeypatch):
    mount = tmp_path / "input" / "notebooks" / "someone" / "s01"
    shutil.copytree(two_steps, mount / "run")
    monkeypatch.setenv("NANOGPT_TPU_INPUT", str(tmp_path / "input"))
    result = train(small(shards, tmp_path / "next", num_steps=20, stop_after_step=3))
    assert result.step == 3
    assert [r["step"] for r in read_metrics(tmp_path / "next")] == [1, 2, 3]  # one curve
    other = train(small(shards, tmp_path / "other", num_steps=20, stop_after_step=1, seed=5))
    assert other.step == 1


def test_resume_never_and_from_a_path(shards, two_steps, tmp_path):
    anew = train(small(shards, tmp_path / "a", num_steps=20, stop_after_step=1, resume="never"))
    assert anew.step == 1
    config = small(shards, tmp_path / "b", num_steps=20, stop_after_step=4, resume=str(two_steps))
    assert train(config).step == 4
    with pytest.raises(UserError, match="no such folder"):
        train(small(shards, tmp_path / "c", resume=str(tmp_path / "absent")))
    assert not (tmp_path / "c").exists()


def test_only_damaged_checkpoints_never_mean_a_silent_restart(shards, two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "run")
    model = find_checkpoints(tmp_path / "run")[0].folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:100])
    with pytest.raises(UserError, match=r"every checkpoint is damaged.*model\.safetensors"):
        train(small(shards, tmp_path / "run", num_steps=20))


def test_what_a_run_writes(shards, tmp_path):
    seen = []
    config = small(
        shards,
        tmp_path / "run",
        num_steps=10,
        log_every=2,
        eval_every=5,
        eval_tokens=64,
        checkpoint_every=4,
    )
    result = train(config, on_log=seen.append)
    records = read_metrics(tmp_path / "run")
    assert seen == records
    assert [r["step"] for r in records if "val_loss" in r] == [0, 5, 10]
    assert [r["step"] for r in records if "loss" in r] == [2, 4, 5, 6, 8, 10]  # and at evaluations
    assert all(r["tokens"] == 32 * r["step"] for r in records)
    assert result.val_loss == records[-1]["val_loss"]
    assert [c.step for c in find_checkpoints(tmp_path / "run")] == [10, 8]
    assert ng.Tokenizer is not None
    assert ng.load_tokenizer(tmp_path / "run").kind == "bytes"
    again = ng.TrainConfig.from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert again == config
    state = find_checkpoints(tmp_path / "run")[0].state
    assert state["val_loss"] == result.val_loss
    assert state["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_evaluation_is_the_mean_over_its_windows(shards, tmp_path):
    result = train(small(shards, tmp_path / "run", num_steps=3))
    model, _, _ = ng.load_checkpoint(tmp_path / "run")
    scores = ng.evaluate(model, shards, sequences_per_batch=7)
    loader = ng.ShardLoader(shards, "val", 8, 1, seed=0, shuffle=False)
    parts = [model(*loader(row))[1].item() for row in range(loader.num_windows)]
    assert loader.num_windows % 7  # the last batch is padded
    assert scores["val_loss"] == pytest.approx(sum(parts) / len(parts), abs=1e-5)
    assert scores["num_tokens"] == 8 * loader.num_windows
    assert scores["perplexity"] == pytest.approx(math.exp(scores["val_loss"]))
    # One byte a token: bits per byte is the loss in bits.
    assert scores["bits_per_byte"] == pytest.approx(scores["val_loss"] / math.log(2), rel=0.02)
    assert result.val_loss is None


def test_a_run_that_stands_reads_its_device_only_to_log(shards, tmp_path, monkeypatch):
    reads, shapes = [], set()
    read, forward = Runtime.read, ng.GPT.forward

    def counting_read(self, *scalars):
        reads.append(len(scalars))
        return read(self, *scalars)

    def recording_forward(self, idx, targets=None):
        shapes.add((self.training, tuple(idx.shape)))
        return forward(self, idx, targets)

    monkeypatch.setattr(Runtime, "read", counting_read)
    monkeypatch.setattr(ng.GPT, "forward", recording_forward)
    config = small(
        shards,
        tmp_path / "run",
        num_steps=40,
        log_every=10,
        eval_every=20,
        eval_tokens=1000,
        checkpoint_every=None,
    )
    train(config)
    assert len(reads) == 4 + 3  # four logs, three evaluations
    assert shapes == {(True, (2, 8)), (False, (2, 8))}  # one for training, one for evaluation


class Foreign(torch.nn.Module):
    """Not a GPT: the loop's contract is forward(idx, targets) -> (logits, loss)."""

    def __init__(self, poison_from: int | None = None) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(257, 257)
        self.calls, self.poison_from = 0, poison_from

    def forward(self, idx, targets=None):
        self.calls += 1
        logits = self.table(idx)
        if self.poison_from is not None and self.calls > self.poison_from:
            logits = logits * float("nan")
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_any_module_trains_and_resumes(shards, tmp_path):
    config = small(shards, tmp_path / "run", num_steps=30, learning_rate=0.1)
    train(config.replace(stop_after_step=10), model=Foreign())
    train(config, model=Foreign())
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.5
    with pytest.raises(UserError, match="Foreign"):
        ng.load_checkpoint(tmp_path / "run")
    with pytest.raises(UserError, match=r"nn\.ModuleList named 'h'"):
        train(config.replace(gradient_checkpointing=True, out=str(tmp_path / "b")), model=Foreign())


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good(
    shards, tmp_path, capsys, log_every
):
    config = small(shards, tmp_path / "run", num_steps=12, log_every=log_every, checkpoint_every=3)
    result = train(config, model=Foreign(poison_from=2 * 6))  # two micro steps a step
    assert result.stopped_because == "nan"
    assert "step 7 was not finite" in capsys.readouterr().out
    newest = find_checkpoints(tmp_path / "run")[0]
    assert newest.step == 6
    assert all(torch.isfinite(t).all() for t in newest.load("model.safetensors").values())
    assert '"loss": null' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_session_limit_saves_and_stops(shards, tmp_path):
    config = small(shards, tmp_path / "run", num_steps=10_000, session_hours=1e-9)
    result = train(config)
    assert (result.step, result.stopped_because) == (1, "session")
    assert find_checkpoints(tmp_path / "run")[0].step == 1


def test_the_clock_saves_between_steps(shards, tmp_path):
    train(
        small(
            shards,
            tmp_path / "run",
            num_steps=3,
            checkpoint_every=None,
            checkpoint_minutes=1e-9,
            keep_last=5,
        )
    )
    assert [c.step for c in find_checkpoints(tmp_path / "run")] == [3, 2, 1]


def test_the_model_follows_the_data_s_vocabulary(shards, tmp_path):
    result = train(
        ng.preset(
            "gpt2",
            **SMALL,
            data=str(shards),
            out=str(tmp_path / "run"),
            device="cpu",
            precision="bf16",
            micro_batch_size=2,
            tokens_per_step=16,
            num_steps=1,
            eval_every=None,
        )
    )
    assert result.model.config.vocab_size == 257
    with pytest.raises(UserError, match="vocab_size 300 differs from the 257"):
        train(small(shards, tmp_path / "b", vocab_size=300))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_step": 60}, "60 is not a positive multiple of 16.*48 or 64"),
        ({"device": "cuda"}, "finds none on this machine"),
        ({"device": "cdua"}, "did you mean 'cuda'"),
        ({"out": None}, "out is not set"),
        ({"data": None}, "data is not set"),
        ({"tokens_per_step": 16 * 1000}, "one step needs 2000 sequences"),
    ],
)
def test_refusals_leave_no_file(shards, tmp_path, changes, message):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    config = small(shards, tmp_path / "run").replace(**changes)
    with pytest.raises(UserError, match=message):
        train(config)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused(shards, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="not a writable folder"):
        train(small(shards, tmp_path / "file" / "run"))


def test_presets_evaluate_less_than_a_twentieth_of_their_time():
    for name in ("tiny", "demo", "gpt2"):
        assert ng.preset(name).eval_share < 0.05


def test_starting_anew_never_touches_checkpoints_that_are_there(shards, two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "run")
    before = [path.read_bytes() for path in files(tmp_path / "run")]
    with pytest.raises(UserError, match="already holds checkpoints"):
        train(small(shards, tmp_path / "run", num_steps=20, resume="never"))
    assert [path.read_bytes() for path in files(tmp_path / "run")] == before


@pytest.mark.parametrize("content", ["", '{"format_version": 2, "step": 2}', "[[["])
def test_marks_that_cannot_be_read_never_mean_a_silent_restart(
    shards, two_steps, tmp_path, content
):
    shutil.copytree(two_steps, tmp_path / "run")
    (find_checkpoints(tmp_path / "run")[0].folder / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"every checkpoint is damaged.*state\.json"):
        train(small(shards, tmp_path / "run", num_steps=20))


def test_a_resume_after_a_damaged_newest_keeps_what_it_saves(shards, tmp_path):
    config = small(shards, tmp_path / "run", num_steps=20, checkpoint_every=2, keep_last=5)
    train(config.replace(stop_after_step=4))
    model = find_checkpoints(tmp_path / "run")[0].folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:50])
    train(config.replace(stop_after_step=3, keep_last=1))
    assert train(config.replace(stop_after_step=5)).step == 5


def test_the_right_one_of_several_attached_runs_is_found(shards, two_steps, tmp_path, monkeypatch):
    shutil.copytree(two_steps, tmp_path / "input" / "right")
    further = small(shards, tmp_path / "input" / "other", num_steps=20, n_embd=32)
    train(further.replace(stop_after_step=5))
    monkeypatch.setenv("NANOGPT_TPU_INPUT", str(tmp_path / "input"))
    assert train(small(shards, tmp_path / "run", num_steps=20, stop_after_step=3)).step == 3


def test_a_finished_run_that_is_attached_is_brought_along(shards, tmp_path, monkeypatch):
    train(small(shards, tmp_path / "input" / "run", num_steps=3))
    for path in (tmp_path / "input").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setenv("NANOGPT_TPU_INPUT", str(tmp_path / "input"))
    result = train(small(shards, tmp_path / "run", num_steps=3))
    assert result.stopped_because == "done"
    assert ng.load_checkpoint(result.run_dir)[2]["step"] == 3
    assert ng.report(result.run_dir).is_file()


def test_a_stop_that_is_behind_stays_there(shards, tmp_path):
    config = small(shards, tmp_path / "run", num_steps=9, stop_after_step=4)
    assert train(config).step == 4
    assert (train(config).step, train(config).stopped_because) == (4, "step")


def test_a_drawing_that_fails_does_not_end_the_run(shards, tmp_path, capsys):
    def broken(record):
        raise RuntimeError("no display")

    assert train(small(shards, tmp_path / "run", num_steps=3), on_log=broken).step == 3
    assert capsys.readouterr().out.count("on_log failed") == 1


def test_a_gpt_of_another_shape_is_saved_as_it_is(shards, tmp_path):
    shape = ng.ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=257)
    train(small(shards, tmp_path / "run", num_steps=2), model=ng.GPT(shape))
    assert ng.load_checkpoint(tmp_path / "run")[0].config == shape


def test_frozen_parameters_resume(shards, tmp_path):
    def frozen():
        model = ng.GPT(small(shards, tmp_path).model)
        model.wte.weight.requires_grad_(False)
        return model

    config = small(shards, tmp_path / "run", num_steps=4)
    train(config.replace(stop_after_step=2), model=frozen())
    assert train(config, model=frozen()).step == 4


def test_recomputation_leaves_the_model_as_it_was(shards, tmp_path):
    result = train(small(shards, tmp_path / "run", num_steps=1, gradient_checkpointing=True))
    assert all("forward" not in block.__dict__ for block in result.model.h)


def test_tied_weights_of_any_module_stay_tied(shards, tmp_path):
    class Tied(Foreign):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(257, 257, bias=False)
            self.head.weight = self.table.weight

        def forward(self, idx, targets=None):
            logits = self.head(self.table(idx))
            flat = logits.flatten(0, 1)
            return logits, torch.nn.functional.cross_entropy(flat, targets.flatten())

    config = small(shards, tmp_path / "run", num_steps=4, learning_rate=1e-2)
    train(config.replace(stop_after_step=2), model=Tied())
    model = train(config, model=Tied()).model
    assert model.head.weight is model.table.weight


def max_logits(run_dir):
    return [r["max_attention_logit"] for r in read_metrics(run_dir) if "loss" in r]


def test_qk_norm_bounds_the_attention_logits_that_a_high_rate_drives_up(shards, tmp_path):
    """The stress: matrices of queries and keys a hundred times too large, and a high rate."""
    run = {"num_steps": 25, "learning_rate": 0.05, "warmup_steps": 0, "grad_clip": None}
    for name, qk_norm in (("without", False), ("with", True)):
        config = small(shards, tmp_path / name, **run, qk_norm=qk_norm)
        torch.manual_seed(0)
        model = ng.GPT(config.model)
        for block in model.h:
            block.attn.c_attn.weight.data.mul_(100)
        train(config, model=model)
    head_size = SMALL["n_embd"] // SMALL["n_head"]
    bound = math.sqrt(head_size) * 1.0001
    assert all(0 < logit <= bound for logit in max_logits(tmp_path / "with"))
    assert min(max_logits(tmp_path / "without")) > 10 * bound
    assert losses(tmp_path / "with")[-1] < losses(tmp_path / "without")[-1]


def test_max_attention_logit_is_that_of_the_weights_being_logged(shards, tmp_path):
    config = small(shards, tmp_path / "run", num_steps=3)
    result = train(config)
    block, model = result.model.h[0], result.model
    idx, _ = ng.ShardLoader(shards, "train", 8, 4, seed=config.seed)(2)
    with torch.no_grad():
        x = model.wte(idx[:1]) + model.wpe.weight[:8]
        q, k, _ = block.attn.c_attn(block.ln_1(x)).view(1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / math.sqrt(8))[..., torch.ones(8, 8).tril().bool()]
    assert max_logits(tmp_path / "run")[-1] == pytest.approx(float(scores.max()), rel=1e-5)


def test_a_model_that_is_not_ours_has_no_such_number(shards, tmp_path):
    class Bigram(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(257, 257)

        def forward(self, idx, targets=None):
            logits = self.table(idx)
            flat = logits.flatten(0, 1)
            return logits, torch.nn.functional.cross_entropy(flat, targets.flatten())

    train(small(shards, tmp_path / "run", num_steps=2), model=Bigram())
    assert all("max_attention_logit" not in line for line in read_metrics(tmp_path / "run"))


def test_a_new_run_begins_with_the_weights_of_another(shards, tmp_path, capsys):
    eval_every = {"eval_every": 4, "eval_tokens": 128}
    first = train(small(shards, tmp_path / "first", num_steps=4, qk_norm=True, **eval_every))
    config = small(
        shards, tmp_path / "new", num_steps=2, init_from=tmp_path / "first", **eval_every
    )
    assert not config.model.qk_norm
    result = train(config)
    assert result.model.config.qk_norm
    assert "Beginning with the weights of" in capsys.readouterr().out
    records = read_metrics(tmp_path / "new")
    assert (records[0]["step"], records[0]["val_loss"]) == (0, pytest.approx(first.val_loss))
    assert train(config).step == 2  # the same command again: its own checkpoint, not the other's


def test_weights_of_another_tokenizer_are_not_begun_with(shards, tmp_path):
    train(small(shards, tmp_path / "first", num_steps=1))
    (tmp_path / "text.txt").write_text("other words " * 400)
    ng.prepare(tmp_path / "text.txt", tmp_path / "data", train_tokenizer=260)
    config = small(tmp_path / "data", tmp_path / "new", init_from=str(tmp_path / "first"))
    with pytest.raises(UserError, match=r"its tokenizer is not that of .*prepare the data with"):
        train(config)
    assert not (tmp_path / "new").exists()


def without_blocks(model):
    model.h = torch.nn.ModuleList()


def with_another_attention(model):
    class Mean(torch.nn.Module):
        def forward(self, x, rope):
            return x.mean(1, keepdim=True).expand_as(x)

    model.h[0].attn = Mean()


def with_a_compiled_block(model):
    model.h[0] = torch.compile(model.h[0], backend="eager")


@pytest.mark.parametrize("change", [without_blocks, with_another_attention, with_a_compiled_block])
def test_a_gpt_with_other_layers_trains_without_that_number(shards, tmp_path, change):
    config = small(shards, tmp_path / "run", num_steps=2)
    model = ng.GPT(config.model)
    change(model)
    train(config, model=model)
    assert len(losses(tmp_path / "run")) == 2
    assert all("max_attention_logit" not in line for line in read_metrics(tmp_path / "run"))
