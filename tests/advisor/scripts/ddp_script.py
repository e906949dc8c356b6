"""Trains with DistributedDataParallel; start it by torchrun."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def made_rows(samples=256):
    x = torch.randn(samples, 6)
    return TensorDataset(x, (x[:, 0] * x[:, 1] + 0.5 * torch.randn(samples) > 0).long())


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=16, help="of each rank")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def build(args):
    torch.manual_seed(0)
    dataset = made_rows()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return dataset, model, optimizer


def batches(dataset, args, rank, world_size):
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset, model, optimizer = build(args)
    ddp_model = DistributedDataParallel(model)
    losses = []
    micro_batches = batches(dataset, args, rank, world_size)
    for _ in range(args.steps):
        optimizer.zero_grad()
        for micro_step in range(args.accumulation):
            ddp_model.require_backward_grad_sync = micro_step == args.accumulation - 1
            x, y = next(micro_batches)
            loss = nn.functional.cross_entropy(ddp_model(x), y) / args.accumulation
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    if args.losses and rank == 0:
        args.losses.write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
