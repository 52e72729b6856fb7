"""Process groups of a program with their communicators: `Groups`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed import ProcessGroup

from hp_dry.cluster import Classes
from hp_dry.recording.recorder import DeviceRecorder
from hp_dry.trace import HostMessage
from hp_dry.world.communicators import Communicator, Families
from hp_dry.world.exchange import Exchange
from hp_dry.world.hub import HubClient
from hp_platform._internals import backend_name, backend_of

NamedLists: TypeAlias = "list[tuple[str, str, tuple[int, ...]]]"
"""Name, family and global ranks of each group that a split makes."""


class Groups:
    """Process groups of a dry world, which torch makes and this class records.

    Attributes:
        recorder: Recorder of this rank's device.
        rank: Global rank of this process.
        makes_alone: Whether only members take part in the creation of groups now.
        exchange: Operations between hosts.
    """

    def __init__(self, recorder: DeviceRecorder, classes: Classes, client: HubClient) -> None:
        self.recorder, self.rank = recorder, recorder.trace.rank
        self.makes_alone = False
        self._families = Families(classes)
        self.exchange = Exchange(client, self._families, self.rank)
        self._communicators: dict[ProcessGroup, Communicator] = {}

    def note_group(
        self, purpose: str, ranks: Sequence[int], *, is_first: bool = False
    ) -> tuple[str, str]:
        """Record the creation of a group by all ranks of the world; return its name and family."""
        name, family = self._add("world" if is_first else purpose, ranks)
        if not is_first and not self.makes_alone:
            world = next(iter(self.recorder.trace.groups))
            self.recorder.emit(HostMessage("new_group", world, (), name, waits=False))
        return name, family

    def note_member(
        self, group: ProcessGroup, name: str, family: str, ranks: Sequence[int]
    ) -> None:
        """Record that this rank is a member of a new group."""
        is_eager = group.bound_device_id is not None
        self._join(group, name, family, tuple(ranks), is_eager=is_eager)
        if is_eager and self.has_nccl(group):  # torch binds groups of Gloo as well
            self.note_connected(name)
        if is_eager or self.serves(group, "cpu"):
            self.recorder.emit(HostMessage(op="connect", group=name, shapes=()))

    def split_lists(
        self, parent: ProcessGroup, lists: Sequence[Sequence[int]], purpose: str
    ) -> NamedLists:
        """Record the split of a group by all its ranks; return names, families and ranks."""
        known = self.communicator(parent)
        purpose = purpose or f"{known.family} split"
        found: NamedLists = []
        for positions in lists:
            ranks = tuple(known.ranks[position] for position in sorted(positions))
            found.append((*self._add(purpose, ranks), ranks))
        # Each rank may give the call the name of its own group: torch does not compare them.
        detail = ", ".join(name[name.rindex("[") :] for name, _, _ in found)
        self.recorder.emit(HostMessage("split_group", known.name, (), detail))
        return found

    def note_split(self, group: ProcessGroup, lists: NamedLists) -> None:
        """Record that this rank is a member of a group from a split."""
        for name, family, ranks in lists:
            if self.rank in ranks:
                self._join(group, name, family, ranks, is_eager=True)
                self.note_connected(name)

    def _add(self, purpose: str, ranks: Sequence[int]) -> tuple[str, str]:
        name, family = self._families.add(purpose, ranks)
        self.recorder.trace.families[family] = tuple(self._families.lists[family])
        return name, family

    def _join(
        self, group: ProcessGroup, name: str, family: str, ranks: tuple[int, ...], *, is_eager: bool
    ) -> None:
        mine = ranks.index(self.rank)
        made = Communicator(name, family, ranks, mine, is_eager, is_connected=is_eager)
        self._communicators[group], self.recorder.trace.groups[name] = made, ranks

    def communicator(self, group: ProcessGroup) -> Communicator:
        """Return the communicator of a group.

        Raises:
            RuntimeError: If the group was made outside the dry run.
        """
        if (found := self._communicators.get(group)) is None:
            raise RuntimeError(f"group {group.group_name} was not made inside the dry run")
        return found

    def forget_groups(self) -> None:
        """Drop all groups, after the default group was destroyed."""
        self._communicators.clear()

    def give_up(self, group: ProcessGroup) -> None:
        """Let ranks fail that wait for this rank in a group."""
        if group in self._communicators:
            self.exchange.give_up(self._communicators[group])

    def note_connected(self, name: str) -> None:
        """Record that NCCL has connected the ranks of a communicator, unless it is recorded."""
        if name not in self.recorder.trace.connected:
            self.recorder.trace.connected.append(name)

    def serves(self, group: ProcessGroup, kind: str) -> bool:
        """Tell whether a group has a back end for `"cpu"` or `"cuda"`."""
        return backend_of(group, torch.device(kind)) is not None

    def has_nccl(self, group: ProcessGroup) -> bool:
        """Tell whether NCCL serves a group on CUDA."""
        return "nccl" in (backend_name(group, torch.device("cuda")) or "")
