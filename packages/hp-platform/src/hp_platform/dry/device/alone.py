"""Operations between ranks where no other rank is there: written down, they change nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hp_platform.dry.operators.shapes import shapes_of, tensors_in
from hp_platform.dry.trace import Collective

if TYPE_CHECKING:
    from hp_platform.dry.device.device import DryDevice


def write_down(device: DryDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """What `DryDevice.on_collective` is until a world is there: torch's own kernels for `meta`."""
    importlib.import_module("torch.distributed._tools.fake_collectives")
    if "wait_tensor" in func.name():
        return args[0]
    tensors = tensors_in(*args, *kwargs.values())
    blocks = tuple(map(device.block_of, tensors))
    out = device.run_kernel(func, args, kwargs)
    device.emit(
        Collective(
            op=func.name().split("::")[1].split(".")[0],
            group="",
            issuer=device.current_stream(),
            stream=device.stream_of_group(""),
            inputs=shapes_of(tensors),
            outputs=(),
            reads=blocks,
            writes=(),
            work=device.new_work(),
        )
    )
    return out
