"""A trace comes back as it was written; what a host reads can be answered for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hp_dry.trace import Allocate, Collective, HostMessage, Label, Launch, Trace
from hp_platform.dry_device import answering, arrived


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    send = Collective(
        op="send",
        group="edge 0-1",
        issuer=0,
        stream=3,
        inputs=(((2, 3), "float32"),),
        outputs=(),
        reads=(1,),
        writes=(),
        work=0,
        peer=1,
        at="a.py:3 < b.py:9",
        place="step 1",
    )
    events = [
        Allocate(1, 24, 0, "aten.empty", (2, 3), "float32", thread=1),
        Label(1, "activations"),
        Launch("aten.mm.default", 0, 1, 96, 24, (1,), (2,)),
        send,
        HostMessage("broadcast", "control", (((8,), "uint8"),), "root 0"),
    ]
    trace = Trace(1, 4, {"edge 0-1": (0, 1), "control": (0, 1, 2, 3)}, events)
    trace.write(tmp_path / "trace.jsonl")
    assert Trace.read(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize("text", ["{}", '{"rank": 0, "world_size": 1, "groups": {}}\n["No"]', "["])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"must be a trace|Expecting"):
        Trace.read(tmp_path / "trace.jsonl")


def test_what_arrives_is_answered_for_inside_the_context_alone() -> None:
    counts = torch.zeros(2, dtype=torch.int64)
    with answering(lambda copy, purpose: copy + len(str(purpose))):
        assert arrived(counts, purpose="four").tolist() == [4, 4]
    assert arrived(counts, purpose="four") is counts
