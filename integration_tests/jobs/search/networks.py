"""A small network whose parts can be shared, frozen, left out or taken in turn; its training."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from integration_tests.jobs.search.tensors import error_of, generator, whole

WORDS, WIDTH, ROWS, LENGTH = 10, 6, 2, 3


class Block(nn.Module):
    """Two layers around which the inputs go, with experts of which a microbatch takes one.

    Args:
        kind: Kind of the network.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 5 if kind == "uneven" else 8)
        self.down = nn.Linear(5 if kind == "uneven" else 8, WIDTH)
        if "expert" in kind:
            self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])

    def forward(self, inputs: Tensor, microbatch: int = 0) -> Tensor:
        """Return what the next block is given."""
        out: Tensor = self.down(torch.tanh(self.up(self.norm(inputs))))
        if self.kind == "experts in turn":
            out = out + self.experts[microbatch % 2](inputs)
        elif self.kind == ("expert last" if microbatch else "expert first"):
            out = out + self.experts[0](inputs)
        return inputs + out


class Network(nn.Module):
    """Words, blocks and a head.

    Args:
        kind: What is not as usual: one of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight
        if kind == "shared block":
            self.blocks[2] = self.blocks[0]
        if kind == "shared matrix":
            self.block(2).up.weight = self.block(0).up.weight
        if kind == "frozen table":
            self.table.requires_grad_(False)
        if kind == "frozen matrices":
            for block in self.blocks:
                assert isinstance(block, Block)
                block.up.requires_grad_(False)
        if kind == "unused":
            self.unused = nn.Linear(WIDTH, WIDTH)
        if kind == "buffer":
            self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        if kind == "double bias":
            self.block(1).up.bias.data = self.block(1).up.bias.data.float()

    def block(self, index: int) -> Block:
        """Return a block."""
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def forward(self, words: Tensor, microbatch: int = 0) -> Tensor:
        """Return scores of words.

        Args:
            words: Words, [rows, length].
            microbatch: Number of the microbatch.
        """
        hidden = self.table(words)
        if self.kind == "buffer":
            hidden = hidden * self.get_buffer("scale")
        for index, block in enumerate(self.blocks):
            if self.kind == "block first" and index == 1 and microbatch > 0:
                continue
            if self.kind == "block last" and index == 1 and microbatch == 0:
                continue
            if self.kind == "blocks in turn" and index == 1 + microbatch % 2:
                continue
            if self.kind == "checkpointed":
                hidden = checkpoint(block, hidden, microbatch, use_reentrant=False)
            else:
                hidden = block(hidden, microbatch)
            if self.kind == "twice" and index == 1:
                hidden = block(hidden, microbatch)
        scores: Tensor = self.head(hidden)
        return scores


KINDS = (
    "plain",
    "uneven",
    "tied",
    "shared block",
    "shared matrix",
    "frozen table",
    "frozen matrices",
    "unused",
    "buffer",
    "twice",
    "checkpointed",
    "block first",
    "block last",
    "blocks in turn",
    "experts in turn",
    "expert first",
    "expert last",
)


def batch_of(step: int, microbatch: int, rank: int) -> Tensor:
    """Return the words of a rank's microbatch, [rows, length + 1]."""
    seed = generator(1000 * step + 100 * microbatch + rank)
    return torch.randint(WORDS, (ROWS, LENGTH + 1), generator=seed)


def loss_of(model: nn.Module, words: Tensor, microbatch: int = 0) -> Tensor:
    """Return the mean cross-entropy of the next words."""
    scores = model(words[:, :-1], microbatch)
    return F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def expected(
    kind: str,
    ranks: int,
    microbatches: int,
    steps: int,
    update: Callable[[nn.Module], torch.optim.Optimizer],
) -> Iterator[dict[str, Tensor | None]]:
    """Train in one process, and yield gradients and then weights of each step.

    Args:
        kind: Kind of the network.
        ranks: Number of ranks whose losses are averaged.
        microbatches: Microbatches of a step, whose losses are averaged.
        steps: Number of updates.
        update: Function that makes the optimizer.
    """
    model = Network(kind)
    optimizer = update(model)
    for step in range(steps):
        for microbatch in range(microbatches):
            for rank in range(ranks):
                loss = loss_of(model, batch_of(step, microbatch, rank), microbatch)
                (loss / (ranks * microbatches)).backward()
        yield gradients(model)
        optimizer.step()
        yield weights(model)
        optimizer.zero_grad()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return whole gradients by name."""
    named = model.named_parameters()
    return {_plain(n): None if p.grad is None else whole(p.grad) for n, p in named}


def weights(model: nn.Module) -> dict[str, Tensor | None]:
    """Return whole weights by name."""
    return {_plain(name): whole(parameter) for name, parameter in model.named_parameters()}


def _plain(name: str) -> str:
    return name.replace("module.", "").replace("_checkpoint_wrapped_module.", "")


def differences(
    seen: Sequence[dict[str, Tensor | None]], wanted: Sequence[dict[str, Tensor | None]]
) -> dict[str, float]:
    """Return the errors of gradients and weights, by step."""
    errors = {}
    for number, (mine, theirs) in enumerate(zip(seen, wanted, strict=True)):
        phase = f"step {1 + number // 2} {'weight' if number % 2 else 'gradient'}"
        for name in sorted({*mine, *theirs}):
            errors[f"{phase} {name}"] = error_of(mine.get(name), theirs.get(name))
    return errors
