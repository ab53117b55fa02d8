"""Train your own GPT from scratch on a free Kaggle TPU; the same code on laptops and GPUs.

    import nanogpt_tpu as ng
    ng.patch_tpu_env()                                      # first, on a TPU
    ng.prepare("book.txt", "data", train_tokenizer=4096)
    result = ng.train(ng.preset("demo", data="data", out="run"))

Importing this package imports no torch and touches no device: names are loaded when first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "errors": ("UserError",),
    "config": ("ModelConfig", "TrainConfig", "BatchPlan", "preset", "presets"),
    "env": ("patch_tpu_env", "input_dir", "working_dir", "attached_dir"),
    "tokenizer": ("Tokenizer", "load_tokenizer", "train_tokenizer"),
    "manifest": ("Manifest", "find_data"),
    "shards": ("ShardLoader",),
    "model": ("GPT",),
    "prepare": ("prepare",),
    "inspection": ("inspect", "draw_lengths"),
    "evaluate": ("evaluate",),
    "sample": ("generate", "sample"),
    "load": ("load_checkpoint",),
    "report": ("report",),
    "export": ("export_hf", "import_hf"),
    "plan": ("plan",),
    "curves": ("LiveCurve",),
    "preflight": ("preflight",),
    "train": ("train", "TrainResult"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["__version__", *_MODULE_OF]


class _Package(ModuleType):
    """Lets a function keep its name although a module has the same one (`train`, `evaluate`).

    Importing a submodule sets it as an attribute of its package, which would hide the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nanogpt_tpu' has no attribute {name!r}")
    value = getattr(import_module(f"nanogpt_tpu.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
