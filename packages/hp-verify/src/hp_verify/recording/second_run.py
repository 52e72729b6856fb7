"""The second run: tensors themselves, around where a first run found the first difference.

The second run keeps, of a module, its inputs and outputs with the gradients of the outputs; of a
parameter its gradients before and after they are reduced and clipped, its values and its state
before and after the update. A process writes its parts beside where they are in the whole, so
nothing is sent. Of a single process of the reference the module itself is pickled.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hp_base.dtypes import dtype_name
from hp_verify.recording import events as ev
from hp_verify.recording.calls import is_unseen, kwargs_of_call
from hp_verify.recording.launches import rank_here
from hp_verify.recording.recorder import Call, Recorder
from hp_verify.recording.request import Request
from hp_verify.recording.samples import Laid, Samples
from hp_verify.recording.slices import Slice, placed
from hp_verify.recording.trees import expressions, is_compared, is_dtensor, replaced, tensors_in

_MOST_BYTES = 2 << 30
"""Of a module that is pickled with its weights."""
Plain: TypeAlias = int | float | str | tuple["Plain", ...]
"""Options and numbers of optimizers, as they are pickled."""
HELD, BEFORE = "held weight", "before the update"
"""Phases of a second run alone: weights that a module computes with, those and state before."""


def module_of(name: str) -> str:
    """Return the module of an output's name, without the suffixes of several outputs and calls."""
    return name.partition("#")[0].partition(":")[0]


class SecondRunRecorder(Recorder):
    """Keeps tensors of one step around a difference.

    Args:
        request: Request to the process, with a focus.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        assert request.focus is not None
        self._focus = request.focus
        self._modules_kept = set(self._focus.modules)
        self._held: set[int] = set()
        self._parts: list[dict[str, Any]] = []
        self._inputs: list[dict[str, Any]] = []
        self._outputs: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._met: Counter[tuple[int, str]] = Counter()
        self._watched: list[Tensor] = []

    # Modules.

    def _is_here(self, phase: str) -> bool:
        focus = self._focus
        is_same = (phase == ev.EVALUATION) == (focus.phase == ev.EVALUATION)
        return is_same and self._place(phase) == focus.step

    def _enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        super()._enter(module, args)
        if is_unseen():
            return
        call, name = self._call, self._modules.get(id(module))
        if name is None or call.root is None or not self._is_here(call.phase):
            return
        kwargs = kwargs_of_call()
        outer = {self._modules.get(id(m), "") for m in call.stack[:-1]}
        given = [t for _, t in expressions((args, kwargs), "")]
        using = self._modules_kept.difference(self._focus.modules)  # given the output in focus
        if any(t is w for t in given for w in self._watched) and not outer & using:
            self._modules_kept.add(name)
        if name in self._modules_kept:
            self._keep_call(module, name, args, kwargs)

    def _begin(
        self, call: Call, root: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        super()._begin(call, root, args, kwargs)
        if self._is_here(call.phase) and id(root) not in self._held:
            self._held.add(id(root))  # before FSDP2 puts gathered weights in the place of its own
            self._hold_weights(root)

    def _keep_call(
        self, module: nn.Module, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        call = self._call
        times = self._met[call.index, name]
        self._met[call.index, name] += 1
        leaves = []
        for text, tensor in expressions((args, dict(kwargs)), "given"):
            laid = None if call.samples is None else call.samples.laid(tensor)
            raw = None if is_dtensor(tensor) else _copied(tensor)
            kept = {
                "place": text,
                "size": tuple(tensor.shape),
                "dtype": str(tensor.dtype),
                "watched": any(tensor is w for w in self._watched),
                "raw": None if laid else raw,
            }
            leaves.append(kept | _laid(laid))
        entry: dict[str, Any] = {
            "module": name,
            "call": call.index,
            "times": times,
            "rows": call.samples.names if call.samples else (),
            "kind": f"{type(module).__module__}.{type(module).__qualname__}",
            "is_main": any(type(m).__module__ == "__main__" for m in module.modules()),
            "autocast": _autocast(),
            "leaves": leaves,
        }
        self._facts.setdefault("settings", {})[name] = _settings(module)
        if not self._request.reference:
            entry["file"] = self._pickle(
                f"call-{len(self._inputs)}", replaced((args, dict(kwargs)), _copied)
            )
            entry["random"] = torch.get_rng_state()
            if f"module {name}" not in self._facts:
                self._facts[f"module {name}"] = self._pickle(f"module-{len(self._facts)}", module)
        self._inputs.append(entry)

    def _pickle(self, name: str, value: object) -> str:
        """Write a value of any kind; its path, or "" and the reason among the facts."""
        size = _bytes(value) if isinstance(value, nn.Module) else 0
        if size > _MOST_BYTES:
            self._facts["not pickled"] = f"{size:,} bytes are more than {_MOST_BYTES:,}"
            return ""
        path = Path(self._request.folder) / f"{name}-{rank_here():05d}-{os.getpid()}.pt"
        try:
            torch.save(value, path)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's objects raise
            self._facts["not pickled"] = f"{type(error).__name__}: {error}"[:200]
            return ""
        return str(path)

    def _leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        super()._leave(module, args, output)
        if is_unseen():
            return
        call, name = self._call, self._modules.get(id(module))
        if name not in self._modules_kept or call.root is None or not self._is_here(call.phase):
            return
        times = self._met[call.index, name] - 1
        suffix = f"#{times}" if times > 0 else ""
        found = {
            f"{name}{':' if path else ''}{path}{suffix}": (text, tensor)
            for (path, tensor), (text, _) in zip(
                tensors_in(output), expressions(output, "output"), strict=True
            )
            if is_compared(tensor)
        }
        names = {own: (text, tuple(tensor.shape)) for own, (text, tensor) in found.items()}
        self._outputs.append({"module": name, "call": call.index, "times": times, "names": names})
        if self._focus.name in found:
            self._watched.append(found[self._focus.name][1])

    def _sample(
        self, phase: str, name: str, tensor: Tensor, samples: Samples | None, index: int
    ) -> None:
        is_here = self._is_here(ev.FORWARD if phase == ev.BACKWARD else phase)
        if not is_here or module_of(name) not in self._modules_kept:
            return
        laid = None if samples is None else samples.laid(tensor)
        with self._lock:
            adds = phase == ev.BACKWARD or name in self._terms
            entry = {"phase": phase, "name": name, "call": index, "adds": adds}
            self._parts.append(entry | _laid(laid) | {"step": self._place(phase)})

    # Parameters.

    def _hold_weights(self, root: nn.Module) -> None:
        """Keep the weights that modules in focus compute with in this step."""
        is_small = _bytes(root) <= _MOST_BYTES
        held = [name for name in self._modules_kept if name or is_small]
        prefixes = tuple(f"{name}." if name else "" for name in held)
        for parameter in root.parameters():
            local, _, _ = placed(parameter)
            for part in self._all_owners().parts(parameter):
                if part.name.startswith(prefixes):
                    self._keep_part(HELD, part, local)

    def _part(self, phase: str, part: Slice, local: Tensor) -> None:
        focus = self._focus
        if focus.phase == ev.NORM and phase == ev.GRADIENT and self._step == focus.step:
            norm = torch.linalg.vector_norm(part.of(local).double())
            name = f"{part.name} {list(part.box)}"
            one = {"name": name, "shape": (), "box": (), "values": norm}
            self._parts.append({"phase": ev.NORM, "step": self._step} | one)
        elif part.name in focus.parameters and self._step in (focus.step, focus.step - 1):
            self._keep_part(phase, part, local)

    def _keep_part(self, phase: str, part: Slice, local: Tensor, term: int = 0) -> None:
        self._parts.append(
            {
                "step": self._focus.step if phase == HELD else self._step,
                "phase": phase,
                "name": part.name,
                "shape": part.shape,
                "box": part.box,
                "values": _copied(part.of(local)),
                "call": term,
            }
        )

    def _own_term(self, part: Slice, local: Tensor) -> None:
        if part.name in self._focus.parameters and self._step == self._focus.step:
            key = -self._step, part.name + str(part.box)
            self._keep_part(ev.OWN, part, local, self._met[key])
            self._met[key] += 1

    # Clipping and updates.

    def _before_clipping(
        self, parameters: Tensor | Iterable[Tensor], *args: object, **kwargs: object
    ) -> None:
        if self._step == self._focus.step:
            most = kwargs.get("max_norm", args[0] if args else None)
            if isinstance(most, SupportsFloat):
                self._facts["max norm"] = float(most)
        super()._before_clipping(parameters, *args, **kwargs)

    def _before_update(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        super()._before_update(optimizer, args, kwargs)
        if self._step != self._focus.step:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for part in self._all_owners().parts(parameter):
                    if part.name in self._focus.parameters:
                        self._keep_update(optimizer, group, parameter, part)

    def _keep_update(
        self, optimizer: Optimizer, group: Mapping[str, object], parameter: Tensor, part: Slice
    ) -> None:
        options = {k: _plain(v) for k, v in group.items() if k != "params"}
        state = optimizer.state.get(parameter, {})
        numbers = {k: _plain(v) for k, v in state.items() if _plain(v) is not None}
        kind = type(optimizer)
        self._facts.setdefault("updates", {})[part.name] = {
            "class": (kind.__module__, kind.__qualname__),
            "options": {k: v for k, v in options.items() if v is not None},
            "numbers": numbers,
        }
        self._keep_part(f"{BEFORE} weight", part, placed(parameter)[0])
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                self._keep_part(f"{BEFORE} {key}", part, placed(value)[0])

    # Writing.

    def flush(self) -> None:
        """Write the step that has ended; tensors once all of them are there."""
        super().flush()
        if self._parts or self._inputs:
            kept = {
                "rank": rank_here(),
                "parts": self._parts,
                "inputs": self._inputs,
                "outputs": self._outputs,
                "facts": self._facts,
                "path": sys.path,
                "main": getattr(sys.modules["__main__"], "__file__", None) or "",
            }
            name = f"kept-{self._step:06d}-{rank_here():05d}-{os.getpid()}.pt"
            torch.save(kept, Path(self._request.folder) / name)
            self._parts, self._inputs, self._outputs = [], [], []


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def _laid(laid: tuple[tuple[int, ...], list[Laid]] | None) -> dict[str, Any]:
    if laid is None:
        return {"shape": (), "laid": []}
    shape, parts = laid
    kept = [(p.rows, p.box, _copied(p.values), p.shape or shape) for p in parts]
    return {"shape": shape, "laid": kept}


def _copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host; the copy requires gradients if the tensor does."""
    return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)


def _plain(value: object) -> Plain | None:
    """Return a value that is a number, a text, or several such; None for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not is_dtensor(value) else None
    if isinstance(value, tuple | list):
        listed = tuple(plain for item in value if (plain := _plain(item)) is not None)
        return listed if len(listed) == len(value) else None
    return value if isinstance(value, int | float | str) else None


def _autocast() -> str:
    """Return the dtype that this thread's operators on the host are cast to; "": they are not."""
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return dtype_name(torch.get_autocast_dtype("cpu"))


def _settings(module: nn.Module) -> dict[str, bool | float]:
    """Return numbers and flags that modules hold: they should not depend on a layout."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, bool | float) and not key.startswith("_")
    }
