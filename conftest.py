"""What the tests of all packages rely on."""

import signal
from collections.abc import Iterator

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background so; tests that interrupt would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # As under nohup, where a run is not to be stopped by it, and tests of that find nothing.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks do: with more, sums have another order."""
    import torch  # noqa: PLC0415 - not every package has it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
