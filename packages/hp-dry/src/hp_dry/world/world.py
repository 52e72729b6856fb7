"""World of a dry run: operations between ranks, and the store of the default group.

Operations on tensors of the device are recorded as `Collective` on the stream of their communicator
and return at once, as on NCCL. Operations on tensors of the host are carried out between the
processes of the dry run (`hp_dry.world.exchange`) and recorded as `HostMessage`. torch's own code
makes the groups, with back ends that replace NCCL and Gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hp_dry._internals import (
    Arguments,
    Keywords,
    Operator,
    arguments_of,
    change,
    is_meta,
    operator_kernels,
    operator_names,
    rendezvous_by,
    work_of,
)
from hp_dry.cluster import Classes
from hp_dry.device import DryDevice
from hp_dry.recording import sites
from hp_dry.recording.tensors import shapes_of
from hp_dry.trace import Collective, HostMessage, HostWait, WaitWork
from hp_dry.world import backends, objects
from hp_dry.world.c10d import (
    arguments_by_name,
    functional_operation,
    operations_of,
)
from hp_dry.world.communicators import Communicator
from hp_dry.world.exchange import Operation, seconds_of
from hp_dry.world.groups import Groups
from hp_dry.world.hub import HubClient
from hp_dry.world.store import DryStore
from hp_platform._internals import AsyncCollectiveTensor, group_of
from hp_platform.failures import messages


class _Thread(threading.local):
    """Thread-local state of a thread of the host."""

    batch = -1
    work = -1
    carried: ProcessGroup | None = None


class DryWorld:
    """Context in which the rank of a `DryDevice` is one of many ranks.

    Args:
        device: Device of this rank, whose context was entered before.
        classes: Classes of the ranks, each with its representative.
        client: Connection to the hub that all representatives share.
    """

    def __init__(self, device: DryDevice, classes: Classes, client: HubClient) -> None:
        self.device, self.classes, self.client = device, classes, client
        self.rank, self.size = device.trace.rank, device.trace.world_size
        self.groups = Groups(device, classes, client)
        self.thread = _Thread()
        self._stores: list[DryStore] = []
        self._unwaited: dict[int, Work] = {}  # by block, results of operations without a wait
        self._batches = count(1)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            backends.enter_stand_ins(stack, self.groups, self._start_batch, self._end_batch)
            objects.enter_stand_ins(stack, self.groups)
            kernels = {name: self._kernel(name) for name in operator_names()}
            stack.enter_context(operator_kernels("c10d", kernels, "CPU", "Meta"))
            stack.enter_context(rendezvous_by(self._rendezvous))
            change(stack, self.device, on_collective=self._on_collective)
            change(stack, messages, _device=self._host_for_values)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _rendezvous(self, _: str, **__: object) -> Iterator[tuple[DryStore, int, int]]:
        own = str(torch.cuda.get_device_properties(self.device.device).uuid)
        store = DryStore(self.client, self.classes, rank=self.rank, own=own)
        self._stores.append(store)  # C++ refers to its own half of the store only
        yield store, self.rank, self.size

    def _start_batch(self) -> None:
        """Begin a batch: operations of this thread count as one until its end."""
        self.thread.batch, self.thread.work = next(self._batches), self.device.new_work()

    def _end_batch(self) -> Work:
        """End a batch and return its handle."""
        work, self.thread.batch, self.thread.work = self.thread.work, -1, -1
        return self._device_work(work)

    def _on_collective(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Carry out an operator between ranks on tensors of the device."""
        if func.namespace == "_c10d_functional" and func.name().endswith("::wait_tensor"):
            if (wait := self._unwaited.pop(self.device.block_of(args[0]), None)) is not None:
                wait.wait()
            return args[0]
        if func.name().endswith("::_wrap_tensor_autograd"):
            return AsyncCollectiveTensor(args[0])
        found = functional_operation(func, args, kwargs)
        if found is None:  # an operator of c10d, which calls a kernel of `_kernel`
            return self.device.run_kernel(func, args, kwargs)
        operations, out = found
        group = group_of(arguments_by_name(func, args, kwargs)["group_name"])
        work = self._on_device(self.groups.communicator(group), operations, group, is_async=True)
        for operation in operations:
            self._unwaited[self.device.block_of(operation.outputs[0])] = work
        return out

    def _host_for_values(self, group: ProcessGroup) -> torch.device:
        """Let `all_gather_json` use the host instead of NCCL, so that its values can be read."""
        self.thread.carried = group
        return torch.device("cpu")

    def _kernel(self, name: str) -> Callable[..., object]:
        names, num_returned = arguments_of(name)

        def kernel(*args: object, **kwargs: object) -> object:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            work = self._run(name, given)
            if num_returned == 0:
                work.wait()
                return None
            boxed = work.boxed()
            return boxed if num_returned == 1 else (given[names[0]], boxed)

        return kernel

    def _run(self, name: str, given: Keywords) -> Work:
        group = group_of(given["process_group"])
        communicator = self.groups.communicator(group)
        operations = operations_of(name, given)
        on_device = any(is_meta(x) for each in operations for x in (*each.inputs, *each.outputs))
        if not on_device and operations[0].op == "barrier":
            on_device = self.groups.serves(group, "cuda") and not self.groups.serves(group, "cpu")
        if on_device:
            is_async = bool(given.get("async_op", True))
            return self._on_device(communicator, operations, group, is_async=is_async)
        if not self.groups.serves(group, "cpu") and self.thread.carried is not group:
            raise RuntimeError("No backend type associated with device type cpu")
        return self._on_host(communicator, operations, group)

    def _on_device(
        self,
        communicator: Communicator,
        operations: Sequence[Operation],
        group: ProcessGroup,
        *,
        is_async: bool,
    ) -> Work:
        device, thread = self.device, self.thread
        if not self.groups.serves(group, "cuda"):
            raise RuntimeError("No backend type associated with device type cuda")
        if not self.groups.has_nccl(group):
            return self._staged(communicator, operations)
        is_batched, batch = thread.batch >= 0, thread.batch
        work = thread.work if is_batched else device.new_work()
        if not is_batched and len(operations) > 1:
            batch = next(self._batches)
        issuer = device.current_stream()
        self._connect(communicator, is_batched=batch >= 0, asked=operations[0])
        for asked in operations:
            name = self._queue_of(communicator, asked, is_batched=batch >= 0)
            self.groups.note_connected(name)
            # torch runs synchronous operations on the current stream.
            is_own = is_async or is_batched or asked.peer >= 0
            stream = device.stream_of_group(name) if is_own else issuer
            outputs = tuple(device.see(x, asked.op) for x in asked.outputs)
            device.emit(
                Collective(
                    op=asked.op,
                    group=name,
                    issuer=issuer,
                    stream=stream,
                    inputs=shapes_of(asked.inputs),
                    outputs=shapes_of(asked.outputs),
                    reads=tuple(device.see(x, asked.op) for x in asked.inputs),
                    writes=outputs,
                    work=work,
                    detail=asked.detail,
                    input_splits=tuple(asked.input_splits),
                    output_splits=tuple(asked.output_splits),
                    peer=communicator.ranks[asked.peer] if asked.peer >= 0 else -1,
                    batch=batch,
                )
            )
        held = [x for each in operations for x in (*each.inputs, *each.outputs)]
        awaited = stream if operations[0].op == "barrier" else None
        return self._device_work(work, held if is_own else [], awaited=awaited)

    def _connect(self, communicator: Communicator, asked: Operation, *, is_batched: bool) -> None:
        """Record that NCCL connects a group at its first use, unless it is bound to a device."""
        if communicator.is_connected or (asked.peer >= 0 and not is_batched):
            return  # a single message connects its pair, which is not recorded
        communicator.is_connected = True
        self.device.emit(HostMessage(op="connect", group=communicator.name, shapes=()))

    def _queue_of(self, communicator: Communicator, asked: Operation, *, is_batched: bool) -> str:
        """Return the name of NCCL's communicator; a single message uses one of its two ranks."""
        if asked.peer < 0 or is_batched or communicator.is_eager or len(communicator.ranks) == 2:
            return communicator.name
        pair = sorted((communicator.ranks[asked.peer], self.rank))
        name = f"{communicator.name} pair[{pair[0]},{pair[1]}]"
        self.device.trace.groups[name] = tuple(pair)
        return name

    def _device_work(
        self, work: int, held: Sequence[Tensor] = (), *, awaited: int | None = None
    ) -> Work:
        """Return the handle of an operation; `awaited` is the stream that the host waits for."""
        kept = [*held]  # torch refers to them until a wait for the operation

        def wait(_: object) -> bool:
            kept.clear()
            self.device.emit(WaitWork(work=work, stream=self.device.current_stream()))
            if awaited is not None:
                self.device.emit(HostWait(what="barrier", stream=awaited))
            return True

        return work_of(wait)

    def _staged(self, communicator: Communicator, operations: Sequence[Operation]) -> Work:
        """Record operations of Gloo on tensors of the device, which go through the host."""
        for asked in operations:
            num_bytes = sum(x.numel() * x.element_size() for x in asked.inputs)
            stream = self.device.current_stream()
            self.device.emit(
                HostWait(what="gloo: copy to host", stream=stream, num_bytes=num_bytes)
            )
            self._record_message(communicator, asked, waits=True, work=-1)
        return work_of(lambda _: True)

    def _on_host(
        self, communicator: Communicator, operations: Sequence[Operation], group: ProcessGroup
    ) -> Work:
        at, work = sites.here()[0], self.device.new_work()
        finishes = []
        for asked in operations:
            self._record_message(communicator, asked, waits=False, work=work)
            finishes.append(self.groups.exchange.start(communicator, asked, at))
        usual = seconds_of(group)

        def wait(timeout: timedelta | None) -> bool:
            asked_for = timeout.total_seconds() if timeout else 0.0
            for finish in finishes:
                try:
                    finish(asked_for if asked_for > 0 else usual)
                except RuntimeError:
                    self.groups.exchange.give_up(communicator)  # as Gloo breaks all of a group
                    raise
            finishes.clear()
            self.device.emit(WaitWork(work=work, stream=-1))
            return True

        return work_of(wait)

    def _record_message(
        self, communicator: Communicator, asked: Operation, *, waits: bool, work: int
    ) -> None:
        self.device.emit(
            HostMessage(
                op=asked.op,
                group=communicator.name,
                shapes=shapes_of(asked.inputs or asked.outputs),
                detail=asked.detail,
                peer=communicator.ranks[asked.peer] if asked.peer >= 0 else -1,
                waits=waits,
                work=work,
            )
        )
