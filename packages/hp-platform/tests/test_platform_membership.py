"""Whoever connects in the place of a rank is found out."""

from __future__ import annotations

import torch.distributed as dist

from hp_platform.groups import new_secret, require_members
from hp_platform.testing import run_distributed


def _shows(secrets: list[str]) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        require_members(group, secret=secrets[group.rank()], name="data")
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_of_one_run_are_members() -> None:
    assert run_distributed(_shows, [new_secret()] * 3, world_size=3) == ["", "", ""]


def test_one_that_has_not_read_the_secret_is_named_by_all_others() -> None:
    secret = new_secret()
    errors = run_distributed(_shows, [secret, secret, new_secret()], world_size=3)
    for rank, stranger in ((0, 2), (1, 2), (2, 0)):
        start = f"rank {rank}: a stranger has connected as rank {stranger} of the group data: "
        assert errors[rank].startswith(start)
