"""megatron-core asks for CUDA by name in places where it would do without: here it gets the CPU."""

from contextlib import nullcontext

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


class _Idle:
    """A stream or event of a device that does everything at once."""

    def wait_stream(self, *_args):
        return self

    wait_event = record_event = record = wait = synchronize = wait_stream


def pretend() -> None:
    """Take the CPU for a CUDA device from now on."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.synchronize = torch.cuda.current_stream = lambda *_args: None
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_args, **_kwargs: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    torch.cuda.Stream = torch.cuda.Event = lambda *_args, **_kwargs: _Idle()
    torch.cuda.current_stream = lambda *_args: _Idle()
    torch.cuda.stream = lambda _stream: nullcontext()
    torch.Tensor.record_stream = lambda *_args: None
    exchange = torch.distributed.all_to_all_single

    def exchange_of(*args, **kwargs):
        """Exchange by sizes that are tensors, which Megatron has as numbers once on the CPU."""
        sizes = {
            n: v.tolist() for n, v in kwargs.items() if n.endswith("sizes") and torch.is_tensor(v)
        }
        return exchange(*args, **{**kwargs, **sizes})

    torch.distributed.all_to_all_single = exchange_of
    kind = torch.Tensor.type

    def type_of(tensor, *args, **kwargs):
        named = kind(tensor, *args, **kwargs)
        is_name = isinstance(named, str) and not named.startswith("torch.cuda.")
        return named.replace("torch.", "torch.cuda.") if is_name else named

    torch.Tensor.type = type_of
    _OnCpu().__enter__()
