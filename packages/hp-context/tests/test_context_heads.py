"""Which heads a rank gets under grouped-query attention."""

from hypothesis import given
from hypothesis import strategies as st

from hp_context.heads import kv_head_index, kv_heads_per_rank, legal_degrees

ratios = st.tuples(st.integers(1, 6), st.integers(1, 8), st.data())


@given(ratios)
def test_every_query_head_meets_its_own_key_head(
    drawn: tuple[int, int, st.DataObject],
) -> None:
    group_size, num_kv_heads, data = drawn
    num_heads = group_size * num_kv_heads
    num_ranks = data.draw(st.sampled_from(legal_degrees(num_heads)))
    index = kv_head_index(num_heads, num_kv_heads, num_ranks) or tuple(range(num_kv_heads))
    local, per_rank = num_heads // num_ranks, kv_heads_per_rank(num_heads, num_kv_heads, num_ranks)
    assert len(index) == num_ranks * per_rank
    for head in range(num_heads):
        rank, position = divmod(head, local)
        slot = position // (local // per_rank)  # as grouped-query attention pairs them on a rank
        assert index[rank * per_rank + slot] == head // group_size


@given(ratios)
def test_heads_are_replicated_only_where_ranks_cannot_share_them(
    drawn: tuple[int, int, st.DataObject],
) -> None:
    group_size, num_kv_heads, data = drawn
    num_ranks = data.draw(st.sampled_from(legal_degrees(group_size * num_kv_heads)))
    index = kv_head_index(group_size * num_kv_heads, num_kv_heads, num_ranks)
    assert (index is None) == (num_kv_heads % num_ranks == 0)


def test_legal_degrees_divide_the_heads() -> None:
    assert legal_degrees(12) == [1, 2, 3, 4, 6, 12]
