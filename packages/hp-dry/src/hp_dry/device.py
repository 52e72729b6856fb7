"""`DryDevice`: a GPU that computes nothing, for one rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from hp_dry._internals import (
    around_backward,
    cuda_operators,
    operator_kernels,
    without_gpu_contexts,
)
from hp_dry.cluster import Gpu
from hp_dry.cuda import api, methods, random_state
from hp_dry.operators.dispatch import Operators
from hp_dry.recording.recorder import DeviceRecorder, recording_by
from hp_platform.dry_device import noting, set_dry


class DryDevice(DeviceRecorder):
    """The GPU of one rank, which computes nothing: code that runs on it runs for its shapes.

    Inside the context `cuda` is a device for any build of torch: tensors on it have shapes, dtypes
    and a storage, but no memory, and their operators are recorded in `trace`. Tensors on the CPU
    are real. The host reads zeros from the device. Methods of torch's classes are patched
    meanwhile, so that a process can be in one such context at a time; threads that are started
    inside are in it too. A program continues after a mistake such as operands on two devices, or a
    copy to the host without a wait for it, which is recorded as a `Fault`.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, *, gpu: Gpu | None = None, local_rank: int = 0
    ) -> None:
        """Make the GPU of a rank.

        Args:
            rank: Global rank.
            world_size: Number of ranks.
            gpu: Kind of GPU to pretend to be; None: an H100.
            local_rank: Local rank: position among the ranks of a machine.
        """
        super().__init__(rank, world_size, gpu=gpu or Gpu(), local_rank=local_rank)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        composed = cuda_operators.kernels(self.gpu)
        with ExitStack() as stack:
            stack.enter_context(recording_by(self))
            set_dry(entered=True)
            stack.callback(set_dry, entered=False)
            stack.callback(self.storages.forget)
            stack.enter_context(operator_kernels("aten", composed, "AutogradMeta"))
            stack.enter_context(without_gpu_contexts())
            stack.enter_context(noting(self.note_kernel))
            api.enter_stand_ins(stack, self)
            random_state.enter_stand_ins(stack, self)
            methods.enter_stand_ins(stack, self, watching=self._watching)
            stack.enter_context(around_backward(lambda: methods.Functions(self)))
            stack.enter_context(self._watching())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _watching(self) -> ExitStack:
        """Record the operators of this thread inside the context."""
        stack = ExitStack()
        stack.enter_context(methods.Functions(self))
        stack.enter_context(Operators(self))
        return stack
