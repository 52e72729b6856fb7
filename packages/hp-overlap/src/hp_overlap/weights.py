"""Weight gradients of the backward side, put off until the forward side waits for counts."""

from collections.abc import Callable

from hp_platform import WeightGradQueue


class PutOffWeights:
    """What the backward of one pair at a time has put off; see Note [Turns].

    Where the forward side lends no turn, as in dense layers, those of a layer are computed when the
    next one begins: those of one layer are kept at most.
    """

    def __init__(self) -> None:
        self._queue = WeightGradQueue()
        self._num_layers = 0

    def run(self, bwd_fn: Callable[[], object]) -> None:
        """Run a backward; what is still put off at its end is computed then."""
        try:
            with self._queue.defer(None):
                bwd_fn()
            self.compute()
        finally:
            self._queue.discard(None)  # after an error

    def compute(self) -> None:
        """Compute what has been put off so far, and add it to the gradients of the parameters."""
        self._num_layers = 0
        self._queue.flush(None)

    def enter_layer(self) -> None:
        """To be called where the backward of a layer begins."""
        if self._num_layers:
            self.compute()
        self._num_layers += 1
