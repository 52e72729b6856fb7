"""The agent of torchrun as a rank needs it: alive, with a store without the past."""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # exported, but untyped

from hp_base.errors import HangError
from hp_platform import RankInfo
from hp_trainer.launch.ranks import LOOPBACK

_LOOPBACK = "127.0.0.1"
_KEY = "hp_train/meeting"
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def has_agents_store(env: Mapping[str, str]) -> bool:
    """Tell whether the store at MASTER_ADDR is the agent's and outlives the ranks."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(
    agents: Store, info: RankInfo, env: MutableMapping[str, str], *, timeout: timedelta
) -> Store | None:
    """Lead the ranks of one start to a store of their own.

    The agent keeps one store for all starts of its ranks, and no key in it says of which start it
    is. A rank that is started again may find there the Gloo address or the NCCL id of one that is
    dead, and ends or waits in vain. So the ranks of a start use this store only to tell each other
    the port of another one that rank 0 makes for them. Nothing from an earlier start can pass for
    its answer, since it answers to a word that each rank has just made up. Where all ranks are on
    one machine that store, Gloo and NCCL listen on loopback alone; torchrun's own store does not.

    Args:
        agents: The agent's store.
        info: Place of this process.
        env: `env://` will mean the new store, which rank 0 serves on the host of the old one, or on
            loopback if all ranks are on one machine; what it says of interfaces stays.
        timeout: Time limit for all ranks to come.

    Returns:
        What rank 0 must keep until the default process group is made.

    Raises:
        HangError: When a rank does not come in time.
    """
    served: Store | None = None
    if info.local_world_size == info.world_size:
        env["MASTER_ADDR"] = _LOOPBACK
        for library in ("GLOO", "NCCL"):
            env.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
    try:
        if info.rank == 0:
            served = _serve(env["MASTER_ADDR"])
            port = str(served.port)
            _answer(agents, info.world_size, port, time.monotonic() + timeout.total_seconds())
        else:
            port = _ask(agents, info.rank, timeout)
    except TimeoutError as error:
        raise HangError(f"{error} within {timeout.total_seconds():g} s") from None
    env["MASTER_PORT"] = port
    env["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return served


def _serve(host: str) -> TCPStore:
    """Serve a store at a free port of one address; TCPStore itself would listen on all."""
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    if host != _LOOPBACK:
        return TCPStore(host, 0, **options)
    with socket.create_server((host, 0)) as listening:
        port = listening.getsockname()[1]
        # The store closes what it is given.
        return TCPStore(host, port, master_listen_fd=listening.detach(), **options)


def _ask(agents: Store, rank: int, timeout: timedelta) -> str:
    key, word = f"{_KEY}/{rank}", uuid4().hex
    agents.set(key, word)
    try:
        agents.wait([f"{key}/{word}"], timeout)
    except RuntimeError:
        raise TimeoutError("rank 0 did not start") from None
    meeting, port = agents.get(f"{key}/{word}").decode().split()
    agents.set(f"{_KEY}/{meeting}/{rank}", "")
    return port


def _answer(agents: Store, world_size: int, port: str, deadline: float) -> None:
    """Tell every rank, whatever words those before it have left, until all have understood."""
    meeting, missing = uuid4().hex, list(range(1, world_size))
    while missing:
        for rank in missing:
            if agents.check([f"{_KEY}/{rank}"]):
                word = agents.get(f"{_KEY}/{rank}").decode()
                agents.set(f"{_KEY}/{rank}/{word}", f"{meeting} {port}")
        time.sleep(_POLL_SECONDS)
        missing = [rank for rank in missing if not agents.check([f"{_KEY}/{meeting}/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {missing[0]} did not start")


def when_agent_ends(grace_seconds: float) -> Callable[[], bool]:
    """Watch the parent: without it nobody starts this rank again, and another may take its place.

    Args:
        grace_seconds: Seconds for saving with the others, if they are there; then this process is
            ended.

    Returns:
        Tells whether the parent is gone.
    """
    parent, gone = os.getppid(), threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        gone.set()
        time.sleep(grace_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="watch of the agent", daemon=True).start()
    return gone.is_set


def why_no_node_is_replaced(env: Mapping[str, str]) -> str:
    """Return a line where agents of several nodes are to restart ranks, but cannot without a node.

    When ranks share the agents' store, an agent that stays gives its ranks the address of the
    first start, and one that is new waits a minute for an address that nobody writes.

    Returns:
        A warning; empty: none.
    """
    is_alone = env.get("GROUP_WORLD_SIZE", "1") == "1"
    is_final = env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"
    if is_alone or is_final or env.get(_NOT_SHARED) == "1":
        return ""
    return f"a node that is lost cannot be replaced: start torchrun with {_NOT_SHARED}=1"
