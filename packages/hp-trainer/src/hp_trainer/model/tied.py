"""An embedding that is also the output matrix, where the first and the last stage are apart.

Both stages have the table under its one global name, so it starts the same on both, is cut the same
and is one tensor in a checkpoint. On two ranks, each has a copy; the gradients of both are summed
over the pair, last of all sums, so that both add the same two numbers and the copies stay equal bit
for bit. On one rank, as in schedules that go there and back, both stages have the same memory, or,
where FSDP shards each stage by itself, a copy that is written after every update. There too each
stage has a gradient of its own, and they are added when all microbatches are done: whose turn comes
when is the schedule's, and sums in another order are other numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_platform import new_group
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.stage import Stage


def tied_group(
    places: Sequence[int],
    members: Sequence[Sequence[int]],
    *,
    backend: str,
    timeout: timedelta,
) -> ProcessGroup | None:
    """Build the groups of ranks that have copies of an embedding. All ranks call it together.

    Args:
        places: Place in the pipeline of the rank of each stage.
        members: Global ranks of each place; the first and the last one have as many of each axis.
        backend: Backend of the groups.
        timeout: Time limit of their collectives.

    Returns:
        This rank's; None if it has no copy, or the only one.
    """
    ends = sorted({places[0], places[-1]})
    if len(ends) == 1:
        return None
    pairs = list(zip(*(members[place] for place in ends), strict=True))
    return new_group(pairs, name="tied embeddings", backend=backend, timeout=timeout)


def share_tables(first: Stage, last: Stage, names: Iterable[str]) -> None:
    """Let two stages of one rank have tables in one memory, unless FSDP shards each by itself.

    Args:
        first: First stage.
        last: Last stage.
        names: Global names of the tables.
    """
    for name in names:
        table, copy = first.get_parameter(name), last.get_parameter(name)
        if isinstance(table, DTensor):
            continue
        shared = nn.Parameter(table.detach())
        for module in last.modules():
            for leaf, parameter in [*module.named_parameters(recurse=False)]:
                if parameter is copy:  # wherever a module has it
                    setattr(module, leaf, shared)


def merge_copies(
    parameters: Iterable[Parameter], tied: Iterable[str], tied_ranks: ProcessGroup | None
) -> list[Parameter]:
    """List every parameter of a rank once, however many of its stages have it.

    Args:
        parameters: Parameters of all stages.
        tied: Global names of what the first and the last stage both have.
        tied_ranks: Ranks with copies of it.
    """
    known: dict[str, Parameter] = {}
    for parameter in parameters:
        first = known.setdefault(parameter.name, parameter)
        if parameter.tensor is not first.tensor:
            known[parameter.name] = replace(
                first, tied_copies=(*first.tied_copies, parameter.tensor)
            )
    for name in known.keys() & {*tied}:
        known[name] = replace(known[name], tied_ranks=tied_ranks)
    return list(known.values())
