"""A stream of `datasets` that is resumed twice: datasets #8308, torchtitan #3907."""

import argparse
import os

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

WORDS, DIM, ROWS, LENGTH, BATCH = 32, 16, 64, 8, 8


def stream():
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    rows = Dataset.from_dict({"words": words.tolist()}).to_iterable_dataset(num_shards=4)
    return rows.with_format("torch")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resumed", action="store_true", help="anew after every second step")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS))
    if ranks > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    state, left = None, 6
    while left:
        rows = stream()  # as a job does that is started again
        if state is not None:
            rows.load_state_dict(state)
        for batch in DataLoader(rows, batch_size=BATCH):
            words = batch["words"][rank::ranks]
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            left -= 1
            if not left or (args.resumed and left % 2 == 0):
                state = rows.state_dict()
                break
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
