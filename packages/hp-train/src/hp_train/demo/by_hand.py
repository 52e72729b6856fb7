"""The comparison as anybody would write it: a short program of transformers and torch alone."""

import pprint
from collections.abc import Mapping
from typing import Any

from hp_train.demo.cells import Layout

_PROGRAM = """\
# torchrun --nproc-per-node 2 this.py
import torch, torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

fields = {fields}
sizes = {sizes}

def load(**more):
    return AutoModelForCausalLM.from_pretrained("tiny", {options}, **more).train()

def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().double()

def computed(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    named = {{n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}}
    return {{"logits": whole(logits), **named}}

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model({name!r}, **fields)).double()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
if dist.get_rank() == 0:
    model.save_pretrained("tiny")
dist.barrier()
tokens = torch.randint(5, 60, (4, 16))
mine = tokens.chunk(2)[dist.get_rank()] if sizes.get("fsdp_size") else tokens
one = computed(load(), tokens)
many = computed(load(distributed_config=DistributedConfig(**sizes)), mine)
if len(mine) < len(tokens):
    one["logits"] = one["logits"].chunk(2)[dist.get_rank()]
errors = {{n: float((many[n] - one[n]).norm() / (one[n].norm() + 1e-30)) if n in many else 1.0
          for n in one}}
for name, error in errors.items():
    if error > 1e-4 and one[name].norm() > 1e-12 and dist.get_rank() == 0:
        print(f"{{error:.2e}} {{name}}")
"""


_OPTIONS = {
    True: 'dtype=torch.float64, experts_implementation="eager"',
    False: "dtype=torch.float32",
}


def program(name: str, fields: Mapping[str, Any], layout: Layout) -> str:
    """Write the program.

    Args:
        name: Type of a model.
        fields: Fields of its config.
        layout: What is compared with one process.
    """
    text = pprint.pformat(dict(fields), width=100, compact=True, sort_dicts=False)
    return _PROGRAM.format(
        name=name,
        fields=text.replace("\n", "\n    "),
        sizes=layout.sizes,
        options=_OPTIONS[layout.float64],
    )
