"""`ThreadContext`: thread-local state, captured in one thread and applied in a helper thread."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from hp_platform import _internals
from hp_platform.threads.places import doing, words_of_thread
from hp_platform.threads.use import Belonging, belonging, belonging_to

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadContext:
    """Thread-local state of torch; without it a new thread starts with torch's defaults.

    Attributes:
        stream: Current CUDA stream, which implies the device; None without CUDA.
        grad_enabled: Whether gradients are enabled.
        inference: Whether inference mode is on.
        autocast: Device type, whether autocast is enabled for it, and its dtype.
        autocast_cache: Whether autocast caches cast weights.
        multithreading: Whether backward may use the device threads of the autograd engine.
        words: Words for the work of the thread, for messages about failures.
        belonging: Owner of the groups that the thread may use, and scope in which uses of groups
            are recorded, so that a failure breaks them.
    """

    stream: torch.cuda.Stream | None
    grad_enabled: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    multithreading: bool
    words: tuple[str, ...]
    belonging: Belonging

    @classmethod
    def capture(cls) -> "ThreadContext":
        """Read the state of this thread."""
        # A request for the current stream would create a CUDA context in a process without one.
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            stream=torch.cuda.current_stream() if on_cuda else None,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _AUTOCAST_DEVICES
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            multithreading=_internals.is_multithreading_enabled(),
            words=words_of_thread(),
            belonging=belonging(),
        )

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Set the captured state in this thread inside the context."""
        # OpenMP gives a new thread all cores; this call makes torch set its own number of threads.
        torch.get_num_threads()
        with ExitStack() as stack:
            stack.enter_context(doing(*self.words))
            stack.enter_context(belonging_to(self.belonging))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            stack.enter_context(torch.autograd.set_multithreading_enabled(self.multithreading))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache
                    )
                )
            yield
