"""Public names load their modules when somebody asks for them."""

import subprocess
import sys

import pytest

import hp_platform
from hp_platform.failures import failures, liveness

PROGRAM = """
import sys
from hp_platform import isend, failing_together
loaded = set(sys.modules)
assert "hp_platform.collectives.p2p" in loaded
unwanted = {
    "hp_platform.collectives.fsdp",
    "hp_platform.launch",
    "hp_platform.testing",
    "torch.distributed.tensor",
}
assert not loaded & unwanted, loaded & unwanted
"""


def test_every_public_name_is_there() -> None:
    for name in hp_platform.__all__:
        assert getattr(hp_platform, name) is not None
    other = "nothing"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(hp_platform, other)


def test_a_send_loads_neither_fsdp_nor_tests() -> None:
    subprocess.run([sys.executable, "-s", "-c", PROGRAM], check=True, timeout=120)


def test_a_failure_asks_whom_to_blame_whatever_was_imported() -> None:
    assert failures._asker is liveness.whom_to_blame
