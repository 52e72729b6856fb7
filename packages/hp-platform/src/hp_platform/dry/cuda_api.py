"""What stands for `torch.cuda` and `torch.accelerator` while a dry device is there."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hp_platform.dry.changes import change
from hp_platform.dry.cuda_streams import stream_classes
from hp_platform.dry.trace import HostWait

if TYPE_CHECKING:
    from hp_platform.dry.device import DryDevice


@contextmanager
def stand_ins(device: DryDevice) -> Iterator[None]:
    """Let this process see GPUs."""
    with ExitStack() as stack:
        _streams(stack, device)
        _devices(stack, device)
        _memory(stack, device)
        _random(stack, device)
        _refused(stack)
        yield


def _streams(stack: ExitStack, device: DryDevice) -> None:
    Stream, Event = stream_classes(device)

    def current_stream(_: Any = None) -> Any:
        return Stream.of(device.thread.stream)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            device.thread.stream = stream.number

    def synchronize(_: Any = None) -> None:
        device.emit(HostWait(what="torch.cuda.synchronize", stream=-1))

    @contextmanager
    def use(stream: Any) -> Iterator[None]:
        before = device.thread.stream
        set_stream(stream)
        try:
            yield
        finally:
            device.thread.stream = before

    change(
        stack,
        torch.cuda,
        Stream=Stream,
        Event=Event,
        stream=use,
        current_stream=current_stream,
        default_stream=lambda _=None: Stream.of(0),
        set_stream=set_stream,
        synchronize=synchronize,
        is_current_stream_capturing=lambda: False,
    )
    change(
        stack,
        torch.accelerator,
        current_stream=current_stream,
        set_stream=set_stream,
        synchronize=synchronize,
    )
    change(stack, torch, Stream=Stream, Event=Event)


def _devices(stack: ExitStack, device: DryDevice) -> None:
    gpu = device.gpu

    def properties(_: Any = None) -> Any:
        return types.SimpleNamespace(
            name=gpu.name,
            major=gpu.capability[0],
            minor=gpu.capability[1],
            total_memory=gpu.memory_bytes,
            multi_processor_count=gpu.num_multiprocessors,
            warp_size=32,
            is_integrated=False,
            is_multi_gpu_board=False,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=232448,
            uuid=f"GPU-dry-{device.trace.rank}",
        )

    def index_of(x: Any) -> int:
        if isinstance(x, int):
            return x
        if x is None:
            return device.thread.index
        found = torch.device(x).index
        return device.thread.index if found is None else found

    def set_device(x: Any) -> None:
        device.use_index(index_of(x))

    @contextmanager
    def on_device(x: Any = None) -> Iterator[None]:
        before = device.thread.index
        if isinstance(x, int | str | torch.device) and x != -1:
            device.thread.index = index_of(x)
        try:
            yield
        finally:
            device.thread.index = before

    count = lambda: gpu.num_devices
    change(
        stack,
        torch.cuda,
        device=on_device,
        device_of=lambda _: on_device(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        device_count=count,
        current_device=lambda: device.thread.index,
        set_device=set_device,
        get_device_properties=properties,
        get_device_capability=lambda _=None: gpu.capability,
        get_device_name=lambda _=None: gpu.name,
        get_arch_list=lambda: [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
        is_bf16_supported=lambda *_, **__: gpu.capability >= (8, 0),
        can_device_access_peer=lambda *_: True,
    )
    change(stack, torch.cuda.nccl, version=lambda: (2, 28, 9), is_available=lambda _: True)
    change(stack, torch.backends.cuda, is_flash_attention_available=lambda: True)
    change(
        stack,
        torch.accelerator,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        is_available=lambda: True,
        device_count=count,
        current_device_index=lambda: device.thread.index,
        set_device_index=set_device,
        device_index=on_device,
    )


def _memory(stack: ExitStack, device: DryDevice) -> None:
    storages = device.storages

    def stats(_: Any = None) -> dict[str, int]:
        now, peak = storages.live_bytes, storages.peak_bytes
        found = {"num_alloc_retries": 0, "num_ooms": 0}
        for kind in ("allocated", "reserved", "active", "requested"):
            found[f"{kind}_bytes.all.current"] = now
            found[f"{kind}_bytes.all.peak"] = peak
        return found

    values: dict[str, Any] = {
        "memory_allocated": lambda _=None: storages.live_bytes,
        "max_memory_allocated": lambda _=None: storages.peak_bytes,
        "memory_reserved": lambda _=None: storages.live_bytes,
        "max_memory_reserved": lambda _=None: storages.peak_bytes,
        "memory_stats": stats,
        "reset_peak_memory_stats": lambda _=None: storages.reset_peak(),
        "empty_cache": lambda: None,
    }
    change(
        stack,
        torch.cuda,
        **values,
        mem_get_info=lambda _=None: (
            device.gpu.memory_bytes - storages.live_bytes,
            device.gpu.memory_bytes,
        ),
    )
    change(stack, torch.accelerator, **values)


def _random(stack: ExitStack, device: DryDevice) -> None:
    state = torch.zeros(16, dtype=torch.uint8)
    seed = [0]

    def manual_seed(value: int) -> None:
        seed[0] = int(value)

    change(
        stack,
        torch.cuda,
        get_rng_state=lambda _="cuda": state.clone(),
        get_rng_state_all=lambda: [state.clone()] * device.gpu.num_devices,
        set_rng_state=lambda new, _="cuda": state.copy_(new),
        set_rng_state_all=lambda _: None,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        initial_seed=lambda: seed[0],
        seed=lambda: None,
        seed_all=lambda: None,
    )


def _refused(stack: ExitStack) -> None:
    def refuse(what: str) -> Any:
        def refused(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{what} is not there in a dry run, which runs operators one by one")

        return refused

    change(
        stack,
        torch.cuda,
        CUDAGraph=refuse("torch.cuda.CUDAGraph"),
        graph=refuse("torch.cuda.graph"),
        make_graphed_callables=refuse("torch.cuda.make_graphed_callables"),
    )
    change(stack, torch, compile=refuse("torch.compile"))
