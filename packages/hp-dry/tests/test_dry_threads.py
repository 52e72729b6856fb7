"""Streams, events and threads of a dry device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor, nn

from hp_dry import DryDevice, check_streams
from hp_dry.trace import Borrow, HostWait, Launch, RecordEvent, WaitEvent
from hp_platform import Event, ThreadContext, side_stream, use_stream


def of(gpu: DryDevice, *kinds: type[Any]) -> list[Any]:
    return [event for event in gpu.trace if isinstance(event, kinds)]


def test_work_goes_to_the_current_stream_of_its_thread() -> None:
    meet = Barrier(2, timeout=20)
    with DryDevice() as gpu:
        x = torch.zeros(4, device="cuda")

        def work(stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                meet.wait()
                for _ in range(20):
                    x.add(1)
                meet.wait()
            x.mul(2)

        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        threads = [Thread(target=work, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        x.add(1)
    added = [event for event in of(gpu, Launch) if event.what.startswith("aten.add.")]
    found = {(event.thread, event.stream) for event in added}
    assert {stream for _, stream in found} == {0, *(stream.cuda_stream for stream in streams)}
    assert len(found) == 3  # each thread has one stream of its own
    assert {e.stream for e in of(gpu, Launch) if e.what.startswith("aten.mul.")} == {0}


def test_threads_of_a_pool_and_their_backward_are_watched() -> None:
    with DryDevice() as gpu:
        layer = nn.Linear(4, 4, device="cuda")

        def step(_: int) -> str:
            y = layer(torch.ones(2, 4, device="cuda"))
            y.sum().backward()
            return str(y.device)

        with ThreadPoolExecutor(2) as pool:
            assert set(pool.map(step, range(4))) == {"cuda:0"}
        assert layer.weight.grad is not None
    assert len([event for event in of(gpu, Launch) if event.what == "aten.addmm.default"]) == 4


def test_a_thread_context_takes_stream_and_device_along() -> None:
    with DryDevice(local_rank=2) as gpu:
        torch.cuda.set_device(2)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            context = ThreadContext.capture()

        def work() -> None:
            with context.apply():
                torch.zeros(4, device="cuda").add_(1)

        thread = Thread(target=work)
        thread.start()
        thread.join()
    (added,) = [event for event in of(gpu, Launch) if event.what == "aten.add_.Tensor"]
    assert added.stream == stream.cuda_stream
    assert not [event for event in gpu.trace if type(event).__name__ == "Fault"]


def test_backward_runs_on_the_stream_of_forward() -> None:
    with DryDevice() as gpu:
        x = torch.randn(4, device="cuda", requires_grad=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.sin()
        torch.cuda.current_stream().wait_stream(side)
        first = len(gpu.trace.events)
        (y * 2).sum().backward()
        events = gpu.trace.events[first:]
        assert torch.cuda.current_stream().cuda_stream == 0
        x.add(1)
        assert of(gpu, Launch)[-1].stream == 0
    (cos,) = [e for e in events if isinstance(e, Launch) and e.what == "aten.cos.default"]
    assert cos.stream == side.cuda_stream
    # It waits for what the other stream computed, as the engine has it.
    waits = [e for e in events if isinstance(e, WaitEvent)]
    records = {e.event: e.stream for e in events if isinstance(e, RecordEvent)}
    assert (records[waits[0].event], waits[0].stream) == (0, side.cuda_stream)


def test_streams_and_events_of_the_platform_are_noted() -> None:
    with DryDevice() as gpu:
        device = torch.device("cuda", 0)
        stream = side_stream(device, "test of a dry device")
        assert stream is not None
        x, done = torch.zeros(4, device="cuda"), Event(device)
        with use_stream(stream):
            host = torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
            done.record(stream)
        x.record_stream(stream)
        done.synchronize()
        done.wait()
        assert host.tolist() == [0.0] * 4
        number = stream.cuda_stream
    (record,), (wait,) = of(gpu, RecordEvent), of(gpu, WaitEvent)
    assert (record.stream, wait.event, wait.stream) == (number, record.event, 0)
    assert [(e.block, e.stream) for e in of(gpu, Borrow)] == [(1, number)]
    assert [(e.what, e.event) for e in of(gpu, HostWait)] == [("Event.synchronize", record.event)]
    assert [e.stream for e in of(gpu, Launch) if e.what == "copy to host"] == [number]


def test_streams_are_handed_out_again_after_32() -> None:
    with DryDevice():
        numbers = [torch.cuda.Stream().cuda_stream for _ in range(33)]
        high = torch.cuda.Stream(priority=-1).cuda_stream
    assert numbers[32] == numbers[0]
    assert len({*numbers, high, 0}) == 34


def test_to_wait_for_an_event_that_was_not_recorded_is_a_hazard() -> None:
    with DryDevice() as gpu:
        event = torch.cuda.Event()
        event.wait()
        event.synchronize()
        assert event.query()
    kinds = [hazard.kind for hazard in check_streams(gpu.trace)]
    assert kinds == ["waited for too early"] * 2


def test_a_tensor_of_another_thread_is_released_once() -> None:
    with DryDevice() as gpu:
        kept: list[Tensor] = []
        thread = Thread(target=lambda: kept.append(torch.zeros(4, device="cuda")))
        thread.start()
        thread.join()
        assert gpu.storages.live_bytes == 16
        kept.clear()
        assert gpu.storages.live_bytes == 0
