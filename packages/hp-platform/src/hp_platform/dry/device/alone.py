"""Operations between ranks where no other rank is there: written down, they change nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hp_platform._internals import tree_leaves
from hp_platform.dry.trace import Collective

if TYPE_CHECKING:
    from hp_platform.dry.device.device import DryDevice


class Alone:
    """What `DryDevice.on_collective` is until a world is there: torch's own kernels for `meta`."""

    def __init__(self, device: DryDevice) -> None:
        self._device = device

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write an operation down and return what it would."""
        importlib.import_module("torch.distributed._tools.fake_collectives")
        if "wait_tensor" in func.name():
            return args[0]
        device = self._device
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func.name().split("::")[1].split(".")[0]
        blocks = tuple(device.block_of(x) for x in tensors)
        shapes = tuple((tuple(x.shape), str(x.dtype)[6:]) for x in tensors)
        out = device.run_kernel(func, args, kwargs)
        device.emit(
            Collective(
                op=name,
                group="",
                issuer=device.current_stream(),
                stream=device.stream_of_group(""),
                inputs=shapes,
                outputs=(),
                reads=blocks,
                writes=(),
                work=device.new_work(),
            )
        )
        return out
