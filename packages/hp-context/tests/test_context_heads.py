"""Which heads a rank gets under grouped-query attention."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hp_context.attention.spread import HeadSplit, split_heads

drawn = st.tuples(st.integers(1, 6), st.integers(1, 8), st.data())


def split_of(drawn: tuple[int, int, st.DataObject]) -> tuple[HeadSplit, int, int]:
    """The heads of each rank, the query heads of a group and the number of ranks."""
    group_size, num_kv_heads, data = drawn
    num_ranks = data.draw(st.integers(1, group_size * num_kv_heads))
    return split_heads(group_size * num_kv_heads, num_kv_heads, num_ranks), group_size, num_ranks


@settings(deadline=None)
@given(drawn)
def test_every_query_head_meets_its_own_key_head(drawn: tuple[int, int, st.DataObject]) -> None:
    split, group_size, num_ranks = split_of(drawn)
    assert len(split.query) == len(split.kv) == num_ranks
    for heads, kv in zip(split.query, split.kv, strict=True):
        assert len(heads) % len(kv) == 0
        shared = len(heads) // len(kv)  # as grouped-query attention pairs them on a rank
        assert [kv[i // shared] for i in range(len(heads))] == [h // group_size for h in heads]


@settings(deadline=None)
@given(drawn)
def test_the_ranks_share_all_query_heads_in_order(drawn: tuple[int, int, st.DataObject]) -> None:
    split, group_size, num_ranks = split_of(drawn)
    total = drawn[1] * group_size
    assert [head for heads in split.query for head in heads] == list(range(total))
    counts = [len(heads) for heads in split.query]
    most = 0 if total % num_ranks == 0 else group_size if drawn[1] >= num_ranks else 1
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= most


@settings(deadline=None)
@given(drawn)
def test_heads_are_replicated_only_where_ranks_cannot_share_them(
    drawn: tuple[int, int, st.DataObject],
) -> None:
    split, group_size, num_ranks = split_of(drawn)
    num_kv_heads = drawn[1]
    uneven = num_kv_heads * group_size % num_ranks != 0
    whole_groups = num_kv_heads % num_ranks == 0 or (uneven and num_kv_heads >= num_ranks)
    assert (split.kv_index is None) == whole_groups


def test_uneven_heads_go_by_whole_groups_while_there_are_enough() -> None:
    split = split_heads(10, 5, 4)
    assert split.query == (range(2), range(2, 4), range(4, 6), range(6, 10))
    assert split.kv == ((0,), (1,), (2,), (3, 4))
    assert (split.query_counts, split.kv_counts, split.kv_index) == (
        (2, 2, 2, 4),
        (1, 1, 1, 2),
        None,
    )
    fewer = split_heads(6, 2, 4)
    assert fewer.query == (range(1), range(1, 3), range(3, 4), range(4, 6))
    assert (fewer.kv_index, fewer.kv_counts) == ((0, 0, 1, 1), None)
