"""What the TPU's compiler says of every preset: writes preflight.md and its pictures here.

    python benchmarks/preflight.py                 # about an hour on two cores, no TPU

Every result is kept by content (see `nanogpt_tpu.preflight`): a second run only writes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanogpt_tpu.config import TrainConfig, preset
from nanogpt_tpu.errors import UserError
from nanogpt_tpu.preflight import BAND, draw, preflight

HOME = Path(__file__).parent
PRESETS = (
    "tpu-fast", "gpt2", "gpt2-untied", "blog", "lyrics", "demo", "gpt2-medium", "gpt2-large",
    "gpt2-xl",
)  # fmt: skip
# From the first recipe to ours, each row with all changes above it.
LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("`blog` as it is", {}),
    ("no recomputing, 16 sequences", {"gradient_checkpointing": False, "micro_batch_size": 16}),
    ("attention in bf16 (no kernel of this shape)", {"attention_fp32": False}),
    ("6 heads of 128 for 12 of 64, in a kernel", {"n_head": 6}),
    ("RMSNorm, no biases", {"norm": "rmsnorm", "bias": False}),
    ("Muon: this is `tpu-fast`", {"optimizer": "muon"}),
)
MICRO_BATCHES = (4, 8, 16, 32)
TOPOLOGIES = ("v5e:2x4", "v5e:4x4", "v5e:16x16", "v6e:2x4")
LADDER_TITLE = "From the first recipe to ours, one lever at a time"
PRESETS_TITLE = "All presets on v5e-8, as they are"
Found = dict[str, Any]
HEAD = (
    "| {} | GiB a chip | micro step, ms | optimizer step, ms | tokens/s | by roofline | MFU |\n"
    "|---|---|---|---|---|---|---|"
)


def ask(config: TrainConfig, topology: str = "v5e:2x4") -> Found | str:
    """A result, or why there is none."""
    print(f"{config.preset} {config.micro_batch_size} {topology}", flush=True)
    try:
        return preflight(config, topology)
    except UserError as error:
        return str(error)


def row(label: str, found: Found | str) -> str:
    if isinstance(found, str):
        return f"| {label} | {found} | | | | | |"
    gib = 2**30
    if not found["fits"]:
        peak = found["hbm_peak_bytes"]
        wanted = f"{peak / gib:.1f}" if peak else "more"
        return (
            f"| {label} | {wanted}: does not fit {found['hbm_limit_bytes'] / gib:.2f} | | | | | |"
        )
    roof = found["roofline"]
    return (
        f"| {label} | {found['hbm_peak_bytes'] / gib:.2f} "
        f"| {found['num_micro_steps']} x {found['micro_step_s'] * 1e3:.1f} "
        f"({roof['micro_step_s'] * 1e3:.1f}) "
        f"| {found['optimizer_step_s'] * 1e3:.1f} ({roof['optimizer_step_s'] * 1e3:.1f}) "
        f"| {found['tokens_per_s']:,.0f} | {roof['tokens_per_s']:,.0f} | {found['mfu']:.0%} |"
    )


def table(head: str, rows: list[tuple[str, Found | str]]) -> str:
    return "\n".join([HEAD.format(head), *(row(label, found) for label, found in rows)])


def ladder() -> list[tuple[str, Found | str]]:
    changes: dict[str, Any] = {}
    rows = []
    for label, change in LADDER:
        changes |= change
        rows.append((label, ask(preset("blog", **changes))))
    return rows


def scaled(topology: str) -> TrainConfig:
    """`tpu-fast` with the step that gives each chip four micro steps, as on eight chips."""
    num_chips = {"v5e:2x4": 8, "v5e:4x4": 16, "v5e:16x16": 256, "v6e:2x4": 8}[topology]
    return preset("tpu-fast", tokens_per_step=65_536 * num_chips)


def main() -> None:
    """Ask, write the page, draw."""
    sections: tuple[tuple[str, str, Callable[[], list[tuple[str, Found | str]]]], ...] = (
        ("Micro-batch sizes of `tpu-fast`", "sequences a chip", lambda: [
            (str(size), ask(preset("tpu-fast", micro_batch_size=size))) for size in MICRO_BATCHES
        ]),
        (LADDER_TITLE, "change", ladder),
        ("Without any kernel", "attention", lambda: [
            ("`tpu-fast`, `attention=\"xla\"`", ask(preset("tpu-fast", attention="xla"))),
            ("`gpt2`, `attention=\"xla\"`", ask(preset("gpt2", attention="xla"))),
        ]),
        (PRESETS_TITLE, "preset", lambda: [
            (f"`{name}`", ask(preset(name))) for name in PRESETS
        ]),
        ("More chips, and newer ones (65,536 tokens a chip and step)", "topology", lambda: [
            (name, ask(scaled(name), name)) for name in TOPOLOGIES
        ]),
    )  # fmt: skip
    text = (HOME / "preflight_head.md").read_text().format(band=BAND)
    results: dict[str, list[tuple[str, Found | str]]] = {}
    for title, head, make in sections:
        results[title] = make()
        text += f"\n## {title}\n\n{table(head, results[title])}\n"
        (HOME / "preflight.md").write_text(text)
        pictured = [
            {**found, "preset": label.replace("`", "")}
            for label, found in results[title]
            if isinstance(found, dict)
        ]
        if title in (LADDER_TITLE, PRESETS_TITLE):
            draw(pictured, HOME / f"preflight_{head}.png")


if __name__ == "__main__":
    main()
