"""Purposes of device memory, derived from a trace. No torch.

The program labels parameters and the state of the optimizer (`hp_train.dry_run.rehearsal`). Other
labels follow from the operators on a block: targets of gathers of FSDP, sources of its gradient
buffers, operands of exchanges, casts of parameters. Blocks without another label that are alive
when gradients are about to be summed over replicas are gradients. Logits are recognised by their
width, tiles of logits also by the place that allocates them.
"""

from collections.abc import Collection, Iterator

from hp_dry.trace import Allocate, Collective, Event, Label, Launch, Release, Trace

PARAMETERS, GATHERED, CASTS = "parameters", "gathered parameters", "casts"
GRADIENTS, EXCHANGE, LOGITS = "gradients", "exchange buffers", "logits"
REDUCTION = "gradient reduction"
"""Place of `hp_trainer.training.trainer.Trainer` when gradients are complete on every rank."""


def add_labels(
    trace: Trace,
    *,
    logits_width: int = 0,
    tile_widths: Collection[int] = (),
    loss_place: str = "loss",
) -> None:
    """Append labels to a trace, for blocks without a label.

    Args:
        trace: Trace of one rank.
        logits_width: Tokens of the vocabulary whose logits this rank computes; 0: not known.
        tile_widths: Widths of the tiles of the loss, if it has tiles.
        loss_place: Word for the place where the program computes tiles of the loss.
    """
    found = _Labels(logits_width, tile_widths, loss_place)
    for event in trace.events:
        found.see(event)
    trace.events += found.labels()


class _Labels:
    def __init__(self, logits_width: int, tile_widths: Collection[int], loss_place: str) -> None:
        self._logits_width, self._tile_widths = logits_width, tile_widths
        self._loss_place = loss_place
        self._given: dict[int, str] = {}
        self._found: dict[int, str] = {}
        self._alive: dict[int, Allocate] = {}
        self._is_reducing = False

    def labels(self) -> Iterator[Event]:
        """Yield the derived labels, for blocks without a label."""
        for block, kind in self._found.items():
            if block not in self._given:
                yield Label(block, kind)

    def see(self, event: Event) -> None:
        """Process the next event."""
        self._see_reduction(event)
        if isinstance(event, Allocate):
            self._alive[event.block] = event
            if self._are_logits(event):
                self._found.setdefault(event.block, LOGITS)
        elif isinstance(event, Release):
            self._alive.pop(event.block, None)
        elif isinstance(event, Label):
            self._given[event.block] = event.kind
        elif isinstance(event, Collective):
            self._see_collective(event)
        elif isinstance(event, Launch):
            self._see_launch(event)

    def _are_logits(self, event: Allocate) -> bool:
        width = event.shape[-1] if len(event.shape) > 1 else 0
        in_tile = self._loss_place in event.place.split(", ") and width in self._tile_widths
        return width > 0 and (width == self._logits_width or in_tile)

    def _see_reduction(self, event: Event) -> None:
        is_reducing = REDUCTION in event.place
        if is_reducing and not self._is_reducing:
            for block in self._alive:
                self._found.setdefault(block, GRADIENTS)
        self._is_reducing = is_reducing

    def _see_collective(self, event: Collective) -> None:
        if event.op == "all_to_all":
            self._set((*event.reads, *event.writes), EXCHANGE)
        elif event.op == "reduce_scatter" and any(
            self._kind(block) == GRADIENTS for block in event.reads
        ):
            self._set(event.writes, GRADIENTS)

    def _see_launch(self, event: Launch) -> None:
        if event.what.startswith(("fsdp.all_gather", "fsdp.split_with_sizes")):
            self._set(event.writes, GATHERED)
        elif event.what.startswith("fsdp.chunk_cat"):
            self._set((*event.reads, *event.writes), GRADIENTS)
        elif "_to_copy" in event.what and event.reads and event.writes:
            kinds = {self._kind(block) for block in event.reads if block not in event.writes}
            if kinds and kinds <= {PARAMETERS, GATHERED}:
                self._set(event.writes, CASTS)

    def _kind(self, block: int) -> str:
        return self._given.get(block) or self._found.get(block, "")

    def _set(self, blocks: tuple[int, ...], kind: str) -> None:
        for block in blocks:
            self._found[block] = kind
