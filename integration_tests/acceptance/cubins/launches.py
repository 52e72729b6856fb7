"""What the packages' launchers launch, for the shapes and dtypes of the models there are."""

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from hp_expert.kernels import (
    triton_activation,
    triton_buffers,
    triton_routing,
    triton_rows,
    triton_sorting,
)
from integration_tests.acceptance.cubins.intervals import overflows
from integration_tests.acceptance.cubins.limits import Resources
from integration_tests.acceptance.cubins.toolchain import collecting_launches, resources

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = sorted(file.parent.name for file in ROOT.glob("packages/*/src/hp_*/__init__.py"))
_OF_LIBRARIES = "hp_verify.recording.adapters."
"""Modules for libraries that need not be installed; `test_cubins` reads their sources."""
WIDTHS = 2048, 4096, 7168
CHOICES = range(1, 9)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOKENS = 4096

_ids = partial(torch.empty, dtype=torch.int64, device="meta")
_narrow_ids = partial(torch.empty, dtype=torch.int32, device="meta")
_ALL_IDS = _ids, _narrow_ids
_weights = partial(torch.empty, dtype=torch.float32, device="meta")


def discover(packages: Iterable[str]) -> set[str]:
    """Return the full names of all kernels, found by importing every module of the packages.

    Raises:
        ImportError: A module cannot be imported, and a kernel could be in it.
    """
    found = set()
    for package in map(importlib.import_module, packages):
        walked = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name in (each.name for each in walked):
            if name.endswith("__main__") or name.startswith(_OF_LIBRARIES):
                continue
            held = vars(importlib.import_module(name)).values()
            kernels = [k for k in held if isinstance(k, KernelInterface)]
            # Those made elsewhere are imports; private ones are parts of those that call them.
            own = {full_name(k) for k in kernels if full_name(k).startswith(f"{name}.")}
            found |= {k for k in own if not k.removeprefix(f"{name}.").startswith("_")}
    return found


def full_name(kernel: Any) -> str:
    """Return module and name, also of a kernel that `triton.autotune` has wrapped."""
    while not hasattr(kernel, "__module__") or not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return f"{kernel.__module__}.{kernel.__name__}"


@cache
def compiled(capability: int) -> dict[str, list[tuple[Any, Any]]]:
    """Compile what every launcher launches: by dtype of the rows, kernels and what they became."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    for dtype, torch_dtype in DTYPES.items():
        with collecting_launches(capability) as launched:
            for width in WIDTHS:
                rows: Callable[[int], Tensor] = partial(_rows, width=width, dtype=torch_dtype)
                for launch in LAUNCHES:
                    launch(rows)
        # Equal specialisations share one compiled kernel.
        found[dtype] = list({made.hash: (kernel, made) for kernel, made in launched}.values())
    return found


def compiled_launches(capability: int) -> dict[str, dict[str, Resources]]:
    """Measure what every launcher launches.

    Returns:
        By full name of the kernel and dtype of the rows: the most that a program takes, over all
        widths and numbers of choices.
    """
    found: dict[str, dict[str, Resources]] = {}
    for dtype, launched in compiled(capability).items():
        for kernel, made in launched:
            most, one = found.setdefault(full_name(kernel), {}), resources(made, capability)
            most[dtype] = one.most(most[dtype]) if dtype in most else one
    return found


def narrow_addresses(capability: int) -> list[str]:
    """Return a line for each address that 32 bits may not hold, see `intervals`."""
    launched = [pair for pairs in compiled(capability).values() for pair in pairs]
    lines = {
        f"{full_name(kernel)}: {line}"
        for kernel, made in launched
        for line in overflows(made.asm["ttir"])
    }
    return sorted(lines)


def not_compiled(passed: Iterable[str], capability: int) -> list[str]:
    """Return a line for each launch whose dtypes no compiled kernel has, see `passed`."""
    made = {
        (kernel.__name__, *made.src.signature.values())
        for pairs in compiled(capability).values()
        for kernel, made in pairs
    }
    wanted = {line: (line.split()[0], *map(_in_triton, line.split()[1:])) for line in passed}
    missing = (w for w, want in wanted.items() if not any(m[: len(want)] == want for m in made))
    return [f"{line}: is passed, and not compiled" for line in sorted(missing)]


def _in_triton(dtype: str) -> str:
    """A dtype of torch in a signature of Triton's; what is left out is a constant there."""
    return "constexpr" if dtype == "-" else f"*{_NAMES[dtype]}"


_NAMES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
}


def _rows(number: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(number, width, dtype=dtype, device="meta")


def _gather_rows(rows: Callable[[int], Tensor]) -> None:
    for ids in _ALL_IDS:
        triton_rows.gather_rows(rows(TOKENS), ids(TOKENS * 8), holes=True)


def _sum_rows(rows: Callable[[int], Tensor]) -> None:
    for k in CHOICES:
        for weights in (None, _weights(TOKENS, k)):
            # Under autocast sums of bf16 rows are fp32.
            for ids, dtype in itertools.product(_ALL_IDS, (None, torch.float32)):
                triton_rows.sum_rows(
                    rows(TOKENS * k), ids(TOKENS, k), weights, holes=True, dtype=dtype
                )
        pair = rows(TOKENS * k), rows(TOKENS * k)
        triton_rows.sum_rows(pair[0], _ids(TOKENS, k), holes=True, more_RD=pair[1])


def _sum_rows_backward(rows: Callable[[int], Tensor]) -> None:
    for k in CHOICES:
        many, slots, weights = rows(TOKENS * k), _ids(TOKENS * k), _weights(TOKENS, k)
        triton_rows.sum_rows_backward(rows(TOKENS), many, slots, weights, holes=True)


FORMS = triton_activation.Form(), triton_activation.Form(7.0, 1.702)


def _activations(rows: Callable[[int], Tensor]) -> None:
    pre = rows(TOKENS), rows(TOKENS)
    for form, ids in itertools.product(FORMS, _ALL_IDS):
        places = ids(TOKENS), ids(TOKENS)
        triton_activation.activate(*pre, places[0], form)
        for weights, extra in ((None, None), (_weights(TOKENS), None), (_weights(TOKENS),) * 2):
            triton_activation.activate_backward(
                rows(TOKENS), pre, pre, form, at=places, weights_S=weights, extra_P=extra
            )
    triton_activation.zero_idle(rows(TOKENS).view(8, -1), _ids(8))


SIZES = (8, 2), (128, 8), (256, 8)
"""Experts, and experts per token, of Mixtral, Qwen3 and DeepSeek-V3."""


def _routing(rows: Callable[[int], Tensor]) -> None:
    if rows(1).dtype != torch.float32:
        return  # logits are never narrower
    for num_experts, top_k in SIZES:
        groups = (8, 4) if num_experts == 256 else (1, 1)
        rule = triton_routing.Rule(top_k, num_experts == 256, True, 2.5, *groups, groups[0] > 1)
        logits, experts = _weights(TOKENS, num_experts), _ids(TOKENS, top_k)
        for bias in (None, _weights(num_experts)):
            triton_routing.route(logits, rule, bias=bias)
        triton_routing.route(logits, rule, bias=None, experts_TK=experts)
        for grad_scores in (None, logits):
            triton_routing.route_backward(
                logits,
                experts,
                rule,
                grad_weights=_weights(TOKENS, top_k),
                grad_scores=grad_scores,
                load=_ids(num_experts),
            )


def _sorting(rows: Callable[[int], Tensor]) -> None:
    del rows
    for (num_experts, top_k), ids in itertools.product(SIZES, _ALL_IDS):
        experts = ids(TOKENS, top_k)
        triton_sorting.place(experts, triton_sorting.count(experts, num_experts))
        part = {"num_local": num_experts // 4, "num_ranks": 4}
        triton_sorting.find_ranks(experts, **part)
        for codes in (torch.uint8, torch.int32):
            triton_sorting.encode(_ids(TOKENS * top_k), experts, **part, dtype=codes)
            received = torch.empty(TOKENS, dtype=codes, device="meta")
            triton_sorting.decode(received, _ids(TOKENS), per_row=top_k)


def _buffers(rows: Callable[[int], Tensor]) -> None:
    for ids in _ALL_IDS:
        triton_rows.gather_rows(_weights(TOKENS), ids(TOKENS), holes=True)
    columns = triton_buffers.Columns(0, 1, 2, 4, 5)
    for num_experts, top_k in SIZES:
        experts, num_local = _ids(TOKENS, top_k), num_experts // 4
        counted = triton_sorting.count(experts, num_experts)
        room = TOKENS * top_k // 4 * 3 // 2
        triton_sorting.fill(experts, counted, num_local=num_local, num_ranks=4, room=room)
        sent = triton_buffers.tell(counted.counts, columns, code=1 << 40, num_ranks=4, size=512)
        triton_buffers.sort_received(
            sent,
            columns,
            code=1 << 40,
            room=room,
            num_local=num_local,
            weights=_weights(TOKENS, top_k),
            found=_ids(3),
            dtype=rows(1).dtype,
        )


def launch_sizes(num_rows: int) -> None:
    """Launch what is given numbers of rows, which differ from step to step."""
    experts, weights = _ids(num_rows, 2), _weights(num_rows)
    counted = triton_sorting.count(experts, 8)
    triton_sorting.place(experts, counted)
    triton_sorting.fill(experts, counted, num_local=4, num_ranks=2, room=num_rows)
    triton_sorting.find_ranks(experts, num_local=4, num_ranks=2)
    codes = triton_sorting.encode(
        _ids(2 * num_rows), experts, num_local=4, num_ranks=2, dtype=torch.uint8
    )
    triton_sorting.decode(codes, _ids(2 * num_rows), per_row=2)
    triton_rows.gather_rows(weights, _ids(num_rows), holes=True)
    rule = triton_routing.Rule(2, sigmoid=False, normalize=True, scaling_factor=1.0)
    triton_routing.route(_weights(num_rows, 8), rule, bias=None)


LAUNCHES = _gather_rows, _sum_rows, _sum_rows_backward, _activations, _routing, _sorting, _buffers
"""Each calls launchers with rows of one width and dtype. A new kernel needs one here."""
