"""Metadata of kernels and datasets: every mistake that the kaggle client lets through."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = sorted((ROOT / "kaggle" / "kernels").glob("*/kernel-metadata.json"))
DATASETS = sorted((ROOT / "kaggle" / "datasets").glob("*/dataset-metadata.json"))
KERNEL_TYPES = {
    "id": str, "title": str, "code_file": str, "language": str, "kernel_type": str,
    "is_private": bool, "enable_gpu": bool, "enable_tpu": bool, "enable_internet": bool,
    "machine_shape": str, "dataset_sources": list, "kernel_sources": list,
    "competition_sources": list, "model_sources": list, "keywords": list,
}  # fmt: skip
SOURCE = re.compile(r"INSERT_USERNAME/[a-z0-9]+(-[a-z0-9]+)*")


def slug(title: str) -> str:
    """What Kaggle makes of a title."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def test_all_of_them_are_there():
    assert [path.parent.name for path in KERNELS] == ["build-nanogpt", "data-prep", "sample"]
    assert [path.parent.name for path in DATASETS] == ["tokens"]
    assert not list((ROOT / "kaggle").rglob("*.py")), "import kaggle must find the client"


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.parent.name)
def test_kernel(path):
    assert not path.read_bytes().startswith(b"\xef\xbb\xbf")
    meta = json.loads(path.read_text("utf-8"))
    assert {key: type(value) for key, value in meta.items()} == KERNEL_TYPES
    owner, name = meta["id"].split("/")
    assert owner == "INSERT_USERNAME"
    assert slug(meta["title"]) == name
    assert 5 <= len(meta["title"]) <= 50
    assert meta["title"].isascii()
    assert (meta["language"], meta["kernel_type"]) == ("python", "notebook")
    code = (path.parent / meta["code_file"]).resolve()
    assert code == ROOT / "notebooks" / f"{path.parent.name}.ipynb"
    assert code.is_file()
    for source in (*meta["dataset_sources"], *meta["kernel_sources"]):
        assert SOURCE.fullmatch(source), source
    assert not meta["enable_gpu"]
    is_tpu = path.parent.name == "build-nanogpt"
    assert meta["enable_tpu"] == is_tpu
    assert meta["machine_shape"] == ("TpuV5E8" if is_tpu else "")
    assert meta["enable_internet"] == (path.parent.name == "data-prep")


def test_kernels_read_what_others_write():
    meta = {path.parent.name: json.loads(path.read_text("utf-8")) for path in KERNELS}
    assert meta["build-nanogpt"]["kernel_sources"] == [meta["data-prep"]["id"]]
    assert meta["sample"]["kernel_sources"] == [meta["build-nanogpt"]["id"]]
    datasets = {json.loads(path.read_text("utf-8"))["id"] for path in DATASETS}
    assert {source for one in meta.values() for source in one["dataset_sources"]} <= datasets


@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.parent.name)
def test_dataset(path):
    meta = json.loads(path.read_text("utf-8"))
    owner, name = meta["id"].split("/")
    assert owner == "INSERT_USERNAME"
    assert slug(meta["title"]) == name
    assert 6 <= len(meta["title"]) <= 50
    assert 6 <= len(name) <= 50
    assert 20 <= len(meta["subtitle"]) <= 80
    assert len(meta["licenses"]) == 1
    assert meta["isPrivate"] is True
    assert all(child.is_file() for child in path.parent.iterdir()), "the client skips folders"
