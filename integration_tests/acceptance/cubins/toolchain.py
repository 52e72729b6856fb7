"""A driver without a device, and what a cubin needs of one."""

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from re import search
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from integration_tests.acceptance.cubins.limits import Resources

CAPABILITIES = 90, 100, 103
"""Of H100 and H200, of B200 and GB200, of B300 and GB300."""


def resources(compiled: Any, capability: int) -> Resources:
    """Read what a kernel that `triton.compile` returned takes, and that it is for the right GPU."""
    if compiled.metadata.target.arch != capability:
        raise ValueError(f"arch ({compiled.metadata.target.arch}) must equal ({capability})")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for name in ("REG", "STACK", "LOCAL"):
        match = search(rf"\b{name}:(\d+)", said)
        if match is None:
            raise ValueError(f"no {name} in what cuobjdump says: {said}")
        found[name] = int(match[1])
    size = len(compiled.asm["cubin"])
    return Resources(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared, size)


class _Driver:
    """What Triton asks before it compiles. Nothing is ever loaded or launched."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps what it has compiled by device.
        return int(self.target.arch)

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Let Triton compile for a compute capability, as 90 for 9.0, whatever is there.

    Cubins have no lines of sources: with them, a cubin's size depends on the folder of the checkout
    in which it was compiled.
    """
    here = mock.patch.object(driver, "_active", _Driver(capability))
    with here, triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        yield


@contextmanager
def collecting_launches(capability: int) -> Iterator[list[tuple[Any, Any]]]:
    """Compile what is launched instead of launching it; yield pairs of kernel and compiled."""
    launched: list[tuple[Any, Any]] = []
    run: Callable[..., Any] = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        del warmup
        launched.append((kernel, run(kernel, *args, warmup=True, **options)))

    with compiling_for(capability), mock.patch.object(JITFunction, "run", compile_only):
        yield launched
