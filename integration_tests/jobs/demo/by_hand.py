"""The comparison as anybody would write it: a short program of transformers and torch alone."""

import re
from collections.abc import Mapping
from typing import Any

from integration_tests.jobs.demo.cells import Layout

MOST_LINES = 40
"""Of a program, the fields of its config included."""

_PROGRAM = """\
# {command}
import torch, torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

fields = {fields}
sizes = {sizes}
def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().double()
def computed(tokens, **more):
    more |= dict({options})
    model = AutoModelForCausalLM.from_pretrained("tiny", **more).train()
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    named = {{n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}}
    return {{"logits": whole(logits), **named}}

dist.is_initialized() or dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model({name!r}, **fields)).double()
for parameter in model.parameters():
    parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
if dist.get_rank() == 0:
    model.save_pretrained("tiny")
dist.barrier()
tokens = torch.randint(5, 60, (4, 16))
mine = tokens.chunk(2)[dist.get_rank()] if sizes.get("fsdp_size") else tokens
one, many = computed(tokens), computed(mine, distributed_config=DistributedConfig(**sizes))
if len(mine) < len(tokens):
    one["logits"] = one["logits"].chunk(2)[dist.get_rank()]
errors = {{n: float((many[n] - x).norm() / (x.norm() + 1e-30)) if n in many else 1.0
          for n, x in one.items() if x.norm() > 1e-12}}
if dist.get_rank() == 0:
    print(*(f"{{e:.2e}} {{n}}" for n, e in errors.items() if not e < 1e-4), sep="\\n")
"""


_BEFORE_KEY = re.compile(r"(?<=, )(?='\w+': )")
_OPTIONS = {
    True: 'dtype=torch.float64, experts_implementation="eager"',
    False: "dtype=torch.float32",
}


def program(name: str, fields: Mapping[str, Any], layout: Layout) -> str:
    """Write the program, of at most `MOST_LINES` lines.

    Args:
        name: Type of a model.
        fields: Fields of its config.
        layout: What is compared with one process.
    """
    width = 96
    while True:
        made = _PROGRAM.format(
            command=command("this"),
            name=name,
            fields="\n    ".join(_lines(repr(dict(fields)), width)),
            sizes=layout.sizes,
            options=_OPTIONS[layout.float64],
        )
        if len(made.splitlines()) <= MOST_LINES:
            return made
        width *= 2


def _lines(text: str, width: int) -> list[str]:
    """Break a dict's text before keys, where a line would be longer than that."""
    lines = [""]
    for item in _BEFORE_KEY.split(text):
        if lines[-1] and len(lines[-1]) + len(item) > width:
            lines.append("")
        lines[-1] += item
    return [line.rstrip() for line in lines]


def command(name: str) -> str:
    """How the program is run, saved as ``NAME.py``."""
    return f"torchrun --nproc-per-node 2 {name}.py"
