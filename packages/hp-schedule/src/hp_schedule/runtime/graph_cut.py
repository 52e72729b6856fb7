"""Split the backward of modules that know nothing of it, by cutting their autograd graph.

Nodes whose parameters meet behind the cut (a shared parameter, a transposed weight used twice) are
run together, so that each parameter gets one gradient, as in a whole backward.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hp_schedule.runtime.stage import Grads, WeightBackward, full_backward, nothing

_UNSPLITTABLE: Final = {
    # One node for a whole compiled region; it frees what it saved when it runs first.
    "CompiledFunctionBackward",
    # A reentrant checkpoint runs a backward of its own, with everything in it.
    "CheckpointFunctionBackward",
}


class GraphCuttingSplitter:
    """Splits the backward of any module.

    Take the nodes from which an input of the stage can be reached: the first half of the backward
    runs those, and autograd skips what they would compute for anybody else. Every edge that leaves
    this set leads to parameters only. The second half runs the nodes at such edges once more, each
    with the gradients it got in the first half, now for the edges that were skipped, and then what
    lies behind them. So an operation with inputs and parameters has its backward called twice, but
    computes everything once.

    Right for shared parameters, several outputs, inputs that nothing depends on and gradients that
    do not reach everything. Without inputs that require grad, at the start of a pipeline, the
    first half is empty and the second the whole backward.

    The other way round, everything in the first half, where a cut would cost more than it gains:
    in modules with a region compiled by `torch.compile`, and in modules that recompute activations
    (`torch.utils.checkpoint`), where each half would recompute. That submodules are recomputed is
    seen the first time, whose second half recomputes once more; functions that are recomputed and
    call no submodule are not seen, and each piece of the second half recomputes. For such modules
    see `defer_weight_gradients`, which splits without cutting.

    Activations live until the second half is done. Hooks of tensors change a gradient once, as in a
    whole backward, but like those of modules and autograd nodes they may be called in both halves.
    """

    def __init__(self) -> None:
        self._recomputing: WeakSet[nn.Module] = WeakSet()

    def split_backward(
        self,
        module: nn.Module,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        inputs: Sequence[Tensor],
    ) -> tuple[Grads, WeightBackward]:
        """Run the first half; see `hp_schedule.runtime.BackwardSplitter`."""
        if not inputs:
            return (), partial(full_backward, outputs, grads, inputs=())
        graph = _Graph(outputs, inputs)
        if module in self._recomputing or not graph.is_splittable:
            return full_backward(outputs, grads, inputs=inputs), nothing
        ends = list(zip(outputs, grads, strict=True))
        early = [(x, grad) for x, grad in ends if get_gradient_edge(x).node in graph.early]
        late = [(get_gradient_edge(x), grad) for x, grad in ends]
        pieces = graph.pieces([end for end in late if end[0].node not in graph.early])
        nodes = [node for piece in pieces for node in piece.nodes]
        with _recording_recompute(module) as recomputes, _capturing(nodes) as captured:
            found = _grad(early, inputs)
        if recomputes:
            self._recomputing.add(module)
            pieces = [_merged(pieces)]
        return found, partial(_run_pieces, pieces, captured, owners=[edge for edge, _ in late])


@dataclass(slots=True)
class _Piece:
    """Nodes at the cut, and outputs behind it, whose parameters are computed together."""

    nodes: list[Node] = field(default_factory=list)
    cut: dict[tuple[Node, int], GradientEdge] = field(default_factory=dict)
    ends: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)


class _Graph:
    """The autograd graph of a stage.

    Attributes:
        early: The nodes from which an input can be reached.
    """

    def __init__(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        parents: dict[Node, list[Node]] = {get_gradient_edge(x).node: [] for x in outputs}
        stack = list(parents)
        while stack:
            node = stack.pop()
            for child in _children(node):
                if child not in parents:
                    parents[child] = []
                    stack.append(child)
                parents[child].append(node)
        self._nodes = list(parents)
        self.early = {get_gradient_edge(x).node for x in inputs} & parents.keys()
        stack = list(self.early)
        while stack:
            fresh = set(parents[stack.pop()]) - self.early
            self.early |= fresh
            stack += fresh

    @property
    def is_splittable(self) -> bool:
        return not any(node.name() in _UNSPLITTABLE for node in self._nodes)

    def pieces(self, ends: Sequence[tuple[GradientEdge, Tensor]]) -> list[_Piece]:
        """Return the nodes of the second half in groups, in the order from outputs to inputs.

        Args:
            ends: Outputs that are not early, with their gradients.
        """
        leaders: dict[Node, Node] = {}
        for node in self._nodes:
            for child in _children(node):
                if child not in self.early:
                    leaders[_leader(leaders, node)] = _leader(leaders, child)
        pieces: dict[Node, _Piece] = {}
        for node in self._nodes:
            if node in self.early:
                late = [e for e in node.next_functions if e[0] and e[0] not in self.early]
                if late:
                    piece = pieces.setdefault(_leader(leaders, node), _Piece())
                    piece.nodes.append(node)
                    piece.cut |= {(c, i): GradientEdge(c, i) for c, i in late if c is not None}
        for edge, grad in ends:
            pieces.setdefault(_leader(leaders, edge.node), _Piece()).ends.append((edge, grad))
        return list(pieces.values())


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _leader(leaders: dict[Node, Node], node: Node) -> Node:
    while (above := leaders.setdefault(node, node)) is not node:
        leaders[node] = leaders[above]
        node = above
    return node


def _merged(pieces: Iterable[_Piece]) -> _Piece:
    merged = _Piece()
    for piece in pieces:
        merged.nodes += piece.nodes
        merged.cut |= piece.cut
        merged.ends += piece.ends
    return merged


@contextmanager
def _hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@contextmanager
def _capturing(nodes: Iterable[Node]) -> Iterator[dict[Node, Grads]]:
    """Collect the gradients that nodes get while the context is open."""
    captured: dict[Node, Grads] = {}
    keep = captured.__setitem__
    with _hooked(node.register_prehook(partial(keep, node)) for node in nodes):
        yield captured


def _replaying(captured: Mapping[Node, Grads]) -> AbstractContextManager[None]:
    """Give nodes the gradients that they got in the first half, whatever reaches them now.

    Hooks of tensors, which ran then, and other nodes at the cut would change them again.
    """
    return _hooked(
        node.register_prehook(partial(_instead, grads)) for node, grads in captured.items()
    )


def _instead(grads: Grads, _given: Grads) -> object:
    return grads


@contextmanager
def _recording_recompute(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Note which submodules run forward in this thread."""
    seen: list[nn.Module] = []
    me = threading.get_ident()

    def note(submodule: nn.Module, _args: object) -> None:
        if threading.get_ident() == me:
            seen.append(submodule)

    with _hooked(submodule.register_forward_pre_hook(note) for submodule in module.modules()):
        yield seen


def _grad(ends: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Grads:
    """Compute the gradients of inputs alone and keep the graph."""
    if not ends:
        return (None,) * len(inputs)
    outputs, grads = zip(*ends, strict=True)
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)


def _run_pieces(
    pieces: list[_Piece], captured: dict[Node, Grads], *, owners: list[GradientEdge]
) -> None:
    """Run the second half.

    Args:
        pieces: Emptied on the way.
        captured: The gradients of nodes at the cut; emptied too.
        owners: The edges of the outputs, let go of at the end: a node written in Python does not
            keep the graph behind it alive.
    """
    # Pieces of several nodes first: between two of theirs may lie nodes of others, whose saved
    # tensors are gone once they have run on their own.
    pieces.sort(key=lambda piece: len(piece.nodes) < 2)
    with torch.autograd.set_multithreading_enabled(False):
        while pieces:
            piece = pieces.pop(0)
            reached = {node: captured.pop(node) for node in piece.nodes if node in captured}
            _run_piece(piece, reached)
    owners.clear()


def _run_piece(piece: _Piece, captured: Mapping[Node, Grads]) -> None:
    """Compute the gradients of one piece's parameters and accumulate them.

    Args:
        piece: Piece to run.
        captured: The gradients of its nodes, as far as any reached them.
    """
    starts = [
        (GradientEdge(node, index), grad)
        for node, grads in captured.items()
        for index, grad in enumerate(grads)
        if grad is not None
    ]
    if len(captured) == 1 and not piece.ends:
        with _replaying(captured):
            _backward(starts, inputs=[GradientEdge(leaf, 0) for leaf in _leaves(piece.cut)])
        return
    with _replaying(captured), _collecting(piece) as ends:
        if starts:
            # What arrives at these edges is the sum over all nodes; `ends` has each one's part.
            edges, grads = zip(*starts, strict=True)
            cut = list(piece.cut.values())
            torch.autograd.grad(edges, cut, grads, retain_graph=True, allow_unused=True)
    _backward([*piece.ends, *ends])


def _backward(
    ends: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[GradientEdge] | None = None
) -> None:
    if ends:
        edges, grads = zip(*ends, strict=True)
        torch.autograd.backward(edges, grads, inputs=inputs)


def _leaves(cut: Iterable[tuple[Node, int]]) -> list[Node]:
    """Return the nodes that accumulate gradients behind a cut."""
    seen = dict.fromkeys(node for node, _ in cut)
    stack = list(seen)
    while stack:
        fresh = [child for child in _children(stack.pop()) if child not in seen]
        seen.update(dict.fromkeys(fresh))
        stack += fresh
    return [node for node in seen if not node.next_functions]


@contextmanager
def _collecting(piece: _Piece) -> Iterator[list[tuple[GradientEdge, Tensor]]]:
    """Collect the gradients that the nodes of a piece send across the cut."""
    found: list[tuple[GradientEdge, Tensor]] = []

    def collect(node: Node, grads: Grads, _given: Grads) -> None:
        for (child, index), grad in zip(node.next_functions, grads, strict=True):
            if child is not None and grad is not None and (child, index) in piece.cut:
                found.append((piece.cut[child, index], grad))

    with _hooked(node.register_hook(partial(collect, node)) for node in piece.nodes):
        yield found
