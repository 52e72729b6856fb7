"""Compile the kernels for compute capability 9.0, without a GPU, and print their memory accesses.

One line for each kernel and dtype: its name, the dtype, then the PTX instructions that move rows.
Run by `test_expert_kernels.py` in a process of its own, since one that interprets cannot compile.
"""

import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hp_expert.kernels import triton_kernels, triton_rows

WIDTH = 4096
ALIGNED = [["tt.divisibility", 16]]
INDICES = {"token_of", "position_of", "slot_of"}
WEIGHTS = {"weights", "grad_weights"}


def accesses(kernel: Any, dtype: str) -> list[str]:
    """Loads and stores of rows that are `WIDTH` wide; those of one index or weight are left out."""
    options = triton_rows.options(WIDTH)
    constants = {"BLOCK": options.pop("BLOCK"), "K": 2}
    constants["WIDE"] = tl.float64 if dtype == "fp64" else tl.float32
    constants = {name: constants[name] for name in constants if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "width":
            signature[name] = "i32"
        else:
            signature[name] = (
                "*i64" if name in INDICES else "*fp32" if name in WEIGHTS else "*" + dtype
            )
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): ALIGNED for i, name in enumerate(kernel.arg_names) if name not in constants},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found = re.findall(r"(?:ld|st)\.global\S*", compiled.asm["ptx"])
    return [access for access in found if ".v" in access or access.endswith(("b8", "b16"))]


def main() -> None:
    """Print one line for each kernel and dtype."""
    kernels = (
        triton_kernels.gather_rows,
        triton_kernels.sum_rows,
        triton_kernels.sum_rows_backward,
    )
    for kernel in kernels:
        for dtype in ("bf16", "fp32", "fp64"):
            sys.stdout.write(" ".join([kernel.__name__, dtype, *accesses(kernel, dtype)]) + "\n")


if __name__ == "__main__":
    main()
