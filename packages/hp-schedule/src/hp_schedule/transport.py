"""How values get from one rank to another: the seam between a schedule and a network.

The torch runtime ships one implementation (`hp_schedule.runtime.TorchTransport`); other ones, for
example between stages with different numbers of ranks, implement the same protocol.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    """One value on its way along a directed edge.

    Attributes:
        source: Rank of the pipeline that sends.
        destination: Rank of the pipeline that receives.
        stage_index: The stage that reads the value.
        microbatch_index: Of which microbatch.
        is_gradient: Whether the value is the gradient of the stage's output, otherwise its input.
    """

    source: int
    destination: int
    stage_index: int
    microbatch_index: int
    is_gradient: bool

    def __str__(self) -> str:
        what = "output gradient" if self.is_gradient else "input"
        return (
            f"{what} of stage {self.stage_index}, microbatch {self.microbatch_index}, "
            f"rank {self.source} -> rank {self.destination}"
        )


class Transport(Protocol[T]):
    """Moves messages. Each is sent once and received once, in one order on every directed edge."""

    def send(self, message: Message, value: T) -> None:
        """Start to send; the value must not be written until it has arrived."""
        ...

    def post_receive(self, message: Message, buffer: T) -> None:
        """Start to receive into a buffer."""
        ...

    def wait_receive(self, message: Message) -> T:
        """Return the value of a posted receive once it is there."""
        ...

    def release_send(self, message: Message) -> None:
        """Let go of a sent value: the schedule says that the other side has it."""
        ...

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        ...

    def abort(self) -> None:
        """Give up after an error, so that the other ranks fail instead of waiting."""
        ...
