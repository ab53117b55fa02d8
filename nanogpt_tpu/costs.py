"""What a compiled TPU program costs, read from its text: no clock here is a measurement.

Two clocks. *Estimate*: the compiler's own cycles for each operation; blind to kernels, collectives,
gather, scatter and sort, which get a model each. *Roofline*: the larger of bytes over bandwidth and
flops over peak, as if everything else overlapped. Loops count as often as they run.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanogpt_tpu.tpu_compiler import Chip

KERNEL_SHARE = 0.5  # of the peak that a Pallas kernel is taken to reach
VISITED_SHARE = 0.625  # of the square of scores: four blocks of rows up to the diagonal
RING_BYTES_PER_S = 90e9  # an all-reduce moves 2 x 7/8 of its bytes at this (eight chips in a ring)
SORT_S_PER_TOKEN = 1e-3 / (16 * 1024)  # gather, scatter and sort of embedding rows together
_LANES = 128
_COLLECTIVES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "collective-permute": 1,
                "all-to-all": 1}  # fmt: skip
_FREE = ("parameter", "constant", "get-tuple-element", "bitcast", "tuple", "iota", "copy-done",
         "slice-done", "async-done", "after-all", "partition-id")  # fmt: skip
_BOOKKEEPING = ("X64SplitHigh", "X64SplitLow", "X64Combine", "ConcatBitcast", "AllocateBuffer",
                "AssumeGatherIndicesInBound", "Sharding")  # fmt: skip
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
          "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


@dataclass(frozen=True)
class Cost:
    """One operation of a program, with all its repetitions."""

    kind: str  # product, kernel, collective, sort or other
    shape: str
    origin: str  # function of the source that it comes from
    estimate_s: float
    roofline_s: float
    collective_bytes: int = 0


@dataclass(frozen=True)
class _Operation:
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest[: self.rest.find(")")])

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"{name}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else None


def program_costs(text: str, chip: Chip, head_size: int, rows: int) -> list[Cost]:
    """Cost of every operation in the text of a compiled program, on one chip.

    Args:
        text: the optimized program.
        chip: its speeds.
        head_size: of the model: a kernel's heads are as wide as 128 lanes.
        rows: tokens that pass through the program on one chip; scale of gather, scatter and sort.

    Raises:
        ValueError: a loop of unknown length, or a custom call that has no formula.
    """
    return _Reader(text, chip, head_size, rows).costs()


class _Reader:
    def __init__(self, text: str, chip: Chip, head_size: int, rows: int) -> None:
        self._chip, self._head_size, self._rows = chip, head_size, rows
        self._computations: dict[str, dict[str, _Operation]] = {}
        self._entry, self._sorts = "", False
        current = None
        for line in text.splitlines():
            if not line.startswith(" ") and (header := _HEADER.match(line)):
                current = self._computations.setdefault(header.group(2), {})
                self._entry = header.group(2) if header.group(1) else self._entry
            elif current is not None and (found := _OPERATION.match(line)):
                current[found.group(1)] = _Operation(*found.groups())

    def costs(self) -> list[Cost]:
        found = self._walk(self._entry, 1)
        if self._sorts:
            seconds = self._rows * SORT_S_PER_TOKEN
            found.append(Cost("sort", "", "gather, scatter, sort (modelled)", seconds, seconds))
        return found

    def _walk(self, name: str, times: int) -> list[Cost]:
        costs: list[Cost] = []
        for operation in self._computations[name].values():
            if operation.opcode == "while":
                body = operation.attribute("body")
                costs += self._walk(str(body), times * _trip_count(operation))
            elif operation.opcode == "call":
                costs += self._walk(str(operation.attribute("to_apply")), times)
            elif operation.opcode == "conditional":
                costs += self._dearest_branch(operation, times)
            elif cost := self._cost(operation, name, times):
                costs.append(cost)
        return costs

    def _dearest_branch(self, operation: _Operation, times: int) -> list[Cost]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", operation.rest)
        names = re.findall(r"[\w.\-]+", listed.group(1)) if listed else []
        names += [
            n for key in ("true", "false") if (n := operation.attribute(f"{key}_computation"))
        ]
        branches = [self._walk(branch, times) for branch in names]
        return max(branches, key=lambda costs: sum(cost.estimate_s for cost in costs), default=[])

    def _cost(self, operation: _Operation, computation: str, times: int) -> Cost | None:
        opcode = operation.opcode.removesuffix("-start")
        if operation.opcode in _FREE or operation.opcode.endswith("-done"):
            return None
        shape, origin = re.sub(r"\{[^}]*\}", "", operation.shape), _origin(operation.rest)
        if opcode in _COLLECTIVES:
            num_bytes = self._bytes_of(operation.operands, computation, in_hbm=False) * times
            if opcode == "all-gather":
                num_bytes = max(num_bytes, _num_bytes(operation.shape) // 2 * times)
            seconds = _COLLECTIVES[opcode] * 7 / 8 * num_bytes / RING_BYTES_PER_S
            return Cost("collective", f"{opcode} {shape}", origin, seconds, seconds, num_bytes)
        self._sorts |= opcode in ("gather", "scatter", "sort")
        if opcode == "custom-call":
            return self._custom_call(operation, computation, shape, origin, times)
        flops = self._product_flops(operation.attribute("calls"))
        cycles = re.search(r'"estimated_cycles":"?(\d+)', operation.rest)
        estimate = int(cycles.group(1)) / self._chip.clock_hz if cycles else 0.0
        moved = self._bytes_of(operation.operands, computation)
        if not operation.opcode.endswith("-start"):  # a prefetch goes one way
            moved += _num_bytes(operation.shape, in_hbm=True)
        roofline = max(moved / self._chip.hbm_bytes_per_s, flops / self._chip.peak_flops)
        kind = "product" if flops else "other"
        return Cost(kind, shape, origin, estimate * times, roofline * times)

    def _custom_call(
        self, operation: _Operation, computation: str, shape: str, origin: str, times: int
    ) -> Cost | None:
        target = re.search(r'custom_call_target="([^"]*)"', operation.rest)
        name = target.group(1) if target else "?"
        if name in _BOOKKEEPING:
            return None
        if name != "tpu_custom_call":
            raise ValueError(f"no formula for what the custom call {name!r} costs")
        first = self._computations[computation][operation.operands[0]]
        batch, seq_len, packed = _dimensions(first.shape)
        heads = packed // 3 // self._head_size
        num_products = 2 if _dimensions(operation.shape)[-1] == packed // 3 else 5
        flops = 2 * VISITED_SHARE * seq_len**2 * _LANES * batch * heads * num_products
        seconds = flops / (KERNEL_SHARE * self._chip.peak_flops) * times
        return Cost("kernel", shape, origin, seconds, seconds)

    def _bytes_of(self, names: list[str], computation: str, in_hbm: bool = True) -> int:
        known = self._computations[computation]
        return sum(_num_bytes(known[name].shape, in_hbm) for name in names if name in known)

    def _product_flops(self, computation: str | None) -> float:
        """Of the matrix products (the compiler's convolutions) in a fused computation."""
        total = 0.0
        known = self._computations.get(str(computation), {})
        for operation in known.values():
            if operation.opcode == "convolution":
                rows = _size(_dimensions(operation.shape))
                total += 2.0 * rows * _contracted(operation, known)
            total += self._product_flops(operation.attribute("calls"))
        return total


def _trip_count(operation: _Operation) -> int:
    found = re.search(r'"known_trip_count":\{"n":"?(\d+)', operation.rest)
    if found is None:
        raise ValueError(f"the loop {operation.name} does not say how often it runs")
    return int(found.group(1))


def _contracted(operation: _Operation, known: dict[str, _Operation]) -> int:
    """How many numbers each output element sums over."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", operation.rest)
    window = re.search(r"window=\{([^}]*)\}", operation.rest)
    settings = dict(re.findall(r"(\w+)=(\S+)", window.group(1))) if window else {}
    weights = _dimensions(known[operation.operands[1]].shape)
    count = 1
    for size, label in zip(weights, labels.group(1) if labels else "", strict=True):
        if label == "o":
            continue
        if label.isdigit() and _is_batch(settings, int(label)):
            continue
        count *= size
    return count


def _is_batch(settings: dict[str, str], dimension: int) -> bool:
    """A batched product is a convolution whose window slides over the batch."""
    plain = {"pad": "0_0", "lhs_dilate": "1", "stride": "1"}
    parts = {key: settings[key].split("x") for key in plain if key in settings}
    return any(values[dimension] != plain[key] for key, values in parts.items())


def _dimensions(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return [int(n) for n in found.group(2).split(",") if n] if found else []


def _size(dimensions: list[int]) -> int:
    size = 1
    for dimension in dimensions:
        size *= dimension
    return size


def _num_bytes(shape: str, in_hbm: bool = False) -> int:
    """Of all arrays in a type; with `in_hbm`, without those in the chip's vector memory."""
    return sum(
        _size([int(n) for n in sizes.split(",") if n]) * _BYTES.get(dtype, 0)
        for dtype, sizes, layout in _ARRAY.findall(shape)
        if not (in_hbm and "S(" in layout)
    )


def _origin(rest: str) -> str:
    """The function of the source that an operation comes from."""
    found = re.search(r'source_file="([^"]*)" source_line=(\d+)', rest)
    if found is None:
        return "compiler"
    path, line = Path(found.group(1)), int(found.group(2))
    return f"{path.stem}.{_functions(path).get(line, line)}"


@cache
def _functions(path: Path) -> dict[int, str]:
    """Name of the function around each line of a source file."""
    names: dict[int, str] = {}
    if not path.exists():
        return names

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}".lstrip(".")
                names.update(dict.fromkeys(range(child.lineno, (child.end_lineno or 0) + 1), name))
            visit(child, name)

    visit(ast.parse(path.read_bytes()), "")
    return names
