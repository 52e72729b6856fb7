"""What the tests of all packages rely on."""

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

try:
    from hypothesis import settings
except ImportError:  # on a machine with little more than torch and pytest
    pass
else:
    # Other sessions run beside: how long an example takes says nothing.
    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")

# Before anything imports torch: threads that wait for each other on busy cores take ten times as
# long as one, and every rank has one anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")

WHOLE = os.environ.get("HP_WHOLE") == "1"
"""Whether to run all cases of tests that are marked with a sample of them."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background so; tests that interrupt would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # As under nohup, where a run is not to be stopped by it, and tests of that find nothing.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not of the sample of their test, unless they were named."""
    if WHOLE:
        return
    arguments = [argument.partition("::") for argument in config.args if "::" in argument]
    named = [((config.invocation_params.dir / a).resolve(), name) for a, _, name in arguments]
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    wanted: set[str] = set()
    for item in items:
        own = item.nodeid.partition("::")[2]
        if any(item.path == file and own.startswith(name) for file, name in named):
            kept.append(item)
            continue
        marker = item.get_closest_marker("sample")
        case = getattr(item, "callspec", None)
        if marker is not None:
            wanted |= {f"{item.nodeid.partition('[')[0]}[{name}]" for name in marker.args}
        is_left_out = marker is not None and (case is None or case.id not in marker.args)
        (left_out if is_left_out else kept).append(item)
    unknown = wanted - {item.nodeid for item in kept}
    if unknown and not config.getoption("lf", default=False):
        raise pytest.UsageError(f"no such cases, of which a sample is to be: {sorted(unknown)}")
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks do: with more, sums have another order."""
    import torch  # noqa: PLC0415 - not every package has it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def program_server() -> Iterator[None]:
    """A process that has imported torch and hp_train, from which programs can be forked."""
    import forked  # noqa: PLC0415 - is found once pytest has read its settings

    with forked.server():
        yield


@pytest.fixture(scope="module")
def forked_programs(program_server: None) -> Iterator[None]:  # noqa: ARG001 - is there
    """Fork what tests start of Python, instead of importing torch in each program.

    A module asks for it by `pytestmark = pytest.mark.usefixtures("forked_programs")`. What is to be
    started as a user does, interpreter and imports included, is in modules that do not.
    """
    import forked  # noqa: PLC0415

    with forked.commands():
        yield


@pytest.fixture
def group(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ProcessGroup]":
    """A world of one rank: this process."""
    import torch.distributed as dist  # noqa: PLC0415 - some packages have no torch

    store = f"file://{tmp_path_factory.mktemp('store')}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()
