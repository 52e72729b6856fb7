"""What a dry run prints and draws is what its traces say, by hand and of a real model."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
import torch

from hp_base.messages import size
from hp_dry import DryDevice, replay
from hp_dry.report.curve import curve_svg
from hp_dry.report.page import page
from hp_dry.report.report import report
from hp_dry.report.sites import Site, site
from hp_dry.report.summary import RankSummary, Saved, Summary, from_json, summarize, to_json
from hp_dry.report.tables import several_ranks, tables
from hp_dry.report.traffic import traffic_of
from hp_dry.report.usage import memory_of
from hp_dry.report.work import Cost, work_of
from hp_dry.trace import (
    KINDS,
    Allocate,
    Collective,
    HostMessage,
    HostWait,
    Label,
    Launch,
    Release,
    Trace,
)
from hp_platform import doing

GIB = 2**30


def allocate(block: int, num_bytes: int, place: str = "", at: str = "a.py:1") -> Allocate:
    return Allocate(
        block, num_bytes, 0, "aten.empty", (num_bytes // 4,), "float32", at=at, place=place
    )


def launch(
    place: str = "", *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), kernels: int = 1
) -> Launch:
    return Launch("aten.mm.default", 0, kernels, 100, 1000, reads, writes, place=place)


def live_bytes(trace: Trace) -> Iterator[tuple[int, int]]:
    sizes: dict[int, int] = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Allocate):
            sizes[event.block] = event.num_bytes
            yield index, sum(sizes.values())
        elif isinstance(event, Release):
            del sizes[event.block]
            yield index, sum(sizes.values())


def random_trace(num_events: int, seed: int = 0) -> Trace:
    rng = random.Random(seed)
    trace, alive = Trace(0, 1), list[int]()
    for block in range(num_events):
        where = f"step 1, stage 0, microbatch {block * 4 // num_events}: in step 0F0"
        if alive and rng.random() < 0.49:
            trace.events.append(Release(alive.pop(rng.randrange(len(alive))), place=where))
        else:
            trace.events.append(allocate(block, rng.randrange(1, 1000), where))
            trace.events.append(Label(block, rng.choice(KINDS)))
            alive.append(block)
        trace.events.append(launch(where))
    return trace


def test_places_are_taken_apart() -> None:
    whole = site("step 2, stage 1, microbatch 3: in step 1B3, layers.7, experts")
    assert whole == Site(2, "backward", 1, 3, "1B3", "layers.7", "layers.7, experts")
    assert site("step 2, optimizer") == Site(2, "optimizer", module="optimizer")
    assert site("step 2").phase == "between"
    assert site("build").phase == "build"
    assert site("") == Site(phase="outside")
    fused = site("step 1, stage 0, microbatch 1: in step (0F1;1B0)OVERLAP_F_B, mtp.1")
    assert (fused.phase, fused.layer) == ("overlapped", "mtp.1")
    assert fused.schedule_step == "(0F1;1B0)OVERLAP_F_B"
    assert site("step 1, stage 0, microbatch 1: in step 3UNSHARD").phase == "unshard"


def test_memory_is_counted_by_the_last_label_at_the_first_highest_point() -> None:
    where = "step 1, stage 0, microbatch 2: in step 0F2, layers.4, attention"
    trace = Trace(0, 1)
    trace.events = [
        allocate(1, 400, "build", at="model.py:7 < train.py:3"),
        Label(1, "other"),
        Label(1, "parameters"),
        allocate(2, 40, "build"),
        launch("build", kernels=3),
        allocate(3, 1000, where, at="attention.py:9 < block.py:1"),
        launch(where),
        allocate(4, 8, where),
        Release(3, place=where),
        allocate(5, 1000, where),
        Release(2),
    ]
    memory = memory_of(trace)
    assert memory.peak_live == 1448
    assert memory.at_peak == {"parameters": 400, "activations": 1008, "other": 40}
    assert memory.peak_by_kind == memory.at_peak
    assert memory.at_end == 1408
    assert memory.peak_reserved is None
    assert memory.needed == 1448
    assert memory.peak is not None
    assert memory.peak.launches == 4
    assert memory.peak.step == 1
    assert memory.peak.schedule_step == "0F2"
    assert memory.peak.microbatch == 2
    assert memory.peak.module == "layers.4, attention"
    assert [block.bytes for block in memory.largest] == [1000, 400, 40, 8]
    assert memory.largest[0].shape == (250,)
    assert memory.largest[0].at == "attention.py:9 < block.py:1"
    assert [span.name for span in memory.spans] == ["build", "step 1"]


def test_a_trace_without_memory_has_no_peak() -> None:
    memory = memory_of(Trace(0, 1))
    assert memory.peak is None
    assert memory.peak_live == 0
    summary = summary_of(summarize(Trace(0, 1)))
    assert "nothing was allocated" in "\n".join(report(summary))
    assert "<svg" in page(summary)


@pytest.mark.parametrize("num_events", [1, 10, 1000, 20_000])
def test_the_curve_is_short_and_exact_at_its_extremes(num_events: int) -> None:
    trace = random_trace(num_events)
    usage = replay(trace)
    memory = memory_of(trace, usage)
    totals = [sum(point.live) for point in memory.curve]
    live = [number for _, number in live_bytes(trace)]
    assert max(totals) == max(live) == memory.peak_live
    assert min(totals) == min(live)
    assert totals[-1] == live[-1] == memory.at_end
    assert len(memory.curve) <= 3 * 360 + 2
    assert memory.curve[-1].reserved == memory.peak_reserved == max(usage.reserved)
    assert sum(memory.at_peak.values()) == memory.peak_live
    launches = [point.launches for point in memory.curve]
    assert launches == sorted(launches)
    assert len(curve_svg(memory, title="Rank 0", gpu_bytes=80 * GIB)) < 150_000


def step_of_two_layers() -> Trace:
    """A forward of two layers, and a backward that only what it reads tells the layers of."""
    trace = Trace(0, 1)
    first = "step 1, stage 0, microbatch 0: in step 0F0"
    last = "step 1, stage 0, microbatch 0: in step 0B0"
    trace.events = [
        allocate(1, 4, "build"),  # weights
        launch("build", writes=(1,)),
        allocate(2, 4, first),  # embedded tokens
        allocate(3, 4, f"{first}, layers.0"),  # kept by layer 0
        launch(f"{first}, layers.0", reads=(1, 2), writes=(3,)),
        allocate(4, 4, f"{first}, layers.0"),  # out of layer 0
        launch(f"{first}, layers.0", reads=(3,), writes=(4,)),
        allocate(5, 4, f"{first}, layers.1"),  # kept by layer 1
        launch(f"{first}, layers.1", reads=(4,), writes=(5,)),
        HostWait("copy to host", 0, num_bytes=8, at="e.py:4", place=f"{first}, layers.1"),
        allocate(6, 4, first),  # logits
        launch(first, reads=(5, 1), writes=(6,)),
        allocate(7, 4, last),
        launch(last, reads=(6,), writes=(7,)),  # of the loss
        allocate(8, 4, last),
        launch(last, reads=(7, 4, 5), writes=(8,)),  # of layer 1: what it keeps is newest
        allocate(9, 4, last),
        launch(last, reads=(8, 1), writes=(9,)),  # by weights: as what it comes from
        allocate(10, 4, last),
        launch(last, reads=(9, 2, 3), writes=(10,)),  # of layer 0
        launch("step 1, optimizer", reads=(1,), writes=(1,), kernels=7),
    ]
    return trace


def test_a_backward_is_of_the_layer_whose_memory_it_reads() -> None:
    work = work_of(step_of_two_layers())
    found = {(cell.phase, cell.layer): cell.cost.launches for cell in work.cells}
    assert found == {
        ("forward", "layers.0"): 2,
        ("forward", "layers.1"): 1,
        ("forward", ""): 1,
        ("backward", ""): 1,
        ("backward", "layers.1"): 2,
        ("backward", "layers.0"): 1,
        ("optimizer", ""): 7,
    }
    assert work.by_layer()["layers.1"] == Cost(launches=3, bytes=300, flops=3000, host_waits=1)
    assert work.by_phase()["backward"].launches == 4
    assert {key: each.launches for key, each in work.by_microbatch().items()} == {-1: 7, 0: 8}
    assert work.before == Cost(launches=1, bytes=100, flops=1000)
    assert work.total == sum((cell.cost for cell in work.cells), Cost())
    (wait,) = work.waits
    assert (wait.at, wait.count, wait.bytes, wait.layers, wait.microbatches) == (
        "e.py:4",
        1,
        8,
        1,
        1,
    )


def test_the_last_step_is_what_is_counted() -> None:
    trace = step_of_two_layers()
    trace.events += [launch("step 2, optimizer"), launch("step 2, optimizer")]
    work = work_of(trace)
    assert work.step == 2
    assert work.total.launches == 2
    assert work.before.launches == 1


def test_a_trace_without_steps_is_counted_as_a_whole() -> None:
    trace = Trace(0, 1, {}, [launch(), launch("anything"), HostWait("x", 0, at="a.py:1")])
    work = work_of(trace)
    assert work.step == -1
    assert work.total == Cost(launches=2, bytes=200, flops=2000, host_waits=1)


def exchange(op: str, group: str, *, peer: int = -1, numbers: int = 10) -> Collective:
    shapes = (((numbers,), "bfloat16"),)
    return Collective(op, group, 0, 5, shapes, shapes, (), (), 0, peer=peer, at="x.py:1")


def test_exchanges_are_listed_in_order_and_by_communicator() -> None:
    trace = Trace(3, 8, {"fsdp": (0, 1, 2, 3), "edge 3-7": (3, 7)})
    trace.events = [
        *(exchange("all_gather", "fsdp") for _ in range(3)),
        exchange("send", "edge 3-7", peer=7),
        exchange("all_gather", "fsdp", numbers=20),
        exchange("reduce_scatter", "fsdp"),
        HostMessage("barrier", "control", ()),
    ]
    traffic = traffic_of(trace)
    assert [(each.op, each.times) for each in traffic.operations] == [
        ("all_gather", 3),
        ("send", 1),
        ("all_gather", 1),
        ("reduce_scatter", 1),
        ("barrier", 1),
    ]
    fsdp, edge, control = traffic.communicators
    assert fsdp.ranks == (0, 1, 2, 3)
    assert (fsdp.operations["all_gather"].count, fsdp.operations["all_gather"].bytes) == (4, 100)
    assert (fsdp.total.count, fsdp.total.bytes) == (5, 120)
    assert fsdp.first == ("all_gather x4", "reduce_scatter")
    assert edge.first == ("send 7",)
    assert control.on_host
    assert not fsdp.on_host


def summary_of(
    *ranks: RankSummary, name: str = "a config", problems: tuple[str, ...] = ()
) -> Summary:
    return Summary(
        name=name,
        layout="dp_shard 8",
        world_size=8,
        gpu="NVIDIA H100 80GB HBM3",
        gpu_bytes=80 * GIB,
        beside={"context": GIB},
        ranks=ranks,
        problems=problems,
    )


def rank_of(gib: int, *, rank: int = 0, skew: str = "uniform") -> RankSummary:
    trace = step_of_two_layers()
    trace.rank = rank
    trace.groups = {"fsdp": (0, 1)}
    trace.events.append(allocate(99, gib * GIB, "step 1, stage 0, microbatch 0: in step 0B0"))
    trace.events += [exchange("all_gather", "fsdp"), HostMessage("barrier", "<control>", ())]
    trace.events.append(launch("step 1, optimizer"))
    saved = Saved(file=f"rank-{rank}.safetensors", num_tensors=3, num_bytes=100, own_bytes=50)
    return summarize(
        trace,
        stands_for=range(rank, rank + 4),
        skew=skew,
        usage=replay(trace),
        num_parameters=1234,
        saved=saved,
    )


def test_a_summary_knows_the_rank_and_the_routing_that_need_most() -> None:
    small, large = rank_of(10), rank_of(20, rank=4)
    skewed = rank_of(30, rank=4, skew="gini=0.4")
    summary = summary_of(small, large, skewed)
    assert summary.worst == skewed
    assert summary.skews == {"uniform": large, "gini=0.4": skewed}
    assert summary.share(skewed) == pytest.approx((30 + 1) / 80, rel=1e-3)
    text = "\n".join(report(summary))
    assert "fits: rank 4 needs 31.00 GiB" in text
    assert "+10.00 GiB" in text
    assert "8 ranks in 2 classes, dp_shard 8" in text
    assert "does not fit: rank 0 needs 81.00 GiB" in "\n".join(report(summary_of(rank_of(80))))
    full = replay(step_of_two_layers(), total_bytes=1)
    failed = summary_of(summarize(step_of_two_layers(), usage=full))
    assert not failed.fits
    assert "out of memory at a.py:1" in "\n".join(report(failed))
    assert "out of memory at a.py:1" in page(failed)


def test_json_comes_back_and_another_version_is_refused() -> None:
    summary = summary_of(rank_of(10), problems=("ranks 0 and 1 differ",))
    text = to_json(summary)
    assert from_json(text) == summary
    with pytest.raises(ValueError, match=r"version \(7\) must equal 1"):
        from_json(text.replace(b'"version":1', b'"version":7'))
    with pytest.raises(ValueError, match="text must be the JSON of a dry run"):
        from_json(b"[]")


class Checked(HTMLParser):
    """A page whose tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in {"href", "src"}]
        if tag not in {"meta", "rect", "path", "circle"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in {"rect", "path"}:  # with a title in them
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_stands_alone_and_says_what_the_text_says() -> None:
    summary = summary_of(
        rank_of(10), rank_of(20, rank=4, skew="gini=0.4"), name="<b>x</b>", problems=("a < b",)
    )
    text = page(summary)
    found = Checked(text)
    assert found.tags.isdisjoint({"script", "link", "img", "iframe", "b"})
    assert "<b>x</b>" in found.words
    assert "a < b" in found.words
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert len(set(found.ids)) == len(found.ids)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    for table in tables(summary):
        assert table.title in found.words
        for row in table.rows:
            assert len(row) == len(table.columns)
            assert all(word in found.words for word in row)


def test_all_tables_are_there_when_there_is_something_to_say() -> None:
    titles = [table.title for table in tables(summary_of(rank_of(1), rank_of(2, skew="gini=0.2")))]
    assert titles == [
        "Classes of ranks",
        "Host and device in a step",
        "Routing",
        "Memory of rank 0",
        "Largest tensors at the peak",
        "Work in step 1",
        "Work by layer, all microbatches",
        "Work by microbatch, all layers",
        "The host waits for the device",
        "Between ranks",
        "A checkpoint",
    ]
    assert "Routing" not in [table.title for table in tables(summary_of(rank_of(1)))]


def test_the_curve_has_round_ticks_its_peak_and_the_end_of_the_device() -> None:
    rank = rank_of(60)
    root = ET.fromstring(curve_svg(rank.memory, title="Rank <0>", gpu_bytes=80 * GIB))
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0", "20", "40", "60", "80", "GiB"} <= set(words)
    assert "peak 60.00 GiB in 0B0" in words
    assert "80.00 GiB of the device" in words
    assert "Rank <0>" in words
    assert "activations" in words
    assert "casts" not in words  # there are none
    far = curve_svg(rank_of(1).memory, title="", gpu_bytes=80 * GIB)
    assert "of the device" not in far


def test_numbers_in_words() -> None:
    assert [size(each) for each in (0, 1, 2048, 3 * GIB, 2**41)] == [
        "0",
        "1 B",
        "2.00 KiB",
        "3.00 GiB",
        "2.00 TiB",
    ]
    assert several_ranks([5]) == "1: 5"
    assert several_ranks(range(2, 10)) == "8: 2 to 9"
    assert several_ranks([0, 8, 16, 24, 32]) == "5: 0, 8, 16, 24, ..."


def normed_linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))


def test_a_trace_of_a_real_model_adds_up() -> None:
    with DryDevice() as device:
        with doing("build"):
            layers = torch.nn.ModuleList(normed_linear() for _ in range(3)).cuda()
            device.label(layers.parameters(), "parameters")
            optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
        for step in (1, 2):
            with doing(f"step {step}"):
                for microbatch in range(2):
                    of = f"stage 0, microbatch {microbatch}"
                    with doing(f"{of}: in step 0F{microbatch}"):
                        x = torch.zeros(128, 64, device="cuda")
                        for index, layer in enumerate(layers):
                            with doing(f"layers.{index}"):
                                x = layer(x).relu()
                        loss = x.sum()
                    with doing(f"{of}: in step 0B{microbatch}"):
                        loss.backward()
                with doing("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                    loss.item()
        peak = device.storages.peak_bytes
    rank = summarize(device.trace)
    assert rank.memory.peak_live == peak
    assert rank.memory.at_peak["parameters"] == 3 * (64 * 64 + 3 * 64) * 4
    launches = {name: each.launches for name, each in rank.work.by_layer().items()}
    assert launches["layers.0"] == launches["layers.1"] == launches["layers.2"]
    by_microbatch = rank.work.by_microbatch()
    assert by_microbatch[0].flops == by_microbatch[1].flops
    assert by_microbatch[0].flops == 2 * 128 * 64 * 64 * (3 + 3 + 3)
    (wait,) = rank.work.waits
    assert wait.what == "aten._local_scalar_dense"
    assert "test_dry_page.py" in wait.at
    Checked(page(summary_of(rank)))
