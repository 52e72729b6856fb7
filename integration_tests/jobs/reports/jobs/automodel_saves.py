"""Automodel's save where a killed one has left its folder: Automodel #3261."""

import argparse
import os
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.base_recipe import BaseRecipe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, SAMPLES, LENGTH, STEPS = 64, 4, 8, 3


class Recipe(BaseRecipe):
    """A recipe of one's own, of a model and its optimizer."""

    def __init__(self, model, rank, folder):
        self.cfg, self.peft_config = ConfigNode({"model": "of one's own"}), None
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False)
        settings = CheckpointingConfig(
            checkpoint_dir=str(folder), model_save_format="torch_save", save_consolidated=False
        )
        self.checkpointer = Checkpointer(settings, dp_rank=rank, tp_rank=0, pp_rank=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saved", action="store_true", help="after step 2, as a killed job has")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    folder = Path(gettempdir()) / f"automodel-{os.getppid()}"  # ranks have one parent
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    if args.saved and rank == 0:
        (folder / "epoch_0_step_1" / "model").mkdir(parents=True)  # what a killed save has left
    recipe = Recipe(model, rank, folder)
    data = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=data)[rank::ranks]
        logits = recipe.model(tokens).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        recipe.optimizer.step()
        recipe.optimizer.zero_grad()
        if args.saved and step == 1:
            recipe.save_checkpoint(epoch=0, step=1, train_loss=0.0)
    if ranks > 1:
        dist.destroy_process_group()
    if rank == 0:
        rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
