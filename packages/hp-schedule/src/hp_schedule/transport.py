"""Transport of values from one rank to another: the seam between a schedule and a network.

The torch runtime ships one implementation (`hp_schedule.runtime.TorchTransport`); other ones, for
example between stages with different numbers of ranks, implement the same protocol.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

T = TypeVar("T")


class MessageKind(StrEnum):
    """The content of a message; the value names it in errors."""

    INPUT = "input"
    OUTPUT_GRADIENT = "output gradient"
    HEADER = "header of the input"
    REQUEST = "expectations"


@dataclass(frozen=True, slots=True)
class Message:
    """One value on its way along a directed edge; equal messages are one message.

    Attributes:
        source: Rank of the pipeline that sends.
        destination: Rank of the pipeline that receives.
        stage_index: The stage whose input, output gradient, or header of an input it is; for a
            request the stage that expects.
        microbatch_index: Index of the microbatch; 0 for a request.
        kind: An input, a gradient, the header that tells the shapes of an input ahead of it, or
            the request that tells the stage before, once, what a stage expects of every input.
    """

    source: int
    destination: int
    stage_index: int
    microbatch_index: int
    kind: MessageKind

    @property
    def edge(self) -> tuple[int, int]:
        """Return source and destination."""
        return self.source, self.destination

    def __str__(self) -> str:
        return (
            f"{self.kind} of stage {self.stage_index}, microbatch {self.microbatch_index}, "
            f"rank {self.source} -> rank {self.destination}"
        )


class Transport(Protocol[T]):
    """Moves messages. Each is sent once and received once, in one order on every directed edge.

    The runtime's values are tuples of tensors. Several threads may call at once, never for the
    receives of one edge.
    """

    def send(self, message: Message, value: T) -> None:
        """Start to send; the value must not be written until it has arrived."""

    def post_receive(self, message: Message, buffer: T) -> None:
        """Start to receive into a buffer."""

    def wait_receive(self, message: Message) -> T:
        """Return the value of a posted receive once it is there."""

    def release_send(self, message: Message) -> None:
        """Let go of a sent value: the schedule says that the other side has it."""

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""

    def abort(self, error: BaseException) -> BaseException:
        """Give up after an error, so that the other ranks fail instead of waiting.

        Args:
            error: Error of this rank.

        Returns:
            The exception that this rank is to raise: the error, or one that names the rank that
            failed first.
        """
