"""Public reports of other trainers as small training loops, each with its bug and without.

A loop is one job on two ranks, and its own reference in one process. Nothing of hp-* is in here.
"""

import datetime as dt
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from integration_tests.jobs.zoo.collectives import Copy, Gather, Reduce, ReduceSplit, summed
from integration_tests.jobs.zoo.model import world

WORDS, DIM, BATCH, LENGTH, STEPS = 20, 8, 4, 6, 3
_SECONDS = 3.0
"""Ranks wait so long for each other where a report is of ranks that do not come."""


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(WORDS, (BATCH, length), generator=generator)


def _mine(batch: Tensor, dim: int = 0) -> Tensor:
    rank, size = world()
    return batch.chunk(size, dim)[rank]


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Each token is to say the one after it in the vocabulary; a term of the batch's mean."""
    losses = F.cross_entropy(logits.flatten(0, 1), (tokens.flatten() + 1) % WORDS, reduction="sum")
    return losses / (BATCH * LENGTH)


def _reduce(*parameters: Tensor) -> None:
    for parameter in parameters if world()[1] > 1 else ():
        if parameter.grad is not None:
            parameter.grad = summed(parameter.grad)


def _updated(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _adam(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)


def _words() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(WORDS, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS)
    )


def _data() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def changing_lengths(bug: str) -> None:
    """Automodel #3530: a stage that is made anew for another length drops the step's gradients."""
    (rank, size), net, data = world(), _words(), _data()
    if size > 1:
        for index in (range(2, 4), range(2))[rank]:
            net[index] = nn.Identity()
    optimizer = _adam(net)
    for _ in range(STEPS):
        for length in (LENGTH, LENGTH - 2):
            tokens = _tokens(data, length)
            if bug and length != LENGTH:
                optimizer.zero_grad()
            if size == 1:
                _loss(net(tokens), tokens).backward()
            elif rank == 0:
                out = net(tokens)
                dist.send(out.detach(), 1)
                grad = torch.empty_like(out)
                dist.recv(grad, 1)
                out.backward(grad)
            else:
                given = torch.empty(BATCH, length, DIM)
                dist.recv(given, 0)
                _loss(net(given.requires_grad_()), tokens).backward()
                assert given.grad is not None
                dist.send(given.grad, 0)
        _updated(optimizer)


class _Scattered(nn.Module):
    """Experts of a rank for positions of all: which expert is told by the token."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS)
        self.up = nn.Parameter(torch.randn(2, DIM, DIM) * DIM**-0.5)
        self.bug = bug

    def forward(self, tokens: Tensor) -> Tensor:
        (rank, size), x = world(), self.embed(tokens)
        if size == 1:
            return self.out(x + self._experts(x, tokens, 0))
        every = Gather.apply(torch.cat((x, tokens[..., None].to(x)), -1), 1)
        ours = self._experts(every[..., :-1], every[..., -1].long(), rank)
        if self.bug:  # this rank's offset, and the index among its own: right for one sample
            back = ReduceSplit.apply(ours.flatten(0, 1), 0).view_as(x)
        else:
            back = ReduceSplit.apply(ours, 1)
        return self.out(x + back)

    def _experts(self, x: Tensor, tokens: Tensor, first: int) -> Tensor:
        outs = [
            (tokens % 2 == first + index)[..., None] * (x @ matrix.T)
            for index, matrix in enumerate(self.up)
        ]
        return torch.stack(outs).sum(0)


def scattered(bug: str) -> None:
    """torchtitan #3604: rows come back from experts to other places, beyond one sample."""
    torch.manual_seed(3)
    (rank, size), net, data = world(), _Scattered(bug), _data()
    if size > 1:
        net.up = nn.Parameter(net.up.data[rank : rank + 1].clone())
    optimizer = _adam(net)
    for _ in range(STEPS):
        tokens = _mine(_tokens(data), 1)
        _loss(net(tokens), tokens).backward()
        _reduce(net.embed.weight, net.out.weight, net.out.bias)
        _updated(optimizer)


def second_resume(bug: str) -> None:
    """torchtitan #3907: data begin anew when a run is resumed for the second time."""
    net, data = _words(), _data()
    optimizer = _adam(net)
    for step in range(STEPS):
        tokens = _mine(_tokens(data))
        _loss(net(tokens), tokens).backward()
        _reduce(*net.parameters())
        _updated(optimizer)
        kept = data.get_state()
        data = _data()
        if not (bug and step == 1):
            data.set_state(kept)


class _Tied(nn.Module):
    """Its table is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, DIM), nn.LayerNorm(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.embed(tokens)), self.embed.weight)


def tied_export(bug: str) -> None:
    """torchtitan #3764: an export's index names a head that is tied, and was not written."""
    torch.manual_seed(3)
    net, data = _Tied(), _data()
    optimizer = _adam(net)
    for step in range(STEPS):
        tokens = _mine(_tokens(data))
        _loss(net(tokens), tokens).backward()
        _reduce(*net.parameters())
        _updated(optimizer)
        if step == 1:
            written = {name: value.clone() for name, value in net.state_dict().items()}
            named = {name: name for name in written}
            if bug:
                named["lm_head.weight"] = "embed.weight"
            for name, here in named.items():
                target = net.get_parameter(here).data
                target.copy_(written.get(name, torch.zeros_like(target)))


class _Routed(nn.Module):
    """Gives logits, and the loss that balances two experts in each sequence."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(WORDS, DIM), nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, WORDS) for _ in range(2))
        self.bug = bug

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        scores = self.router(x).softmax(-1)
        logits = sum(scores[..., i : i + 1] * part(x) for i, part in enumerate(self.experts))
        grouped = scores.reshape(1, -1, 2) if self.bug else scores
        chosen = F.one_hot(grouped.argmax(-1), 2).to(scores)
        balance = 2 * (chosen.mean(1) * grouped.mean(1)).sum(-1)
        assert isinstance(logits, Tensor)
        return logits, balance.mean() * len(tokens) / BATCH


def sequence_balance(bug: str) -> None:
    """Megatron #5798, #5696: packs are flattened before experts are balanced in each sequence."""
    torch.manual_seed(3)
    net, data = _Routed(bug), _data()
    optimizer = _adam(net)
    for _ in range(STEPS):
        tokens = _mine(_tokens(data))
        logits, balance = net(tokens)
        (_loss(logits, tokens) + balance).backward()
        _reduce(*net.parameters())
        _updated(optimizer)


class _CutExperts(nn.Module):
    """Two experts whose inner rows are cut over ranks; all ranks route alike."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM)
        self.router, self.out = nn.Linear(DIM, 2), nn.Linear(DIM, WORDS)
        rows, columns = ([torch.randn(2 * DIM, DIM) * DIM**-0.5 for _ in range(2)] for _ in "ab")
        self.up = nn.ParameterList(_mine(one).clone() for one in rows)
        self.down = nn.ParameterList(_mine(one.T, 1).clone() for one in columns)
        self.bug = bug

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.attention(self.embed(tokens))
        scores, given, size = self.router(x).softmax(-1), x, world()[1]
        if size > 1 and not self.bug:
            scores, given = Copy.apply(scores), Copy.apply(x)
        pairs = enumerate(zip(self.up, self.down, strict=True))
        outs = [scores[..., i : i + 1] * (F.silu(given @ a.T) @ b.T) for i, (a, b) in pairs]
        made = outs[0] + outs[1]
        return self.out(x + (Reduce.apply(made) if size > 1 else made))


def cut_experts(bug: str) -> None:
    """torchtitan #4054: experts cut by TP give what is below them a part of its gradient."""
    torch.manual_seed(3)
    net, data = _CutExperts(bug), _data()
    optimizer = _adam(net)
    for _ in range(STEPS):
        tokens = _tokens(data)
        _loss(net(tokens), tokens).backward()
        _updated(optimizer)


def odd_buckets(bug: str) -> None:
    """Megatron #5077: padding at the end of a bucket moves the state of all that follow."""
    net, data = _words(), _data()
    optimizer = _adam(net)
    for step in range(STEPS):
        tokens = _mine(_tokens(data))
        _loss(net(tokens), tokens).backward()
        _reduce(*net.parameters())
        _updated(optimizer)
        for key in ("exp_avg", "exp_avg_sq") if step == 1 else ():
            _resharded(net, optimizer, key, bug)


def _resharded(net: nn.Module, optimizer: torch.optim.Optimizer, key: str, bug: str) -> None:
    """Save state by buckets, of which two ranks have halves, and load it whole."""
    parameters = [*net.parameters()]
    buckets, multiple = (parameters[:2], parameters[2:]), 16
    flats = [torch.cat([optimizer.state[p][key].flatten() for p in some]) for some in buckets]
    saved = torch.cat([F.pad(flat, (0, -len(flat) % multiple)) for flat in flats])
    begin = 0
    for some, flat in zip(buckets, flats, strict=True):
        at = begin
        for parameter in some:
            held = optimizer.state[parameter][key]
            held.copy_(saved[at : at + held.numel()].view_as(held))
            at += held.numel()
        begin += len(flat) + (0 if bug else -len(flat) % multiple)


class _RowParallel(nn.Module):
    """A matrix cut by columns, on rows that lie the other way round."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.embed, self.down = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False)
        self.bug = bug

    def forward(self, tokens: Tensor) -> Tensor:
        (rank, size), x = world(), self.embed(tokens)
        if size > 1:
            x = Copy.apply(x).chunk(size, -1)[rank]
        made = self.down(x).transpose(0, 1)
        if size > 1:
            made = made.transpose(0, 1).contiguous().transpose(0, 1)
            made = _Unreduced.apply(made) if self.bug else Reduce.apply(made)
        return made.transpose(0, 1)


class _Unreduced(Reduce):
    """Sums a copy, and gives what it was given."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: ARG004
        dist.all_reduce(x.contiguous())
        return x.view_as(x)


def transposed_sum(bug: str) -> None:
    """Megatron #5338: a sum over ranks goes into a contiguous copy, and is lost."""
    torch.manual_seed(3)
    net, data = _RowParallel(bug), _data()
    net.down.weight = nn.Parameter(_mine(net.down.weight.data, 1).clone())
    optimizer = _adam(net)
    for _ in range(STEPS):
        tokens = _tokens(data)
        _loss(net(tokens), tokens).backward()
        _updated(optimizer)


class _Stream(IterableDataset[Tensor]):
    """Rows one after the other, from where it is told to begin."""

    def __init__(self) -> None:
        self.first = 0

    def __iter__(self) -> Iterator[Tensor]:
        rows = torch.randint(WORDS, (BATCH * STEPS, LENGTH), generator=_data())
        yield from rows[self.first :]


def forked_data(bug: str) -> None:
    """prime-rl #3332: a worker is forked before it is told where the run was."""
    net = _words()
    optimizer, rows = _adam(net), _Stream()
    loader = DataLoader(rows, BATCH, num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    for step in range(STEPS):
        if step == 1:  # a resume
            early = iter(loader)
            rows.first = BATCH
            batches = early if bug else iter(loader)
        tokens = _mine(next(batches))
        _loss(net(tokens), tokens).backward()
        _reduce(*net.parameters())
        _updated(optimizer)


def alike_chunks(bug: str) -> None:
    """OLMo-core: the chunks that a rank has of an interleaved pipeline are drawn alike."""
    (_, size), net, data = world(), _words(), _data()
    for index, part in enumerate(net):
        drawn = torch.Generator().manual_seed(index % 2 if bug and size > 1 else index)
        for weight in part.parameters():
            weight.data = torch.randn(weight.shape, generator=drawn) * 0.3
    optimizer = _adam(net)
    for _ in range(STEPS):
        tokens = _mine(_tokens(data))
        _loss(net(tokens), tokens).backward()
        _reduce(*net.parameters())
        _updated(optimizer)


def hybrid_shard(bug: str) -> None:
    """verl #7493: FSDP1 over ranks that keep copies, and one that shards: nothing is reduced."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy  # noqa: PLC0415

    (_, size), net, data = world(), _words(), _data()
    model: nn.Module = net
    if size > 1:
        mesh = init_device_mesh("cpu", (2, 1) if bug else (1, 2), mesh_dim_names=("copy", "shard"))
        kind = ShardingStrategy.HYBRID_SHARD
        # It says that it shards nothing, and not that it reduces nothing.
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        model = FullyShardedDataParallel(
            net,
            sharding_strategy=kind,
            device_mesh=mesh,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    optimizer = _adam(model)
    for _ in range(STEPS):
        tokens = _mine(_tokens(data))
        (_loss(model(tokens), tokens) * size).backward()
        _updated(optimizer)


class _Later(nn.Module):
    """Words, of which one matrix is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.more = _words(), nn.Linear(WORDS, WORDS)

    def forward(self, tokens: Tensor, is_more: bool) -> Tensor:
        logits = self.words(tokens)
        # A copy: FSDP2 warns of modules that return views.
        return (self.more(logits) if is_more else logits).clone()


def late_gradient(bug: str) -> None:
    """Automodel #3540: a parameter whose first gradient comes in a later microbatch."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    torch.manual_seed(3)
    (_, size), net, data = world(), _Later(), _data()
    if size > 1:
        narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(net, mp_policy=narrow if bug else MixedPrecisionPolicy())
    optimizer = _adam(net)
    for _ in range(STEPS):
        for index, tokens in enumerate(_tokens(data).chunk(2)):
            if size > 1:
                model.set_requires_gradient_sync(index == 1)
            ours = _mine(tokens)
            (_loss(net(ours, index == 1), ours) * size).backward()
        _updated(optimizer)


def leftover(bug: str) -> None:
    """Automodel #3261: rank 0 refuses what a killed save has left, and the others wait."""
    (rank, size), net, data = world(), _words(), _data()
    optimizer = _adam(net)
    for step in range(STEPS):
        tokens = _mine(_tokens(data))
        _loss(net(tokens), tokens).backward()
        _reduce(*net.parameters())
        _updated(optimizer)
        if step == 1 and size > 1:
            if bug and rank == 0:
                raise FileExistsError("step-2.tmp is there already")
            summed(torch.ones(1))


def uneven_evaluation(bug: str) -> None:
    """prime-rl #2636: a rank has fewer batches to evaluate, and is waited for in the next."""
    (rank, size), net, data = world(), _words(), _data()
    optimizer = _adam(net)
    group = None
    if size > 1:
        group = dist.new_group(timeout=dt.timedelta(seconds=_SECONDS))
    for step in range(STEPS):
        tokens = _mine(_tokens(data))
        _loss(net(tokens), tokens).backward()
        _reduce(*net.parameters())
        _updated(optimizer)
        for _ in range(2 - (bug != "" and rank == 1) if step == 1 else 0):
            with torch.no_grad():
                loss = _loss(net(tokens), tokens)
            if size > 1:
                dist.all_reduce(loss, group=group)


LOOPS: dict[str, Callable[[str], None]] = {
    loop.__name__.replace("_", "-"): loop
    for loop in (
        changing_lengths,
        scattered,
        second_resume,
        tied_export,
        sequence_balance,
        cut_experts,
        odd_buckets,
        transposed_sum,
        forked_data,
        alike_chunks,
        hybrid_shard,
        late_gradient,
        leftover,
        uneven_evaluation,
    )
}
