"""Compile everything and compare it with the limits; `--write` replaces them."""

import argparse
import importlib.util
import sys
import warnings

import torch


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

    from integration_tests.cubins import inductor, launches, limits  # noqa: PLC0415
    from integration_tests.cubins.passed import PASSED  # noqa: PLC0415
    from integration_tests.cubins.toolchain import CAPABILITIES  # noqa: PLC0415

    measured: limits.Table = {}
    for capability in CAPABILITIES:
        sm = f"sm_{capability}"
        for kernel, by_dtype in launches.compiled_launches(capability).items():
            measured |= {f"{kernel} {dtype} {sm}": most for dtype, most in by_dtype.items()}
        for name, written in inductor.compiled_models(capability).items():
            lines = [f"{part}: {why}" for part, why in written.failed.items()]
            _say(f"inductor, {name}, {sm}: {len(written.kernels)} kernels compiled", *lines)
            if written.kernels:
                measured[f"inductor {name} {sm}"] = inductor.most_of_all(written)
    for name, most in sorted(measured.items()):
        _say(f"{name}: " + ", ".join(f"{k} {v}" for k, v in vars(most).items()))
    versions = {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}
    if write:
        limits.write(versions, measured)
    written_with, allowed = limits.read()
    if written_with != versions:
        # Another compiler has other numbers; that all compile is checked all the same.
        _say(f"limits are those of {written_with}, not compared with {versions}")
        allowed = measured
    kernels = launches.discover(f"hp_{package}" for package in launches.PACKAGES)
    found = limits.problems(measured, allowed, kernels={*kernels, "inductor"})
    first = CAPABILITIES[0]  # what is looked at here is the same for all
    found += launches.narrow_addresses(first) + launches.not_compiled(PASSED, first)
    _say(*found, f"{len(kernels)} Triton kernels, {len(measured)} rows, {len(found)} problems")
    return 1 if found else 0


def _say(first: str, *more: str) -> None:
    sys.stdout.write("\n  ".join((first, *more)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
