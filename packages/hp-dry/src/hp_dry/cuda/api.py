"""Functions that replace those of `torch.cuda` and `torch.accelerator` on a dry device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import make_dataclass
from functools import cache
from typing import NoReturn

import torch

from hp_dry._internals import Device, accelerator, change
from hp_dry.cuda.streams import Event, Stream
from hp_dry.recording.recorder import DeviceRecorder
from hp_dry.trace import HostWait

_NCCL = (2, 28, 9)


def enter_stand_ins(stack: ExitStack, device: DeviceRecorder) -> None:
    """Let this process see GPUs, until `stack` is closed."""
    _streams(stack, device)
    _devices(stack, device)
    _memory(stack, device)
    _refused(stack)


def _streams(stack: ExitStack, device: DeviceRecorder) -> None:
    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            device.follow_backward()
            device.thread.stream = stream.number

    @contextmanager
    def use(stream: Stream | None) -> Iterator[None]:
        before = device.current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            device.thread.stream = before

    whole = HostWait(what="torch.cuda.synchronize", stream=-1)
    shared: dict[str, object] = {
        "current_stream": lambda _=None: Stream(number=device.current_stream()),
        "set_stream": set_stream,
        "synchronize": lambda _=None: device.emit(whole),
    }
    change(
        stack,
        torch.cuda,
        Stream=Stream,
        Event=Event,
        stream=use,
        default_stream=lambda _=None: Stream(number=0),
        is_current_stream_capturing=lambda: False,
        **shared,
    )
    change(stack, torch.accelerator, **shared)
    change(stack, torch, Stream=Stream, Event=Event)


def _properties(device: DeviceRecorder) -> object:
    gpu = device.gpu
    major, minor = gpu.capability
    values = {
        "name": gpu.name,
        "major": major,
        "minor": minor,
        "total_memory": gpu.memory_bytes,
        "multi_processor_count": gpu.num_multiprocessors,
        "warp_size": 32,
        "is_integrated": False,
        "is_multi_gpu_board": False,
        "max_threads_per_multi_processor": 2048,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": 227 << 10,
        "shared_memory_per_multiprocessor": 228 << 10,
        "L2_cache_size": 50 << 20,
        "uuid": f"GPU-dry-{device.trace.rank}",
    }
    return make_dataclass("DeviceProperties", values)(**values)


def _devices(stack: ExitStack, device: DeviceRecorder) -> None:
    gpu = device.gpu

    def index_of(x: Device) -> int:
        if isinstance(x, int):
            return x
        found = None if x is None else torch.device(x).index
        return device.thread.index if found is None else found

    @contextmanager
    def on_device(x: Device = None) -> Iterator[None]:
        before = device.thread.index
        index = index_of(x)
        device.thread.index = before if index < 0 else index
        try:
            yield
        finally:
            device.thread.index = before

    count, is_there = lambda: gpu.num_devices, lambda: True
    properties = cache(lambda: _properties(device))

    def current_index() -> int:
        return device.thread.index

    def set_index(x: Device) -> None:
        device.use_index(index_of(x))

    change(
        stack,
        torch.cuda,
        device=on_device,
        device_of=lambda x: on_device(device.index if x.is_cuda else None),
        is_available=is_there,
        is_initialized=is_there,
        init=lambda: None,
        _lazy_init=lambda: None,
        device_count=count,
        current_device=current_index,
        set_device=set_index,
        get_device_properties=lambda _=None: properties(),
        get_device_capability=lambda _=None: gpu.capability,
        get_device_name=lambda _=None: gpu.name,
        get_arch_list=lambda: ["sm_{}{}".format(*gpu.capability)],
        is_bf16_supported=lambda *_, **__: gpu.capability >= (8, 0),
        can_device_access_peer=lambda *_: True,
    )
    stack.enter_context(accelerator(torch.device("cuda")))
    change(stack, torch.cuda.nccl, version=lambda: _NCCL, is_available=lambda _=None: True)
    change(stack, torch.backends.cuda, is_flash_attention_available=lambda: True)
    indices = ("current_device_index", "current_device_idx"), ("set_device_index", "set_device_idx")
    change(
        stack,
        torch.accelerator,
        current_accelerator=lambda check_available=False: torch.device("cuda"),  # noqa: ARG005
        is_available=is_there,
        device_count=count,
        device_index=on_device,
        **dict.fromkeys(indices[0], current_index),
        **dict.fromkeys(indices[1], set_index),
    )


def _memory(stack: ExitStack, device: DeviceRecorder) -> None:
    storages, total = device.storages, device.gpu.memory_bytes

    def stats(_: object = None) -> dict[str, int]:
        found = {"num_alloc_retries": 0, "num_ooms": 0}
        for kind in ("allocated", "reserved", "active", "requested"):
            found[f"{kind}_bytes.all.current"] = storages.live_bytes
            found[f"{kind}_bytes.all.peak"] = storages.peak_bytes
        return found

    def free_and_total(_: object = None) -> tuple[int, int]:
        return total - storages.live_bytes, total

    shared: dict[str, object] = {
        **dict.fromkeys(
            ("memory_allocated", "memory_reserved"), lambda _=None: storages.live_bytes
        ),
        **dict.fromkeys(
            ("max_memory_allocated", "max_memory_reserved"), lambda _=None: storages.peak_bytes
        ),
        "memory_stats": stats,
        "reset_peak_memory_stats": lambda _=None: storages.reset_peak(),
        "reset_accumulated_memory_stats": lambda _=None: None,
        "empty_cache": lambda: None,
    }
    change(stack, torch.cuda, mem_get_info=free_and_total, **shared)
    change(stack, torch.cuda.memory, mem_get_info=free_and_total, **shared)
    change(stack, torch.accelerator, get_memory_info=free_and_total, **shared)


def _refused(stack: ExitStack) -> None:
    def refused(what: str) -> Callable[..., object]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"{what} is not there in a dry run, which runs operator by operator")

        return refuse

    graphs = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle")
    change(stack, torch.cuda, **{name: refused(f"torch.cuda.{name}") for name in graphs})
    change(stack, torch, compile=refused("torch.compile"))
    plain_enter: Callable[[torch.autocast], torch.autocast] = torch.autocast.__enter__

    def enter(context: torch.autocast) -> torch.autocast:
        context = plain_enter(context)
        if torch.is_autocast_enabled("cuda"):
            torch.autocast.__exit__(context, None, None, None)
            refused("torch.autocast of cuda")()
        return context

    change(stack, torch.autocast, __enter__=enter)
