"""The three notebooks: thin, clean, and run in a folder that plays Kaggle."""

import ast
import inspect
import json
import shutil
from dataclasses import fields
from pathlib import Path

import nbformat
import pytest

import nanogpt_tpu as ng
from nanogpt_tpu.metrics import read_metrics

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ("data-prep", "build-nanogpt", "sample")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
    return [c for c in code_cells(notebook) if tag in c.metadata.get("tags", [])]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_thin_and_clean(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.name == "python"
    assert len(notebook.cells) <= 12
    assert len(tagged(notebook, "install")) == len(tagged(notebook, "parameters")) == 1
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= 8, cell.source
        assert max(map(len, lines)) <= 100
        kinds = {type(node) for node in ast.walk(ast.parse(cell.source))}
        assert not kinds & {ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.Lambda}
    headings = [c.source for c in notebook.cells if c.cell_type == "markdown"]
    assert headings[0].startswith("# ")
    assert any("\u4e00" <= char <= "\u9fff" for char in headings[0])


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_plain_literals_that_exist_in_the_package(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    tree = ast.parse(tagged(notebook, "parameters")[0].source)
    names = set()
    for statement in tree.body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)
        names.add(statement.targets[0].id)
    known = {
        "data-prep": set(inspect.signature(ng.prepare).parameters),
        "build-nanogpt": {field.name for field in fields(ng.TrainConfig)},
        "sample": {*inspect.signature(ng.sample).parameters, "run", "device"},
    }[name]
    assert names <= known


def test_the_environment_is_patched_before_anything_else_of_ours():
    for name in NAMES:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        order = [c.metadata.get("tags", [""])[0] for c in code_cells(notebook)]
        assert order[:3] == ["install", "parameters", "environment"]
        assert "ng.patch_tpu_env(" in tagged(notebook, "environment")[0].source


def run(name, parameters, input_dir, working_dir, monkeypatch):
    """Execute a notebook as Kaggle does, its parameters replaced; the executed notebook."""
    from nbclient import NotebookClient

    monkeypatch.setenv("NANOGPT_TPU_INPUT", str(input_dir))
    monkeypatch.setenv("NANOGPT_TPU_WORKING", str(working_dir))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.delenv("USE_TORCH_XLA", raising=False)
    working_dir.mkdir(parents=True)
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    at = notebook.cells.index(tagged(notebook, "parameters")[0])
    lines = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(lines))
    resources = {"metadata": {"path": str(working_dir)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return notebook


def printed(notebook):
    return "".join(
        output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs
    )


def pictures(notebook):
    return [
        output
        for cell in code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {}) or "text/html" in output.get("data", {})
    ]


def attach(source, mount):
    """What Kaggle does with an attached output: a copy that cannot be written."""
    shutil.copytree(source, mount)
    for path in (mount, *mount.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


@pytest.mark.slow
def test_the_three_notebooks_hand_over_to_each_other_as_on_kaggle(tmp_path, monkeypatch):
    import importlib.util

    device = "xla-cpu:8" if importlib.util.find_spec("torch_xla") else "cpu"
    empty = tmp_path / "nothing"
    empty.mkdir()

    prepared = run(
        "data-prep",
        {"max_tokens": 60_000, "train_tokenizer": None, "tokenizer": "bytes"},
        empty,
        tmp_path / "prep",
        monkeypatch,
    )
    assert "validation tokens" in printed(prepared)
    assert len(pictures(prepared)) == 1

    # A session that its limit ends, with the data mounted as one known layout has it.
    tiny = {"preset": "tiny", "num_steps": 6, "tokens_per_step": 512, "device": device}
    first_input = tmp_path / "input1"
    attach(tmp_path / "prep", first_input / "data-prep")
    first = run(
        "build-nanogpt", {**tiny, "session_hours": 1e-9}, first_input, tmp_path / "one", monkeypatch
    )
    assert "session at step 1" in printed(first)

    # The same notebook again, its own output attached beside the data in the other layout.
    second_input = tmp_path / "input2"
    attach(tmp_path / "prep", second_input / "notebooks" / "someone" / "data-prep")
    attach(tmp_path / "one", second_input / "notebooks" / "someone" / "build-nanogpt")
    second = run("build-nanogpt", tiny, second_input, tmp_path / "two", monkeypatch)
    assert "Resuming from" in printed(second)
    assert "done at step 6" in printed(second)
    assert len(pictures(second)) >= 2  # the live curve and the run card
    records = read_metrics(tmp_path / "two" / "run")
    steps = [(record["session"], record["step"]) for record in records if "loss" in record]
    assert steps == [(1, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 6)]

    third_input = tmp_path / "input3"
    attach(tmp_path / "two", third_input / "build-nanogpt")
    written = run("sample", {"max_new_tokens": 8}, third_input, tmp_path / "three", monkeypatch)
    assert "The function returns" in printed(written)
    assert "trained for 6 steps" in printed(written)


@pytest.mark.slow
def test_without_data_the_cell_says_what_to_attach(tmp_path, monkeypatch):
    from nbclient.exceptions import CellExecutionError

    (tmp_path / "input").mkdir()
    with pytest.raises(CellExecutionError, match=r"attach the output of data-prep"):
        run("build-nanogpt", {}, tmp_path / "input", tmp_path / "work", monkeypatch)
    assert list((tmp_path / "work").iterdir()) == []


def test_notebook_files_are_small_and_of_one_format():
    for name in NAMES:
        path = NOTEBOOKS / f"{name}.ipynb"
        assert path.stat().st_size < 20_000
        assert json.loads(path.read_text("utf-8"))["nbformat"] == 4
