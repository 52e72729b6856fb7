"""Listens to a program that knows nothing of it: torch's global hooks, and three calls of torch.

Note [Steps of a job]. A step ends with an update: the next call of a root module with gradients
begins another. A root module is one with parameters that no other module calls. What runs inside a
backward is recomputation, and was recorded before. Steps are counted over all launches of a job,
see Note [Launches of a job].
"""

import atexit
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from hp_train.base._internals import in_backward
from hp_train.jobs import events as ev
from hp_train.jobs.calls import around, kwargs_of_call
from hp_train.jobs.disturbing import disturb
from hp_train.jobs.events import Event, Log, Number, Rows
from hp_train.jobs.launches import Launches
from hp_train.jobs.lifting import lift
from hp_train.jobs.names import Renaming, plain
from hp_train.jobs.parts import Reference, Slice, placed
from hp_train.jobs.request import Request, requested
from hp_train.jobs.samples import Samples, batch_of, tensors_in
from hp_train.jobs.sketch import Digest
from hp_train.jobs.weights import keep_weights, read_weights, take_weights


def begin() -> "Recorder":
    """Record this process, as the command has asked; what it has recorded is written at its end."""
    request = requested()
    torch.manual_seed(request.seed)
    random.seed(request.seed)
    if request.float64:
        lift()
    if request.disturb:
        disturb(request.disturb)
    recorder = Recorder(request)
    recorder.listen()
    return recorder


@dataclass(slots=True)
class _Call:
    """A call of a root module that is under way in a thread."""

    root: nn.Module | None = None
    stack: list[nn.Module] = field(default_factory=list)
    phase: str = ev.FORWARD
    index: int = 0
    samples: Samples | None = None


@dataclass(slots=True)
class _Tensor:
    """A tensor to be written down when the step ends."""

    step: int
    phase: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    digests: list[Digest]
    call: int = 0
    note: str = ""
    may_add: bool = False


class Recorder:
    """What one process of a job computes.

    Args:
        request: What is asked of it.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._step, self._has_updated, self._is_clipped = 1, False, False
        self._calls = threading.local()
        self._lock = threading.RLock()
        self._roots: dict[int, nn.Module] = {}
        self._modules: dict[int, str] = {}
        self._slices: dict[int, list[Slice]] = {}
        self._names: dict[int, str] = {}
        self._terms: set[str] = set()
        self._reference: Reference | None = None
        self._log: Log | None = None
        self._known = ev.batches(Path(request.reference)) if request.reference else None
        self._tensors: list[_Tensor] = []
        self._numbers: Counter[str] = Counter()
        self._times: Counter[tuple[str, str]] = Counter()
        self._root_calls = 0
        self._launches: Launches | None = None
        self._hooks: list[RemovableHandle] = []

    def listen(self) -> None:
        """Register all hooks."""
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._before_update),
            optimizers.register_optimizer_step_post_hook(self._after_update),
        ]
        around(torch.autograd, "backward", before=lambda loss, *_, **__: self._losses(loss))
        for place in (nn.utils, nn.utils.clip_grad):
            around(place, "clip_grad_norm_", before=self._before_clipping, after=self._clipped)
        around(nn.utils, "clip_grads_with_norm_", before=self._before_scaling)
        atexit.register(self.flush)

    def leave(self) -> Request:
        """Listen no more: something else records this process. Returns what is asked of it."""
        asked, self._request = self._request, replace(self._request, steps=0)
        for hook in self._hooks:
            hook.remove()
        return asked

    # Modules.

    def _call(self) -> _Call:
        if not hasattr(self._calls, "call"):
            self._calls.call = _Call()
        call: _Call = self._calls.call
        return call

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        call = self._call()
        if not call.stack:
            has_weights = next(module.parameters(), None) is not None
            call.root = module if has_weights else None
            if has_weights:
                self._begin(call, module, args, kwargs_of_call())
        call.stack.append(module)

    def _begin(
        self, call: _Call, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a call of a root module, and perhaps a step."""
        call.phase = ev.FORWARD if torch.is_grad_enabled() else ev.EVALUATION
        with self._lock:
            if self._launches is None:
                self._launches = Launches(Path(self._request.folder), _rank())
                self._step += self._launches.steps
            if self._has_updated and torch.is_grad_enabled():
                self.flush()
                self._step, self._has_updated, self._is_clipped = self._step + 1, False, False
                self._numbers.clear()
                self._times.clear()
                self._root_calls = 0
            if id(root) not in self._roots:
                self._roots[id(root)] = root
                self._learn(root)
            call.index = self._root_calls
            self._root_calls += 1
        batch = batch_of(args, kwargs)
        call.samples = None
        if batch is not None:
            known = {} if self._known is None else self._known.get(self._place(call.phase), {})
            call.samples = Samples(batch, call.index, known)

        if call.samples is not None and self._is_wanted(call.phase):
            self._write(call.samples.rows(self._place(call.phase), call.phase))

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        call = self._call()
        while call.stack and call.stack.pop() is not module:
            pass
        if call.root is None or not self._is_wanted(call.phase) or not self._request.outputs:
            return
        name = self._modules.get(id(module))
        if name is None:
            return
        for path, tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.ndim > 0:
                self._output(call, f"{name}{':' if path else ''}{path}", tensor)

    def _output(self, call: _Call, name: str, tensor: Tensor) -> None:
        """Note down what a module gives, and later the gradient of it."""
        with self._lock:
            count = self._times[call.phase, f"{call.index} {name}"]
            self._times[call.phase, f"{call.index} {name}"] += 1
        name = f"{name}#{count}" if count else name
        samples, index = call.samples, call.index
        self._sample(call.phase, name, tensor, samples, index)
        if tensor.requires_grad and call.phase == ev.FORWARD:
            tensor.register_hook(lambda grad: self._sample(ev.BACKWARD, name, grad, samples, index))

    def _sample(
        self, phase: str, name: str, tensor: Tensor, samples: Samples | None, index: int
    ) -> None:
        """Note down a tensor that is made of samples."""
        laid = None if samples is None else samples.digest(tensor)
        if laid is None:
            note = "not made of samples" if samples else "no batch was seen"
            entry = _Tensor(
                self._place(phase), phase, name, tuple(tensor.shape), tensor.dtype, [], index, note
            )
        else:
            shape, digests = laid
            adds = phase == ev.BACKWARD or name in self._terms
            entry = _Tensor(
                self._place(phase), phase, name, shape, tensor.dtype, digests, index, may_add=adds
            )
        with self._lock:
            self._tensors.append(entry)

    # Parameters.

    def _learn(self, root: nn.Module) -> None:
        """Learn what a root module's parameters are, and what its modules are called."""
        named = {plain(name): p for name, p in root.named_parameters(remove_duplicate=True)}
        folder = Path(self._request.reference)
        renaming = Renaming(())
        assert self._launches is not None
        known = self._launches.recall(named)
        if known is not None:
            slices = known
            renaming = Renaming((name, some[0].name) for name, some in slices.items() if some)
        elif self._request.reference:
            if self._reference is None:
                self._reference = Reference(read_weights(folder))
            slices, renaming = self._reference.find(named)
            if self._request.start:
                take_weights(named, slices, self._reference.weights)
        else:
            slices = {name: _own(name, parameter) for name, parameter in named.items()}
            keep_weights(Path(self._request.folder), _rank(), named)
        self._launches.remember({name: slices.get(name, []) for name in named})
        for name, parameter in named.items():
            self._names[id(parameter)] = renaming(name)
            self._slices[id(parameter)] = slices.get(name, [])
        for some in slices.values():
            self._terms.update(
                part.name.rpartition(".")[0] for part in some if _is_of_columns(part)
            )
        innermost = {plain(name): id(module) for name, module in root.named_modules()}
        for name, module in innermost.items():  # of wrappers and what they wrap, the latter
            self._modules.setdefault(module, renaming(name))
        if not self._launches.steps:
            self._parameters(ev.START, ((p, p) for p in named.values()))

    def _parameters(self, phase: str, values: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Note down what parameters have: parameter, value of its shape and placement."""
        for parameter, value in values:
            slices, name = self._slices.get(id(parameter)), self._names.get(id(parameter))
            if value is None or name is None:
                continue
            local = value.to_local() if isinstance(value, DTensor) else value
            if not slices:
                note = "" if local.numel() == 0 else "not found among the reference's"
                if note:
                    self._tensors.append(
                        _Tensor(
                            self._step, phase, name, tuple(value.shape), value.dtype, [], 0, note
                        )
                    )
                continue
            if isinstance(value, DTensor) and any(p.is_partial() for p in value.placements):
                assert isinstance(parameter, DTensor)
                local = value.redistribute(placements=parameter.placements).to_local()
            for part in slices:
                digest = part.digest(local.detach())
                self._tensors.append(
                    _Tensor(self._step, phase, part.name, part.shape, value.dtype, [digest])
                )

    # Losses, norms, updates.

    def _losses(self, losses: Any) -> None:
        if not self._is_wanted() or in_backward():
            return
        for loss in losses if isinstance(losses, tuple | list) else [losses]:
            if isinstance(loss, Tensor) and loss.numel() == 1:
                self._number(ev.LOSS, float(loss.detach()))

    def _before_clipping(self, parameters: Any, *_args: Any, **_kwargs: Any) -> None:
        if not self._is_wanted():
            return
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        with self._lock:
            self._parameters(ev.GRADIENT, ((p, p.grad) for p in listed))
            self._is_clipped = True

    def _before_scaling(
        self, parameters: Any, _max_norm: Any, total_norm: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        self._before_clipping(parameters)
        self._clipped(total_norm)

    def _clipped(self, norm: Any) -> None:
        if self._is_wanted():
            full = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self._number(ev.NORM, float(full))

    def _before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_wanted():
            return
        with self._lock:
            phase = ev.CLIPPED if self._is_clipped else ev.GRADIENT
            self._parameters(phase, ((p, p.grad) for p in _updated(optimizer)))
            for index, group in enumerate(optimizer.param_groups):
                self._write(Number(self._step, ev.RATE, f"group {index}", float(group["lr"])))

    def _after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_wanted():
            with self._lock:
                self._parameters(ev.WEIGHT, ((p, p) for p in _updated(optimizer)))
                self._states(optimizer)
                self.flush()  # the process may be killed before another step begins
        self._has_updated = True
        if self._launches is not None:
            self._launches.count(self._step)

    def _states(self, optimizer: Optimizer) -> None:
        for parameter in _updated(optimizer):
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    self._parameters(f"{ev.MOMENT} {key}", [(parameter, value)])

    # Writing.

    def _place(self, phase: str) -> int:
        """The step that a phase is of: what is evaluated after an update is before the next one."""
        return self._step + (self._has_updated and phase == ev.EVALUATION)

    def _is_wanted(self, phase: str = ev.FORWARD) -> bool:
        return self._step <= self._request.steps and self._place(phase) <= self._request.steps + 1

    def _number(self, phase: str, value: float) -> None:
        with self._lock:
            self._write(Number(self._step, phase, "", value, self._numbers[phase]))
            self._numbers[phase] += 1

    def _write(self, line: Event | Number | Rows) -> None:
        if self._log is None:
            self._log = Log(Path(self._request.folder), f"{_rank():05d}-{os.getpid()}")
            world = os.environ.get("WORLD_SIZE", "1")
            facts = {"rank": str(_rank()), "ranks": world, "program": " ".join(sys.argv)}
            self._log.add({**facts, "torch": str(torch.__version__)})
        self._log.add(line)

    def flush(self) -> None:
        """Write the step that has ended."""
        with self._lock:
            for entry in self._tensors:
                dtype = str(entry.dtype).removeprefix("torch.")
                pieces = tuple(piece for digest in entry.digests for piece in digest.pieces())
                self._write(
                    Event(
                        entry.step,
                        entry.phase,
                        entry.name,
                        entry.shape,
                        dtype,
                        pieces,
                        entry.call,
                        entry.note,
                        entry.may_add,
                    )
                )
            self._tensors.clear()
            if self._log is not None:
                self._log.flush()


def _own(name: str, parameter: Tensor) -> list[Slice]:
    """What a parameter of the reference itself is."""
    _, boxes, shape = placed(parameter)
    return [Slice(name, shape, here, there) for here, there in boxes]


def _is_of_columns(part: Slice) -> bool:
    """Whether a part of a matrix has some of its columns: a product with it is a term of a sum."""
    return len(part.shape) == 2 and part.box[-1] != (0, part.shape[-1])


def _updated(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
