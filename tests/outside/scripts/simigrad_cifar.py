"""CIFAR training of the SimiGrad paper's code, in the shape of its main.py.

Written from scratch, short, by what the script calls: the fork's arguments and its engine, a
loader of single samples glued to the micro-batch in force, rates and measurements read from the
engine. ResNet18 on CIFAR-10 is replaced by a small network with batch norm on the digits of
scikit-learn, and TensorBoard by lines that are printed.
"""

import argparse

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=3, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--similarity_target", type=float, default=0.4)
    parser.add_argument("--batch_size_lower_bound", type=int, default=None)
    parser.add_argument("--batch_size_upper_bound", type=int, default=None)
    parser.add_argument("--lr", type=float, default=0.05)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def main():
    args = add_argument()
    deepspeed.init_distributed(dist_backend="gloo")
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.float() / 8 - 1).view(-1, 1, 8, 8)
    trainset = TensorDataset(images[:1200], labels[:1200])
    testset = TensorDataset(images[1200:], labels[1200:])
    model = net()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9, weight_decay=5e-4)
    model_engine, optimizer, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        adaptive_batch_params={
            "enable_adjust": args.similarity_target >= 0,
            "similarity_target": args.similarity_target,
            "batch_size_lower_bound": args.batch_size_lower_bound,
            "batch_size_upper_bound": args.batch_size_upper_bound,
            "max_micro_batch_size": 64,
            "verbose": True,
        },
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], gamma=0.1)
    criterion = nn.CrossEntropyLoss()
    testloader = DataLoader(testset, batch_size=64)

    def train(epoch):
        model_engine.train()
        sampler = DistributedSampler(trainset)
        trainloader = DataLoader(trainset, batch_size=1, sampler=sampler)
        inputs_list, targets_list = [], []
        for inputs, targets in trainloader:
            inputs_list.append(inputs)
            targets_list.append(targets)
            if len(inputs_list) < model_engine.train_micro_batch_size_per_gpu():
                continue
            inputs, targets = torch.cat(inputs_list), torch.cat(targets_list)
            inputs_list, targets_list = [], []
            optimizer.zero_grad()
            outputs = model_engine(inputs)
            loss = criterion(outputs, targets)
            model_engine.backward(loss)
            updates = model_engine.global_steps
            model_engine.step()
            modifier = model_engine.adaptive_batch_params["global_lr_modifier"]
            if model_engine.global_steps > updates and model_engine.global_rank == 0:
                print(
                    f"step epoch={epoch}",
                    f"loss={loss.item():.6f}",
                    f"cos_similarity={float(model_engine.cos_placeholder):.6f}",
                    f"adjusted_batch_size={model_engine.train_batch_size()}",
                    f"accumulation_steps={model_engine.gradient_accumulation_steps()}",
                    f"adjusted_learning_rate={optimizer.param_groups[0]['lr'] * modifier:.6f}",
                    flush=True,
                )

    def test(epoch):
        model_engine.eval()
        correct = total = 0
        with torch.no_grad():
            for inputs, targets in testloader:
                predicted = model_engine(inputs).argmax(1)
                total += len(targets)
                correct += (predicted == targets).sum().item()
        if model_engine.global_rank == 0:
            print(f"epoch {epoch}: accuracy {correct / total:.4f}", flush=True)

    for epoch in range(args.epochs):
        train(epoch)
        test(epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
