from itertools import permutations

import pytest

from hp_vtp import Algorithm, PipelineLayout, Sharded, StageLayout, plan_edge
from hp_vtp.messages import ALIGNMENT, HEADER_SIZE, bundle, text_of, to_header
from hp_vtp.transport.channel import header_peers


def test_tensors_share_one_message_per_pair_and_step() -> None:
    edge = PipelineLayout.straight([2, 3]).edge(0, 1)
    plans = [plan_edge(edge, (n,), itemsize=2, algorithm="interval") for n in (25, 41, 0)]
    hop, spread = bundle(plans, edge)
    assert [str(hop), str(spread)] == ["hop 0", "spread 0"]
    pairs = [(message.sender, message.receiver) for message in hop.messages]
    assert pairs == [(0, 2), (0, 3), (1, 3), (1, 4)]
    for message in hop.messages:
        first, second = message.pieces
        assert (first.tensor, second.tensor) == (0, 1)
        assert first.offset == 0
        assert second.offset % ALIGNMENT == 0
        assert second.offset >= first.size
        assert message.size == second.offset + second.size


@pytest.mark.parametrize("algorithm", ["interval", "leader", "direct"])
def test_message_order_completes_with_blocking_sends(algorithm: Algorithm) -> None:
    for a, b in permutations(range(1, 6), 2):
        for stages in (
            (StageLayout((tuple(range(a)),)), StageLayout((tuple(range(a, a + b)),))),
            (StageLayout((tuple(range(b, a + b)),), Sharded(0)), StageLayout((tuple(range(b)),))),
        ):
            edge = PipelineLayout(stages, (0, 1)).edge(0, 1)
            plan = plan_edge(edge, (61, 3), itemsize=4, algorithm=algorithm)
            queues: dict[int, list[tuple[int, int]]] = {rank: [] for rank in edge.ranks}
            for step in bundle([plan], edge):
                for message in step.messages:
                    for rank in (message.sender, message.receiver):
                        queues[rank].append((message.sender, message.receiver))
            while any(queues.values()):
                heads = [queue[0] for queue in queues.values() if queue]
                ready = next(pair for pair in heads if heads.count(pair) == 2)
                for rank in ready:
                    queues[rank].pop(0)


def test_headers_connect_all_ranks_of_an_edge() -> None:
    for a, b in permutations(range(1, 8), 2):
        edge = PipelineLayout.straight([a, b]).edge(0, 1)
        peers = {rank: header_peers(edge, rank) for rank in edge.ranks}
        assert all(peers.values())
        assert all(rank in peers[peer] for rank in peers for peer in peers[rank])
        assert sum(map(len, peers.values())) == 2 * (a + b - 1)
        reached: set[int] = set()
        grown = {edge.ranks[0]}
        while grown - reached:
            reached |= grown
            grown = {peer for rank in reached for peer in peers[rank]}
        assert reached == set(edge.ranks)


def test_long_headers_still_differ() -> None:
    first, second = to_header("x" * 2000), to_header("x" * 1999)
    assert len(first) == len(second) == HEADER_SIZE
    assert text_of(first) == text_of(second) == "x" * (HEADER_SIZE - 32)
    assert first == to_header("x" * 2000)
    assert first != second
