"""Compile everything and compare it with the limits; `--write` replaces them."""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch

from integration_tests.acceptance.cubins.limits import Table


def main() -> int:
    """Run.

    Returns:
        Exit status: 1 where a kernel is missing or exceeds its limits.
    """
    parser = argparse.ArgumentParser(prog="cubins", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="record what was measured as the limits"
    )
    options = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: nothing was compiled")  # noqa: T201
        return 1
    # inductor's advice about matrix products that are not its own.
    warnings.filterwarnings("ignore", message=".*TensorFloat32 tensor cores")
    return _run(write=options.write)


def _run(*, write: bool) -> int:
    import triton  # noqa: PLC0415  # after it is known to be there

    from integration_tests.acceptance.cubins import launches, limits  # noqa: PLC0415
    from integration_tests.acceptance.cubins.passed import PASSED  # noqa: PLC0415
    from integration_tests.acceptance.cubins.toolchain import CAPABILITIES  # noqa: PLC0415

    versions = {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}
    measured: Table = {}
    for rows in _measured(CAPABILITIES):
        measured |= rows
        written_with, others = limits.read()
        if write:  # what is done, whatever ends this
            limits.write(versions, (others if written_with == versions else {}) | measured)
    for name, most in sorted(measured.items()):
        _say(f"{name}: " + ", ".join(f"{k} {v}" for k, v in vars(most).items()))
    if write:
        limits.write(versions, measured)
    written_with, allowed = limits.read()
    if written_with != versions:
        # Another compiler has other numbers; that all compile is checked all the same.
        _say(f"limits are those of {written_with}, not compared with {versions}")
        allowed = measured
    kernels = launches.discover(launches.PACKAGES)
    found = limits.problems(measured, allowed, kernels={*kernels, "inductor"})
    first = CAPABILITIES[0]  # what is looked at here is the same for all
    found += launches.narrow_addresses(first) + launches.not_compiled(PASSED, first)
    _say(*found, f"{len(kernels)} Triton kernels, {len(measured)} rows, {len(found)} problems")
    return 1 if found else 0


def _measured(capabilities: Sequence[int]) -> Iterator[Table]:
    """What each compute capability takes: first kernels of ours, then those of inductor."""
    from integration_tests.acceptance.cubins import inductor, launches  # noqa: PLC0415

    for capability in capabilities:
        found = launches.compiled_launches(capability)
        rows = ((k, dtype, most) for k, each in found.items() for dtype, most in each.items())
        _say(f"sm_{capability}: {len(found)} kernels of ours compiled")
        yield {f"{kernel} {dtype} sm_{capability}": most for kernel, dtype, most in rows}
    for capability in capabilities:
        sm, table = f"sm_{capability}", {}
        for name, written in inductor.compiled_models(capability).items():
            lines = [f"{part}: {why}" for part, why in written.failed.items()]
            _say(f"inductor, {name}, {sm}: {len(written.kernels)} kernels compiled", *lines)
            if written.kernels:
                table[f"inductor {name} {sm}"] = inductor.most_of_all(written)
        yield table


def _say(first: str, *more: str) -> None:
    sys.stdout.write("\n  ".join((first, *more)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
