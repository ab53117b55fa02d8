"""SKILL.md and README.md: valid front matter, code that runs, commands and names that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanogpt_tpu as ng
from nanogpt_tpu.flags import make_parser

ROOT = Path(__file__).resolve().parent.parent
SKILL = (ROOT / "SKILL.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_front_matter_is_what_assistants_load():
    front = SKILL.split("---\n")[1]
    name = re.search(r"^name: (.*)$", front, re.MULTILINE)[1]
    description = re.search(r"^description: (.*)$", front, re.MULTILINE)[1]
    assert re.fullmatch(r"[a-z0-9-]{1,64}", name)
    assert name == "nanogpt-tpu"
    assert 100 < len(description) <= 1024
    assert not set("<>") & set(description)
    assert len(SKILL.splitlines()) < 500


@pytest.mark.parametrize("text", [SKILL, README], ids=["SKILL", "README"])
def test_commands_flags_and_names_exist(text):
    _, commands = make_parser()
    for command in re.findall(r"nanogpt-tpu ([a-z]+(?:-[a-z]+)*)", text):
        assert command in commands, command
    flags = {flag for parser in commands.values() for flag in parser._option_string_actions}
    own_flags = {*flags, "--no-deps", "--help", "--nproc-per-node"}
    for flag in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text):
        assert flag in own_flags, flag
    for name in re.findall(r"\bng\.(\w+)", text):
        assert name in ng.__all__, name
    for path in re.findall(r"`((?:notebooks|docs|kaggle|benchmarks)/[^`*]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_the_code_of_the_skill_runs_from_top_to_bottom(tmp_path):
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environ.pop("USE_TORCH_XLA", None)
    blocks = [block for block in BLOCK.findall(SKILL) if block[0] in ("sh", "python")]
    assert len(blocks) >= 4
    for language, code in blocks:
        run = ["bash", "-euc"] if language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*run, code], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
