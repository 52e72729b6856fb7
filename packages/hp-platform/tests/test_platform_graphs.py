"""Functions that stay outside of compiled graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from hp_platform import outside_graph


@outside_graph
def largest(x: Tensor, *, plus: int = 0) -> int:
    """Depends on data, so no graph could contain it."""
    return int(x.max().item()) + plus


def block(x: Tensor) -> Tensor:
    return (x + 1) * largest(x, plus=1) + x


def test_graphs_are_cut_once_where_the_function_is_called() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        del example
        graphs.append(graph)
        return graph

    compiled = torch.compile(block, backend=count, dynamic=True)
    for size in (3, 5, 8, 13):
        x = torch.arange(float(size))
        assert torch.equal(compiled(x), block(x))
    assert len(graphs) == 2
    assert not any("max" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_as_many_functions_as_one_likes_stay_outside() -> None:
    """torch compiles a code object eight times at most; what is left then runs compiled inside."""
    inside = []

    def made(number: int) -> Callable[[Tensor], Tensor]:
        @outside_graph
        def add(x: Tensor) -> Tensor:
            inside.append(torch.compiler.is_compiling())
            return x + number

        return add

    for number in range(12):
        function = made(number)
        compiled = torch.compile(lambda x, f=function: f(2 * x) * 2, backend="eager")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0 + 2 * number))
    assert not any(inside)
    assert torch._dynamo.utils.counters["graph_break"]
    assert made(0).__code__ is not made(1).__code__
