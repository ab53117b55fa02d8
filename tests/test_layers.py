"""The package stays small, and its modules import downwards only."""

import ast
from pathlib import Path

import pytest

import nanogpt_tpu

PACKAGE = Path(nanogpt_tpu.__file__).parent
LAYERS = (
    ("errors", "presets", "modeling_nanogpt_tpu"),
    ("env", "config", "encode", "fused", "spmd", "ties", "tpu_compiler"),
    ("vocabulary", "files", "shardfile", "kernels", "costs", "hf_format"),
    ("manifest", "hub", "clean", "model_card"),
    (
        "tokenizer",
        "shards",
        "sources",
        "metrics",
        "stopping",
        "attention",
        "optim",
        "runtime",
        "flags",
    ),
    ("pallas_attention", "fused_attention", "staging", "merge", "inspection", "curves"),
    ("model", "checkpoint", "findings"),
    ("prepare", "step", "start", "evaluate", "decoder", "load", "report", "plan"),
    ("sample",),
    ("train", "tracing", "preflight", "export"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
HEAVY = ("torch", "torch_xla", "accelerate", "numpy", "tokenizers", "matplotlib")


def imported_modules(tree: ast.Module) -> set[str]:
    """Our own modules that a module imports anywhere: at its top, in functions, for type checks."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("nanogpt_tpu.")}
    return found - {"__version__"}


def test_every_module_has_a_layer():
    assert {path.stem for path in MODULES} == LAYER_OF.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_down(path):
    for name in imported_modules(ast.parse(path.read_text("utf-8"))):
        assert LAYER_OF[name] < LAYER_OF[path.stem], f"{path.stem} imports {name}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_files_and_functions_are_short(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]
            num_lines = node.end_lineno - first.lineno + 1  # without signature and docstring
            assert num_lines <= (80 if node.name == "train" else 40), f"{node.name}: {num_lines}"


def lines_of_code(text: str) -> int:
    """Lines that are neither blank, nor a comment, nor a docstring."""
    silent = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for n, line in lines if line.split("#")[0].strip() and n not in silent)


def test_the_package_can_be_read_in_an_evening():
    """The design asks for 5,000; preflight, the TPU's forms, data kit and export took more."""
    assert sum(lines_of_code(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")) < 7300


def test_the_path_of_a_training_step_can_be_read_before_that():
    """Settings, model, batch, step, loop, devices: all lines, comments and docstrings included."""
    path = (
        "config",
        "presets",
        "model",
        "attention",
        "shards",
        "optim",
        "step",
        "train",
        "runtime",
    )
    assert sum(len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in path) < 2000


@pytest.mark.parametrize("module", ["nanogpt_tpu", "nanogpt_tpu.config", "nanogpt_tpu.cli"])
def test_import_is_light(run_python, module):
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = run_python("-c", code)
    assert done.stdout == "[]\n", done.stderr


def test_every_public_name_resolves(run_python):
    code = (
        "import nanogpt_tpu as ng; values = {name: getattr(ng, name) for name in ng.__all__}; "
        "import nanogpt_tpu.train, nanogpt_tpu.sample; "  # modules named as functions are
        "print(all(values[name] is getattr(ng, name) for name in values), callable(ng.train))"
    )
    done = run_python("-c", code)
    assert done.stdout == "True True\n", done.stderr


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        nanogpt_tpu.trian  # noqa: B018
