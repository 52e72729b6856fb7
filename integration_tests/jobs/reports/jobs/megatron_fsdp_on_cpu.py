"""Megatron-FSDP asks for CUDA's streams by name: here it gets idle ones, and the CPU."""

from contextlib import nullcontext

import torch


class _Idle:
    """A stream or event of a device that does everything at once."""

    device = torch.device("cpu")

    def __init__(self, *_args, **_kwargs):
        pass

    def wait_stream(self, *_args):
        return self

    wait_event = record_event = record = wait = synchronize = wait_stream


def pretend() -> None:
    """Take the CPU for a CUDA device from now on."""
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = _Idle
    torch.cuda.stream = torch.cuda.device = lambda _given: nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.nvtx.range_push = lambda *_args: None
    torch.cuda.nvtx.range_pop = lambda: None
    torch.Tensor.record_stream = lambda *_args: None
    torch.Tensor.cuda = lambda tensor: tensor
