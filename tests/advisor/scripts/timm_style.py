"""Trains a small convolutional network on made images: mixed precision, EMA, clipping, cosine."""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 8


def norm_of(kind, channels):
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(2, channels)


class ConvNet(nn.Module):
    def __init__(self, norm, channels=8):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False), norm_of(norm, channels), nn.ReLU()
        )
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm = norm_of(norm, channels)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.norm(self.pointwise(self.depthwise(x))))
        return self.fc(x.mean((2, 3)))


def make_images(samples=512):
    templates = torch.randn(CLASSES, 1, 8, 8)
    labels = torch.randint(CLASSES, (samples,))
    return TensorDataset(templates[labels] + torch.randn(samples, 1, 8, 8), labels)


def autocast_of(args):
    dtype = getattr(torch, args.amp_dtype)
    return torch.autocast("cpu", dtype=dtype) if args.amp else nullcontext()


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--norm", choices=["group", "batch"], default="group")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--amp-dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--init-scale", type=float, default=2.0**16)
    parser.add_argument("--clip-grad", type=float, default=0.5)
    parser.add_argument("--model-ema-start", type=int, default=10)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def build(args):
    torch.manual_seed(42)
    loader = DataLoader(make_images(), args.batch_size, shuffle=True, drop_last=True)
    model = ConvNet(args.norm)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=args.init_scale, enabled=args.amp)
    return loader, model, optimizer, scheduler, scaler


def endless(loader):
    while True:
        yield from loader


def main():
    args = parse()
    loader, model, optimizer, scheduler, scaler = build(args)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    batches = endless(loader)
    losses, model_ema = [], None
    model.train()
    for step in range(args.steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(args.grad_accum_steps):
            images, target = next(batches)
            with autocast_of(args):
                output = model(images)
                loss = criterion(output, target) / args.grad_accum_steps
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scaler.step(optimizer)
        scaler.update()
        if step == args.model_ema_start:
            model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        if model_ema is not None:
            model_ema.update_parameters(model)
        scheduler.step()
        losses.append(total)
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
