"""Attention by the calling convention of transformers: what it computes, and what it refuses.

The model here calls attention as models of transformers do; those themselves are in
`test_context_transformers.py`.
"""

import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_context import (
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Mask,
    PositionMask,
    SequenceLayout,
    SlidingWindow,
    local_positions,
    mask_tensor,
    masked_attention,
    register_attention,
    shard_batch,
    shard_sequence,
    unshard_sequence,
)
from hp_context.hugging_face.attention import SpreadAttention, make_call_mask
from hp_platform import PeerError
from hp_platform.testing import compare, run_distributed, watch_operators

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, HEADS, KV_HEADS, SIZE, LAYERS = 32, 4, 2, 8, 2
SEQ = 24
TERMS = ("softcap", "sinks")
IN_ORDER, ZIGZAG = Contiguous(), HeadTail()
Tensors = dict[str, Tensor]
Attend = Callable[..., tuple[Tensor, None]]


def causal(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def both_ways(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) | (key // 2 == query // 2)


class Layer(nn.Module):
    """Rotary embeddings by position ids, grouped heads, attention by a function."""

    def __init__(self, **terms: Any) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.terms = terms
        self.sinks = nn.Parameter(torch.randn(HEADS)) if "sinks" in terms else None
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, KV_HEADS * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Any, position_ids: Tensor, attend: Attend, **kw: Any) -> Any:
        q, k, v = (
            part.unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        of_text = position_ids if position_ids.ndim == 2 else position_ids[0]
        angle = of_text[:, None, :, None] / 10.0 ** torch.arange(SIZE // 2)
        q, k = (rotated(part, angle) for part in (q, k))
        kw |= {"scaling": 0.3, "position_ids": position_ids, "softcap": self.terms.get("softcap")}
        y, _ = attend(self, q, k, v, mask, **kw, s_aux=self.sinks)
        return x + self.out(y.flatten(2))


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    sin, cos = angle.sin(), angle.cos()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class Decoder(nn.Module):
    """Asks for its mask once and hands it to each layer."""

    def __init__(self, attend: Attend, window: int | None = None, **told: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.window = attend, window
        self.told = {name: value for name, value in told.items() if name not in TERMS}
        self.embed = nn.Embedding(VOCABULARY, HEADS * SIZE)
        self.layers = nn.ModuleList(
            Layer(**{name: told[name] for name in told if name in TERMS}) for _ in range(LAYERS)
        )
        self.recompute: bool | None = None
        self.double()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        length = input_ids.size(1)
        if position_ids is None:  # as models of transformers do
            position_ids = torch.arange(length)[None]
        mask: Any = attention_mask
        if attention_mask is None or attention_mask.ndim == 2:
            told: dict[str, Any] = {
                "batch_size": len(input_ids),
                "q_length": length,
                "kv_length": length,
                "mask_function": causal,
                "attention_mask": None if attention_mask is None else attention_mask.bool(),
                "config": SimpleNamespace(sliding_window=self.window),
                "local_size": self.window,
            }
            mask = make_call_mask(**told | self.told)
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            arguments = (x, mask, position_ids, self.attend)
            if self.recompute is None:
                x = layer(*arguments, **kwargs)
            else:
                x = checkpoint(layer, *arguments, use_reentrant=self.recompute, **kwargs)
        return x


def plainly(masks: list[Mask]) -> Attend:
    """Attention of whole sequences, with a mask for each."""

    def attend(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: Any, **kw: Any) -> Any:
        allowed = torch.stack([mask_tensor(mask, q.size(2)) for mask in masks])[:, None]
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = q @ k.mT * kw["scaling"]
        if kw["softcap"] is not None:
            scores = torch.tanh(scores / kw["softcap"]) * kw["softcap"]
        scores = scores.masked_fill(~allowed, -torch.inf)
        if kw["s_aux"] is not None:
            sinks = kw["s_aux"][:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        out = scores.softmax(-1)[..., : k.size(2)] @ v
        return out.transpose(1, 2), None

    return attend


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, SEQ), generator=torch.Generator().manual_seed(1))


def packed(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def step(model: Decoder, weights: Tensor, **inputs: Any) -> Tensors:
    out = model(**inputs)
    (out * weights).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach()} | grads


WEIGHTS = torch.randn(2, SEQ, HEADS * SIZE, generator=torch.Generator().manual_seed(2)).double()
SAME = torch.stack([packed(7, 12, 5)] * 2)
DIFFERENT = torch.stack([packed(7, 12, 5), packed(SEQ)])
ODD = torch.stack([packed(1, 1, 1, 15, 1, 5)] * 2)
STRIDED = Causal() & PositionMask(lambda query, key: (query - key) % 3 != 1)
# Position ids (None: shard_batch makes them), window, context_mask, the masks of both sequences.
CASES: dict[str, tuple[Tensor | None, int | None, Mask | None, list[Mask]]] = {
    "sinks and soft cap": (SAME, None, None, [Causal() & Documents((7, 12, 5))] * 2),
    "causal": (None, None, None, [Causal()] * 2),
    "packed": (SAME, None, None, [Causal() & Documents((7, 12, 5))] * 2),
    "odd documents": (ODD, None, None, [Causal() & Documents((1, 1, 1, 15, 1, 5))] * 2),
    "packed differently": (
        DIFFERENT,
        None,
        None,
        [Causal() & Documents((7, 12, 5)), Causal()],
    ),
    "window": (None, 5, None, [SlidingWindow(4)] * 2),
    "packed, window": (SAME, 5, None, [SlidingWindow(4) & Documents((7, 12, 5))] * 2),
    "a mask of one's own": (None, None, STRIDED, [STRIDED] * 2),
}
# Degree, ring, layout.
MODES: list[tuple[int | None, bool, SequenceLayout]] = [
    (None, False, IN_ORDER),
    (None, False, ZIGZAG),
    (1, False, IN_ORDER),
    (1, False, ZIGZAG),
    (1, True, ZIGZAG),
    (2, False, ZIGZAG),
]


def terms_of(case: str) -> dict[str, Any]:
    return {"sinks": True, "softcap": 2.0} if case == "sinks and soft cap" else {}


def part_of(case: str, group: Any, mode: int, recompute: bool | None) -> Tensors:
    """What the ranks of a group compute together, whole."""
    position_ids, window, own, _ = CASES[case]
    degree, ring, layout = MODES[mode]
    attend = SpreadAttention(group, ulysses_degree=degree, ring=ring, layout=layout)
    batch = {"input_ids": tokens(), "weights": WEIGHTS}
    batch |= {} if position_ids is None else {"position_ids": position_ids}
    inputs = shard_batch(batch, group, layout=layout)
    inputs |= {} if own is None else {"context_mask": own}
    model = Decoder(attend, window, **terms_of(case))
    model.recompute = recompute
    found = step(model, **inputs)
    for name, gradient in found.items():
        if name != "out":
            dist.all_reduce(gradient, group=group)
    found["out"] = unshard_sequence(found["out"], group, layout=layout)
    return found


IS_WHOLE = os.environ.get("HP_WHOLE") == "1"


def every_case(world_size: int) -> list[tuple[str, Tensors]]:
    """Half of the pairs of a mask and a mode, of each mask and of each mode; all with HP_WHOLE."""
    pair = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "cp"))
    groups = {"all": world(), "two": pair.get_group("cp")}
    found = []
    for number, case in enumerate(CASES):
        for name, group in groups.items():
            for mode, (degree, _, layout) in enumerate(MODES):
                if name == "two" and (degree == 2 or layout is IN_ORDER):
                    continue
                if (number + mode) % 2 and not IS_WHOLE:
                    continue
                recompute = {"packed": False, "window": True}.get(case)
                what = f"{case}: {name}, {MODES[mode]}"
                found.append((what, part_of(case, group, mode, recompute)))
    return found


def test_every_mask_and_mode_equals_one_process() -> None:
    wanted = {}
    for case, (position_ids, _, _, masks) in CASES.items():
        positions = packed(SEQ)[None] if position_ids is None else position_ids
        model = Decoder(plainly(masks), **terms_of(case))
        wanted[case] = step(model, WEIGHTS, input_ids=tokens(), position_ids=positions)
    for results in run_distributed(every_case, 4, world_size=4, timeout=180):
        assert len(results) == len(CASES) * 9 // (1 if IS_WHOLE else 2)
        for what, actual in results:
            comparison = compare(actual, wanted[what.split(":")[0]], bound=1e-12)
            assert comparison.ok, f"{what}\n{comparison}"


def gathers(recompute: bool | None) -> list[list[int]]:
    """Bytes of each all-gather in a first and in a later forward and backward, by pass."""
    attend = SpreadAttention(world(), ulysses_degree=None, ring=False, layout=IN_ORDER)
    inputs = shard_batch({"input_ids": tokens()}, world())
    model = Decoder(attend)
    model.recompute = recompute
    sent: list[int] = []

    def see(operator: str, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        if "allgather" in operator:
            sent.append(sum(x.nbytes for x in args[1]))

    model(**inputs)
    with watch_operators(see):
        out = model(**inputs)
        forward = list(sent)
        sent.clear()
        out.sum().backward()
    return [forward, sent]


@pytest.mark.parametrize("recompute", [None, False])
def test_a_forward_gathers_positions_once_for_all_layers_and_recomputes(
    recompute: bool | None,
) -> None:
    numbers = 8 * (1 + 4)  # failed, what must agree
    for result in run_distributed(gathers, recompute, world_size=2):
        assert result == [[numbers, 8 * SEQ // 2], []]


def refused(case: str) -> dict[str, Any]:
    """Arguments that this rank passes in a case, and what makes the model."""
    rank, seq = dist.get_rank(), SEQ // 2
    ids, here = shard_sequence(tokens(), world()), local_positions(SEQ, world())
    good = {"input_ids": ids, "position_ids": here[None]}
    ones = torch.ones(2, seq)
    holes = ones.clone()
    holes[0, -2:] = 0
    other_layout = local_positions(SEQ, world(), layout=ZIGZAG)[None]
    changes: dict[str, dict[str, Any]] = {
        "default positions": {"position_ids": None},
        "positions of another layout": {"position_ids": other_layout},
        "default positions, mask without a cut": {"position_ids": None, "context_mask": Causal()},
        "positions that start late": {"position_ids": here[None] + 1},
        "positions of three axes": {"position_ids": here.expand(3, 1, -1)},
        "padding": {"attention_mask": holes},
        "padding on one rank": {"attention_mask": holes if rank else ones},
        "a mask on one rank": {"attention_mask": ones} if rank else {},
        "another mask on one rank": {
            "context_mask": Causal() & Documents((4, 20) if rank else (20, 4))
        },
        "documents and a mask": {
            "attention_mask": ones,
            "position_ids": shard_sequence(SAME, world()),
        },
        "a mask of four dims": {"attention_mask": torch.ones(2, 1, seq, seq)},
        "a whole mask": {"attention_mask": torch.ones(2, SEQ)},
        "a bias": {"position_bias": torch.zeros(1, HEADS, seq, seq)},
        "a bias on one rank": {"position_bias": torch.zeros(1)} if rank else {},
        "weights": {"output_attentions": True},
        "flash's documents": {"cu_seq_lens_q": torch.tensor([0, 7, SEQ])},
        "a window the mask lacks": {"sliding_window": 5},
        "a tensor as a mask": {"context_mask": ones},
        "another length on one rank": (
            {"input_ids": ids[:, 1:], "position_ids": here[None, 1:]} if rank else {}
        ),
    }
    return good | changes.get(case, {})


TOLD: dict[str, dict[str, Any]] = {
    "cache": {"q_offset": SEQ // 2, "kv_length": SEQ},
    "bidirectional": {"allow_is_bidirectional_skip": True},
    "a mask function of the model": {"use_vmap": True},
    "blocks both ways": {"mask_function": both_ways, "allow_is_causal_skip": False},
    "chunks": {"local_size": 4},
}
MESSAGES = {
    "default positions": "all 2 ranks count from 0 to 11, as the model does that is given none",
    "default positions, mask without a cut": "all 2 ranks count from 0 to 11",
    "positions of another layout": r"\(18 after 5 at global position 6\) must count up by 1",
    "positions that start late": r"\(1 at global position 0\) must count up by 1 from 0",
    "positions of three axes": r"position_ids \(\(3, 1, 12\)\) must be \[2, 12\] or \[1, 12\]",
    "padding": "attention_mask must not mask padding",
    "padding on one rank": "attention_mask must not mask padding",
    "a mask on one rank": r"masks that attention is given of ranks \[1\] must equal",
    "another mask on one rank": r"masks that attention is given of ranks \[1\] must equal",
    "documents and a mask": "attention_mask must be None where position_ids pack documents",
    "a mask of four dims": r"attention_mask \(\(2, 1, 12, 12\)\) must be left to the model",
    "a whole mask": r"attention_mask \(\(2, 24\)\) must be of this rank's part",
    "a bias": "position_bias must be None",
    "a bias on one rank": "position_bias must be None",
    "weights": "output_attentions must be False",
    "flash's documents": "cu_seq_lens_q must be None.*: documents are told by position_ids",
    "a window the mask lacks": r"sliding_window of the layer \(5\) must equal .* \(None\)",
    "a tensor as a mask": r"context_mask \(Tensor\) must be a hp_context.Mask",
    "another length on one rank": r"shapes of queries, keys and values of ranks \[1\] must equal",
    "cache": r"past_key_values \(queries 12, keys 24, offset 12\) must be None",
    "bidirectional": r"is_causal \(False\) must be True",
    "a mask function of the model": "the model adds a mask function of its own",
    "blocks both ways": "the model lets blocks of tokens see each other both ways",
    "chunks": r"local attention \(size 4\) must be a sliding window",
}


def all_refusals() -> dict[str, tuple[str, str]]:
    attend = SpreadAttention(world(), ulysses_degree=None, ring=False, layout=IN_ORDER)
    found = {}
    for case in MESSAGES:
        try:
            Decoder(attend, **TOLD.get(case, {}))(**refused(case))
        except (ValueError, PeerError) as error:
            found[case] = (type(error).__name__, str(error))
    # Nothing is left over from what failed.
    model = Decoder(attend)
    model(**refused("nothing"))
    model(**refused("nothing"), attention_mask=torch.ones(2, SEQ // 2))
    return found


def test_what_cannot_be_computed_is_refused_by_name_on_all_ranks() -> None:
    results = run_distributed(all_refusals, world_size=2)
    for case, message in MESSAGES.items():
        errors = [result.get(case, ("nothing", "")) for result in results]
        told = [text for kind, text in errors if kind == "ValueError"]
        assert told, f"{case}: {errors}"
        assert all(re.search(message, text) for text in told), f"{case}: {errors}"
        others = [kind for kind, _ in errors if kind != "ValueError"]
        one_rank_knows = case in ("padding on one rank", "a bias on one rank")
        assert others == ["PeerError"] * one_rank_knows, f"{case}: {errors}"


def plainly_dropped(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: Any, **kw: Any
) -> tuple[Tensor, None]:
    out = masked_attention(
        q,
        k,
        v,
        mask=Causal(),
        seq_dim=2,
        head_dim=1,
        scale=kw["scaling"],
        dropout=kw["dropout"],
    )
    return out.transpose(1, 2), None


def dropped(degree: int | None) -> Tensors | str:
    attend = SpreadAttention(world(), ulysses_degree=degree, ring=False, layout=ZIGZAG)
    inputs = shard_batch({"input_ids": tokens(), "weights": WEIGHTS}, world(), layout=ZIGZAG)
    model = Decoder(attend)
    torch.manual_seed(5)
    try:
        found = step(model, **inputs, dropout=0.3)
    except ValueError as error:
        return str(error)
    for name, gradient in found.items():
        if name != "out":
            dist.all_reduce(gradient)
    return found | {"out": unshard_sequence(found["out"], world(), layout=ZIGZAG)}


def test_dropout_under_ulysses_drops_what_one_process_drops() -> None:
    model = Decoder(plainly_dropped)
    torch.manual_seed(5)
    positions = torch.arange(SEQ)[None]
    wanted = step(model, WEIGHTS, input_ids=tokens(), position_ids=positions, dropout=0.3)
    for found in run_distributed(dropped, None, world_size=2):
        assert isinstance(found, dict)
        comparison = compare(found, wanted, bound=1e-12)
        assert comparison.ok, str(comparison)


def test_dropout_elsewhere_is_refused_with_the_way_out() -> None:
    for message in run_distributed(dropped, 1, world_size=2):
        assert isinstance(message, str)
        assert re.search(
            r"dropout \(0.3\) must be 0 in the all-gather K/V mode \(ulysses_degree=1\): "
            r"use ulysses_degree=None",
            message,
        )


def test_without_transformers_the_registration_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)
    with pytest.raises(ImportError, match="needs transformers 5: pip install"):
        register_attention(None)  # type: ignore[arg-type]
