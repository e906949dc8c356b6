"""Fashion-MNIST on DeepSpeed, with a batch size that follows gradient similarity.

    python examples/deepspeed_fashion_mnist.py
    torchrun --nproc_per_node 2 examples/deepspeed_fashion_mnist.py
    deepspeed --num_accelerators 2 examples/deepspeed_fashion_mnist.py

Without the files of Fashion-MNIST in the folder --data it trains on scikit-learn's digits.
"""

import argparse
import os
from pathlib import Path

import deepspeed
import fashion_mnist
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from bigbatch.integrations import deepspeed as adaptive

ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, default="data/fashion-mnist")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--stage", type=int, default=2, help="ZeRO stage, 0 to 3")
parser.add_argument("--local_rank", type=int, default=0, help="from DeepSpeed's launcher")
args = parser.parse_args()
if "RANK" not in os.environ:  # plain python
    os.environ.update(ONE_PROCESS, MASTER_PORT="0")
torch.manual_seed(0)
deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
train, test = fashion_mnist.load(args.data)
model = nn.Sequential(nn.Linear(train.tensors[0].shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
engine, _, loader, _ = adaptive.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    training_data=DataLoader(train, 32, sampler=DistributedSampler(train)),
    config={
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
    },
    adaptive_batch_params={
        "enable_adjust": True,
        "similarity_target": 0.4,
        "batch_size_lower_bound": 64,
        "batch_size_upper_bound": 4096,
        "max_micro_batch_size": 512,
    },
)
for epoch in range(args.epochs):
    for x, y in loader:
        loss = cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
    with torch.no_grad():
        x, y = (column.to(engine.device) for column in test.tensors)
        accuracy = (engine(x).argmax(1) == y).float().mean()
    if engine.global_rank == 0:
        progress = f"{engine.bigbatch.steps} steps, {engine.global_samples} samples"
        batch = f"batch {engine.train_batch_size()}"
        print(f"epoch {epoch}: {progress}, {batch}, accuracy {accuracy:.3f}")
torch.distributed.destroy_process_group()
