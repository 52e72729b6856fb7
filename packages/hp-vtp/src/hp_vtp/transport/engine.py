"""One rank's end of an edge: issues its transfers in the order of the calls, and owns them."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform import Event, use_stream
from hp_vtp.messages import MessageStep, Workspace
from hp_vtp.topology.stages import Edge
from hp_vtp.transport.channel import Channel, EdgeGroups
from hp_vtp.transport.handles import Failure, Handle, T, TransferError, parse_reason


class Worker:
    """Runs jobs in the order they come in. Jobs must not raise."""

    def __init__(self, name: str) -> None:
        """Name the thread, which does not run before there is something to do."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # nothing comes behind the None that ends the thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Add a job.

        Raises:
            RuntimeError: After `close`.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._thread.name}: must be open to take a job")
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.put(job)

    def close(self) -> None:
        """Run the jobs that are left and end the thread; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            job()
            del job  # not to be kept alive until the next one


class EdgeEnd:
    """Queues the transfers of one edge for a thread of its own.

    The thread issues all of a transfer, the hop over the cut and the exchange within the
    destination stage, in the order of the calls. Nothing of it happens in `wait`, so ranks may wait
    in any order and from several threads, and nothing of it runs on a group that anybody else uses.
    """

    def __init__(
        self,
        edge: Edge,
        groups: EdgeGroups,
        *,
        rank: int,
        device: torch.device,
        failure: Failure,
        check_each: bool,
    ) -> None:
        """Take the groups of an edge.

        Args:
            edge: Edge of which this is one end.
            groups: Used by this object alone.
            rank: Global rank of this process.
            device: Device of the tensors.
            failure: Failure state of the transport.
            check_each: Whether both ends agree before each transfer, or before the first alone.
        """
        self.edge = edge
        self._rank = rank
        self._device = device
        self._failure = failure
        self._check_each = check_each
        self._channel = Channel(edge, groups, rank=rank)
        self._worker = Worker(f"vtp {edge.source}->{edge.destination}/{edge.domain}")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._count = 0  # transfers so far: both ends count alike, or the headers differ
        self._agreed: str | None = None  # what the first transfer carried
        self._sends: deque[Handle[None]] = deque()

    def where(self, microbatch: int | None) -> str:
        """Begin the message of an error."""
        of = "" if microbatch is None else f", microbatch {microbatch}"
        return f"rank {self._rank}, {self.edge}{of}"

    def send(
        self,
        steps: Sequence[MessageStep],
        tensors: Sequence[Tensor],
        workspaces: Sequence[Workspace],
        *,
        description: str,
        microbatch: int | None,
        by_host: bool = False,
    ) -> Handle[None]:
        """Queue a transfer whose sender this rank is."""
        # Of those that are read in place; of others the engine has a copy.
        tensors = [x.detach() for x in tensors]  # their graphs are not ours to keep
        versions = [_version(x) for x in tensors]
        where = self.where(microbatch)

        def run(header: str | None) -> None:
            self._channel.run(steps, workspaces, header=header, where=where, by_host=by_host)
            for i, (x, version) in enumerate(zip(tensors, versions, strict=True)):
                if version != _version(x):
                    raise TransferError(
                        f"{where}: tensors[{i}] must stay as it is until it has been sent, but was "
                        "changed in place",
                        edge=self.edge,
                    )
            if self._stream is not None:
                for workspace in workspaces:
                    workspace.record_stream(self._stream)

        handle = self._submit(run, lambda: None, description, microbatch)
        with self._lock:
            self._sends.append(handle)
            while self._sends and self._sends[0].done() and not self._sends[0].failed:
                self._sends.popleft()
        return handle

    def receive(
        self,
        steps: Sequence[MessageStep],
        make_room: Callable[[], list[Workspace]],
        *,
        index: int,
        leaves: Sequence[bool],
        description: str,
        microbatch: int | None,
        by_host: bool = False,
    ) -> Handle[tuple[Tensor, ...]]:
        """Queue a transfer whose receiver this rank is; `index` is its place in its stage."""
        where = self.where(microbatch)
        received: list[Tensor] = []

        def run(header: str | None) -> None:
            workspaces = make_room()
            self._channel.run(steps, workspaces, header=header, where=where, by_host=by_host)
            received.extend(workspace.result(index) for workspace in workspaces)

        def deliver() -> tuple[Tensor, ...]:
            wanted = torch.is_grad_enabled()
            return tuple(
                x.requires_grad_() if leaf and wanted else x
                for x, leaf in zip(received, leaves, strict=True)
            )

        return self._submit(run, deliver, description, microbatch)

    def say_goodbye(self) -> None:
        """Queue a last agreement: the other end has had all of it, and expects no more."""
        if self._count and self._failure.reason is None:
            last = f"transfer {self._count}: close"
            where = self.where(None)
            self._sends.append(
                self._queue(lambda: self._channel.agree(last, where), lambda: None, microbatch=None)
            )

    def finish(self) -> None:
        """Wait for all sends.

        Raises:
            TransferError: If one failed.
        """
        with self._lock:
            sends = list(self._sends)
            self._sends.clear()
        for handle in sends:
            handle.wait()

    def end_thread(self) -> None:
        """End the thread after the queued jobs."""
        self._worker.close()

    def destroy_groups(self) -> None:
        """Destroy the groups, which nobody uses any more."""
        for group in self._channel.groups.distinct:
            dist.destroy_process_group(group)

    def _submit(
        self,
        run: Callable[[str | None], None],
        deliver: Callable[[], T],
        description: str,
        microbatch: int | None,
    ) -> Handle[T]:
        with self._lock:  # the number of a transfer and its place in the queue go together
            if not self._check_each and self._agreed not in (None, description):
                raise ValueError(
                    f"{self.where(microbatch)}: tensors ({description}) must be those of the first "
                    f'transfer ({self._agreed}) with check ("once")'
                )
            header = None
            if self._check_each:
                of = "" if microbatch is None else f", microbatch {microbatch}"
                header = f"transfer {self._count}{of}: {description}"
            elif self._agreed is None:
                header = f"all transfers: {description}"
            handle = self._queue(lambda: run(header), deliver, microbatch=microbatch)
            self._agreed = description
            self._count += 1
        return handle

    def _queue(
        self, run: Callable[[], None], deliver: Callable[[], T], *, microbatch: int | None
    ) -> Handle[T]:
        where = self.where(microbatch)
        if (reason := self._failure.reason) is not None:
            self._failure.is_known = True
            raise self._failed_before(reason, where)
        handle: Handle[T] = Handle(
            edge=self.edge,
            where=where,
            microbatch=microbatch,
            failure=self._failure,
            deliver=deliver,
            waits_for=lambda: self._channel.waiting_for,
        )
        ready = Event(self._device)
        ready.record()
        self._worker.submit(lambda: self._run(run, handle, ready, where))
        return handle

    def _run(self, run: Callable[[], None], handle: Handle[T], ready: Event, where: str) -> None:
        """Run a transfer in the thread of the edge."""
        if (reason := self._failure.reason) is not None:
            handle.fail(self._failed_before(reason, where))
            return
        try:
            with torch.no_grad(), use_stream(self._stream):
                ready.wait()
                run()
                event = Event(self._device)
                event.record()
        except Exception as error:  # noqa: BLE001 - told to whoever waits, and to the other ranks
            handle.fail(self._failed(error, where))
        else:
            handle.end(event)

    def _failed_before(self, reason: str, where: str) -> TransferError:
        return TransferError(
            f"{where}: failed before: {reason}", edge=self.edge, report=self._failure.of_another
        )

    def _failed(self, error: Exception, where: str) -> TransferError:
        reason = str(error)
        if not isinstance(error, TransferError):
            reason = f"{where}: {type(error).__name__}: {error}"
        first = self._failure.report(error, parse_reason(reason))
        another = self._failure.of_another
        if another is not None:
            reason = f"{reason}; began on {first}"
        peers = getattr(error, "peers", ())
        result = TransferError(reason, edge=self.edge, peers=peers, report=another)
        result.__cause__ = error
        return result


def _version(x: Tensor) -> int | None:
    """Return how often a tensor that is sent from where it lies has been changed in place."""
    return x._version if x.is_contiguous() and not x.is_inference() else None  # noqa: SLF001
