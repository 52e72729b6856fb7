"""Input that cannot be right is refused on every rank, in one line with the numbers in it."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    SequenceLayout,
    SlidingWindow,
)
from hp_context.attention.core import PositionsOnly
from hp_platform import PeerError
from hp_platform.testing import run_in_threads

Run = Callable[[ProcessGroup], None]


def heads(q: int, k: int | None = None, *, seq: int = 4, size: int = 8) -> list[Tensor]:
    return [torch.randn(2, seq, n, size) for n in (q, k or q, k or q)]


def refused(error: type[Exception], message: str, call: Run, *, ranks: int = 2) -> None:
    """All ranks raise `error` with `message`."""

    def rank(group: ProcessGroup) -> None:
        with pytest.raises(error, match=message) as caught:
            call(group)
        assert "\n" not in str(caught.value)

    run_in_threads(rank, world_size=ranks, timeout=20)


def attend(qkv: list[Tensor], parallel: ContextParallel | None = None) -> Run:
    def call(group: ProcessGroup) -> None:
        (parallel or ContextParallel()).apply(Attention(), group)(*qkv)

    return call


def test_fewer_heads_than_ranks_are_refused_with_the_alternative() -> None:
    message = r"ulysses_degree \(4\) must be <= heads of q \(3\); ranks may gather keys instead"
    refused(ValueError, message, attend(heads(3)), ranks=4)


@pytest.mark.parametrize(
    ("qkv", "message"),
    [
        (heads(8, 3), r"heads of k \(3\) must divide heads of q \(8\)"),
        ([*heads(8)[:2], heads(4)[2]], r"heads of k \(8\) must equal heads of v \(4\)"),
        ([heads(8)[0].double(), *heads(8)[1:]], r"k \(torch.float32 on cpu\) must match q"),
        ([heads(8, size=6)[0], *heads(8)[1:]], r"head size of k \(8\) must equal that of q \(6\)"),
        ([x[0, 0] for x in heads(8)], "must agree and end with the head size"),
        ([x[:1] if i else x.repeat(2, 1, 1, 1) for i, x in enumerate(heads(8))], "all dims but"),
        (
            [heads(8, seq=5)[0], *heads(8)[1:]],
            r"length of k \(4, seq_dim 1\) must equal that of q \(5\); .* keep all of k and v",
        ),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(qkv: list[Tensor], message: str) -> None:
    refused(ValueError, message, attend(qkv))


def test_swapped_dims_are_named_where_grouped_heads_show_them() -> None:
    heads_first = [x.transpose(1, 2) for x in heads(8, 2)]
    refused(ValueError, r"is the layout seq_dim=2, head_dim=1\?", attend(heads_first))


def test_the_head_size_cannot_be_the_head_dim() -> None:
    parallel = ContextParallel(seq_dim=1, head_dim=3)
    refused(ValueError, "must agree and end with the head size", attend(heads(8), parallel))


def test_a_whole_sequence_where_a_part_is_expected_is_noticed() -> None:
    whole = heads(8)
    refused(ValueError, "must be this rank's part .* all 2 ranks passed the same", attend(whole))


def test_equal_padding_on_all_ranks_is_no_whole_sequence() -> None:
    run_in_threads(attend([torch.zeros(1, 4, 2, 8)] * 3), world_size=2)


def test_ranks_with_different_lengths_all_raise() -> None:
    def call(group: ProcessGroup) -> None:
        attend(heads(8, seq=4 + group.rank()))(group)

    refused(
        ValueError, r"local sequence lengths of ranks \[1\] must equal those of ranks \[0\]", call
    )


def test_the_peers_of_a_rank_with_bad_input_do_not_hang() -> None:
    def rank(group: ProcessGroup) -> None:
        bad = group.rank() == 1
        with pytest.raises(ValueError if bad else PeerError) as caught:
            attend(heads(6, 4 if bad else 3))(group)
        if not bad:
            assert str(caught.value) == (
                "rank 1 failed before attention: "
                "ValueError: heads of k (4) must divide heads of q (6)"
            )

    run_in_threads(rank, world_size=3, timeout=20)


def test_a_mask_that_only_one_rank_has_wrong_is_told_to_all() -> None:
    def rank(group: ProcessGroup) -> None:
        bad = group.rank() == 0
        core = ContextParallel().apply(Attention(), group)
        with pytest.raises(ValueError if bad else PeerError):
            core(*heads(8), attn_mask=Documents((3 if bad else 8,)))

    run_in_threads(rank, world_size=2, timeout=20)


def test_ranks_compare_once_per_layer_and_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers: list[int] = []
    gather = torch.distributed.all_gather

    def count(*args: object, **kwargs: object) -> object:
        gathers.append(1)
        return gather(*args, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_gather", count)

    def rank(group: ProcessGroup) -> None:
        parallel = ContextParallel()
        layers = [parallel.apply(Attention(), group) for _ in range(3)]
        for layer in layers * 2:
            layer(*heads(8))
        for layer in layers * 2:
            layer(*heads(8, seq=6))

    run_in_threads(rank, world_size=2)
    assert len(gathers) == 2 * (3 + 1)


@dataclass(frozen=True)
class Striped(SequenceLayout):
    """A layout that does not exist here."""

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        del num_ranks
        return (rank,)


class NoMask(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        del k, v
        return q


class Local(NoMask):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        del k, v, attn_mask
        return q[:, :3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ContextParallel(layout=Striped(), load_balance=True),
            r"load_balance=True means HeadTail\(\), but layout \(Striped\(\)\) is given",
        ),
        (lambda: ContextParallel(0), r"ulysses_degree \(0\) must be >= 1"),
        (
            lambda: ContextParallel(seq_dim=2, head_dim=2),
            r"seq_dim \(2\) must differ from head_dim",
        ),
        (lambda: ContextParallel(seq_dim=-1), "must be >= 0"),
        (lambda: ContextParallel(qkv_indices=(0, 1)), "must be three positions"),
        (lambda: ContextParallel(qkv_kwarg_names=("q", "k")), "must be three names"),
    ],
)
def test_impossible_settings_are_refused_at_construction(
    make: Callable[[], ContextParallel], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_group_that_cannot_be_split_is_refused() -> None:
    def call(group: ProcessGroup) -> None:
        ContextParallel(2).apply(Attention(), group)

    message = r"the hybrid mode \(ulysses_degree=2\) makes groups of its own and needs the default"
    refused(ValueError, message, call, ranks=4)


def test_a_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    def call(group: ProcessGroup) -> None:
        ContextParallel(3).apply(Attention(), group)

    refused(
        ValueError, r"ulysses_degree \(3\) must divide the number of ranks \(4\)", call, ranks=4
    )


def test_the_full_degree_may_be_named() -> None:
    def rank(group: ProcessGroup) -> None:
        ContextParallel(2).apply(Attention(), group)(*heads(8))

    run_in_threads(rank, world_size=2)


def test_a_module_is_made_parallel_only_once() -> None:
    def call(group: ProcessGroup) -> None:
        core = ContextParallel().apply(Attention(), group)
        ContextParallel().apply(core, group)

    refused(ValueError, r"module \(Attention\) must be made parallel only once", call)


def test_a_mask_needs_a_module_that_takes_it() -> None:
    def call(group: ProcessGroup) -> None:
        ContextParallel(mask=Causal()).apply(NoMask(), group)

    refused(ValueError, "NoMask.forward has no parameter attn_mask", call)


def test_two_different_masks_are_refused() -> None:
    def call(group: ProcessGroup) -> None:
        ContextParallel(mask=Causal()).apply(Attention(SlidingWindow(3)), group)

    refused(ValueError, r"mask \(Causal\(\)\) must equal the mask of the module", call)


def test_documents_that_do_not_fill_the_whole_sequence_are_refused() -> None:
    parallel = ContextParallel(mask=Documents((4,)))  # the local length, not the whole one
    message = r"sum of Documents lengths \(4\) must equal the length of the whole sequence \(8\)"
    refused(ValueError, message, attend_anew(parallel))


def attend_anew(parallel: ContextParallel) -> Run:
    def call(group: ProcessGroup) -> None:
        parallel.apply(Attention(), group)(*heads(8))

    return call


@pytest.mark.parametrize("shape", [(4, 4), (4, 8), (8, 4)])
def test_a_mask_tensor_of_a_shard_is_refused(shape: tuple[int, int]) -> None:
    def call(group: ProcessGroup) -> None:
        core = ContextParallel().apply(Local(), group)
        core(*heads(8), torch.ones(shape, dtype=torch.bool))

    message = rf"attn_mask \({re.escape(str(shape))}\) must cover the whole sequence \(8 queries"
    refused(ValueError, message, call)


def test_an_output_that_lost_positions_is_refused() -> None:
    def call(group: ProcessGroup) -> None:
        ContextParallel().apply(Local(), group)(*heads(8))

    refused(ValueError, r"output of the core attention .* must have the sequence \(8\)", call)


def test_a_call_without_q_k_v_says_where_they_were_expected() -> None:
    def call(group: ProcessGroup) -> None:
        parallel = ContextParallel(qkv_kwarg_names=("query", "key", "value"))
        parallel.apply(Attention(), group)(*heads(8)[:1])

    refused(TypeError, r"k \(NoneType\) must be a tensor at position 1 or keyword key", call)


def test_what_is_neither_mesh_nor_group_is_refused() -> None:
    def call(_: ProcessGroup) -> None:
        ContextParallel().apply(Attention(), object())  # type: ignore[arg-type]

    refused(TypeError, "must be a DeviceMesh or a ProcessGroup", call)


def gathering(module: nn.Module, *args: object, **settings: object) -> Run:
    """Run `module` in the all-gather K/V mode on plain input and `args`."""

    def call(group: ProcessGroup) -> None:
        parallel = ContextParallel(1, **settings)  # type: ignore[arg-type]
        parallel.apply(deepcopy(module), group)(*heads(8), *args)

    return call


class Sdpa(nn.Module):
    """Calls torch's attention as it is told."""

    def __init__(self, *, is_causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.is_causal, self.dropout = is_causal, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.is_causal:
            attn_mask = None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, self.dropout, is_causal=self.is_causal
        )
        return out.transpose(1, 2)


class OwnWay(Attention):
    """An `Attention` that does not use the mask it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Mask | None = None) -> Tensor:
        del attn_mask
        return super().forward(q, k, v, Causal())


class Renamed(Attention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        return super().forward(q, k, v, mask)


MODE = r"the all-gather K/V mode \(ulysses_degree=1\)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            gathering(Sdpa()),
            rf"mask \(None\) must be given for Sdpa in {MODE}, where it sees a part",
        ),
        (gathering(NoMask(), mask=Full()), "NoMask.forward has no parameter attn_mask"),
        (
            gathering(Sdpa(is_causal=True), mask=Causal()),
            r"scaled_dot_product_attention\(is_causal=True\) must not be called in " + MODE,
        ),
        (gathering(Sdpa(dropout=0.5), mask=Full()), rf"dropout_p \(0.5\) must be 0 in {MODE}"),
        (gathering(Attention(dropout=0.5)), rf"dropout \(0.5\) must be 0 in {MODE}: use ulysses"),
        (gathering(OwnWay()), "must pass its attn_mask to masked_attention in the all-gather"),
        (gathering(Renamed()), r"mask_kwarg_name \(attn_mask\) must name a parameter of Renamed"),
        (
            gathering(Attention(), Documents((4,))),
            r"sum of Documents lengths \(4\) must equal the length of the whole sequence \(8\)",
        ),
        (
            gathering(Sdpa(), torch.ones(4, 4, dtype=torch.bool), mask=Full()),
            r"attn_mask \(\(4, 4\)\) must cover the whole sequence \(8 queries, 8 keys\)",
        ),
    ],
)
def test_what_the_all_gather_mode_cannot_do_is_refused_by_name(call: Run, message: str) -> None:
    refused(ValueError, message, call)


@pytest.mark.parametrize(
    ("module", "mask", "message"),
    [
        (
            Sdpa(),
            Full(),
            r"module \(Sdpa\) must be an Attention of hp_context in {}, where no rank",
        ),
        (Attention(dropout=0.5), None, r"dropout \(0.5\) must be 0 in {}"),
        (OwnWay(), None, "must pass its attn_mask to masked_attention in {}"),
    ],
)
def test_what_a_ring_cannot_do_is_refused_by_name(
    module: nn.Module, mask: Mask | None, message: str
) -> None:
    def call(group: ProcessGroup) -> None:
        parallel = ContextParallel(ring=True, mask=mask)
        parallel.apply(deepcopy(module), group)(*heads(8))

    refused(ValueError, message.format(r"the ring mode \(ring=True\)"), call)


def test_an_attention_takes_no_mask_tensor() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool)
    refused(TypeError, r"attn_mask \(Tensor\) must be a Mask", gathering(Attention(), mask))


def test_blocks_need_batch_sequence_heads_and_head_size() -> None:
    def call(group: ProcessGroup) -> None:
        ContextParallel(1).apply(Attention(), group)(*(x[:, None] for x in heads(8)))

    refused(ValueError, rf"must have 4 dims in {MODE}", call)


@pytest.mark.parametrize("degree", [None, 1])
def test_head_tail_needs_two_chunks_of_each_rank(degree: int | None) -> None:
    def call(group: ProcessGroup) -> None:
        parallel = ContextParallel(degree, load_balance=True)
        parallel.apply(Attention(), group)(*heads(8, seq=5))

    message = r"sequence length \(10\) must be divisible by 2 times .* \(2\); pad it by 2"
    refused(ValueError, message, call)


def test_any_number_of_heads_may_be_gathered() -> None:
    def rank(group: ProcessGroup) -> None:
        attend(heads(5), ContextParallel(1))(group)

    run_in_threads(rank, world_size=2)


def test_the_peers_of_a_rank_that_cannot_gather_do_not_hang() -> None:
    def rank(group: ProcessGroup) -> None:
        bad = group.rank() == 1
        core = ContextParallel(1).apply(Attention(), group)
        with pytest.raises(ValueError if bad else PeerError):
            core(*heads(8), attn_mask=Documents((3 if bad else 8,)))

    run_in_threads(rank, world_size=2, timeout=20)


@pytest.mark.parametrize("ring", [False, True])
def test_masks_of_parts_of_the_sequence_are_noticed(ring: bool) -> None:
    def call(group: ProcessGroup) -> None:
        core = ContextParallel(1, ring=ring).apply(Attention(), group)
        core(*heads(8), attn_mask=Documents((3, 5) if group.rank() else (4, 4)))

    refused(
        ValueError,
        r"masks of ranks \[1\] must equal those of ranks \[0\]; on rank \d: Documents",
        call,
    )


def test_a_copy_of_a_strange_module_is_guarded_with_its_own_state() -> None:
    def rank(group: ProcessGroup) -> None:
        core = ContextParallel(1, mask=Causal()).apply(Sdpa(), group)
        twin = deepcopy(core)
        twin.is_causal = True
        core(*heads(8))
        with pytest.raises(ValueError, match="must not be called"):
            twin(*heads(8))

    run_in_threads(rank, world_size=2)


def test_the_guard_sees_is_causal_of_other_functions_too() -> None:
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 1, 8)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    with PositionsOnly("this mode", "attn_mask"):
        attention(x, x, x, attn_mask=mask)
        with pytest.raises(ValueError, match="must not be called in this mode"):
            attention(x, x, x, attn_mask=mask, is_causal=True)


def test_alone_the_all_gather_mode_has_nothing_to_do() -> None:
    run_in_threads(gathering(Sdpa(is_causal=True)), world_size=1)


@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Attention(sinks=torch.zeros(4)),
            r"sinks \(\(4,\)\) must have one number for each head of q \(8\)",
        ),
        (
            Attention(sinks=torch.zeros(8, 1)),
            r"sinks \(\(8, 1\)\) must have one number for each head of q \(8\)",
        ),
        (Attention(softcap=0.0), r"softcap \(0.0\) must be > 0, or None"),
    ],
    ids=["sinks of some heads", "sinks of two dims", "softcap"],
)
def test_terms_out_of_their_range_are_refused(
    degree: int | None, module: Attention, message: str
) -> None:
    def call(group: ProcessGroup) -> None:
        ContextParallel(degree).apply(deepcopy(module), group)(*heads(8))

    refused(ValueError, message, call)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_is_a_probability(dropout: float) -> None:
    with pytest.raises(ValueError, match=rf"dropout \({dropout}\) must be >= 0 and < 1"):
        Attention(dropout=dropout)(*heads(8))


def test_terms_need_four_dims() -> None:
    qkv = [x[:, None] for x in heads(8)]
    with pytest.raises(ValueError, match="must have 4 dims with softcap, sinks or dropout"):
        Attention(seq_dim=2, head_dim=3, softcap=1.0)(*qkv)


def test_sinks_and_dropout_under_ulysses_need_the_mask_of_the_call() -> None:
    def unused(group: ProcessGroup) -> None:
        core = OwnWay(sinks=torch.zeros(8))
        ContextParallel().apply(core, group)(*heads(8))

    def renamed(group: ProcessGroup) -> None:
        ContextParallel().apply(Renamed(dropout=0.5), group)(*heads(8))

    def lost(group: ProcessGroup) -> None:
        ContextParallel().apply(OwnWay(dropout=0.5), group)(*heads(8))

    refused(ValueError, r"sinks \(\(8,\)\) must have one number for each head of q \(4\)", unused)
    refused(ValueError, r"must name a parameter of Renamed.forward in the Ulysses mode", renamed)
    refused(ValueError, "must pass its attn_mask to masked_attention in the Ulysses mode", lost)


def test_a_hook_that_replaces_q_behind_the_exchange_is_refused() -> None:
    def call(group: ProcessGroup) -> None:
        core = ContextParallel().apply(Attention(), group)
        core.register_forward_pre_hook(lambda _, qkv: tuple(x * 1 for x in qkv))
        core(*heads(8))

    refused(ValueError, "q of the core attention must be the one that the exchange made", call)


def test_a_hook_before_the_exchange_may_change_q() -> None:
    def rank(group: ProcessGroup) -> None:
        core = Attention()
        core.register_forward_pre_hook(lambda _, qkv: tuple(x * 1 for x in qkv))
        ContextParallel().apply(core, group)(*heads(8))

    run_in_threads(rank, world_size=2)


@pytest.mark.parametrize("degree", [None, 1])
def test_v_may_differ_in_its_head_size_alone(degree: int | None) -> None:
    q, k, _ = heads(8)

    def wrong_keys(group: ProcessGroup) -> None:
        attend([q, torch.randn(2, 4, 8, 6), k], ContextParallel(degree))(group)

    def other_values(group: ProcessGroup) -> None:
        core = ContextParallel(degree).apply(Attention(), group)
        qkv = [torch.randn(2, 4, 8, n) for n in (8, 8, 6)]
        assert core(*qkv).shape == (2, 4, 8, 6)

    refused(ValueError, r"head size of k \(6\) must equal that of q \(8\)", wrong_keys)
    run_in_threads(other_values, world_size=2)
