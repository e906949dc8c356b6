"""A plain training of a GPT on the texts of Python's standard library, as a user writes it.

python -m studies.gpu_program --batch 32 --lr 3e-4 --seconds 40
bigbatch advise -m studies.gpu_program
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from studies.gpu import DEVICE, autocast
from studies.markdown_tables import Row, show
from studies.sized_networks import GPT, mean_loss

_LENGTH = 256
_HELD_OUT = 200_000  # bytes
_EVERY = 1.5  # seconds between evaluations


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Bytes of a text, in windows that overlap by half."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - _LENGTH - 1) // (_LENGTH // 2)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start = number * (_LENGTH // 2)
        window = self.text[start : start + _LENGTH + 1].long()
        return window[:-1], window[1:]


def stdlib_bytes() -> Tensor:
    """All modules of the standard library, at most 12 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts)
    text = b"\n".join(file.read_bytes() for file in files)[:12_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def train(given: argparse.Namespace) -> Iterator[tuple[int, float, float]]:
    """Samples, seconds and held-out loss at each evaluation, whose own time does not count."""
    torch.manual_seed(given.seed)
    text = stdlib_bytes()
    held_out = Windows(text[-_HELD_OUT:])
    windows = [held_out[number] for number in range(given.held_out)]
    x, y = (torch.stack(columns).to(DEVICE) for columns in zip(*windows, strict=True))
    loader = DataLoader(Windows(text[:-_HELD_OUT]), given.batch, shuffle=True, drop_last=True)
    model = GPT(given.layers, given.width, 256, _LENGTH).to(DEVICE)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    fused = DEVICE.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), given.lr, betas=(0.9, 0.95), fused=fused)
    samples, spent, start = 0, 0.0, time.perf_counter()
    while spent < given.seconds:
        for inputs, labels in loader:
            optimizer.zero_grad()
            with autocast():
                loss = mean_loss(model, inputs.to(DEVICE), labels.to(DEVICE))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            samples += len(inputs)
            if time.perf_counter() - start > min(_EVERY, given.seconds):
                loss.item()  # waits for the device
                spent += time.perf_counter() - start
                with torch.no_grad(), autocast():
                    yield samples, spent, mean_loss(model, x, y).item()
                start = time.perf_counter()
                if spent > given.seconds:
                    break


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and shows held-out losses by samples and seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=512, help="windows of an evaluation")
    parser.add_argument("--out", type=Path, help="JSON of all evaluations")
    parser.add_argument("--tiny", action="store_true", help="one layer for a moment")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.batch, given.layers, given.width, given.seconds, given.held_out = 4, 1, 64, 0.1, 4
    evaluations: list[tuple[int, float, float]] = []

    def rows() -> Iterator[Row]:
        for samples, spent, loss in train(given):
            evaluations.append((samples, spent, loss))
            yield {"samples": f"{samples:,}", "seconds": f"{spent:.1f}", "loss": f"{loss:.3f}"}

    show(f"batch {given.batch}, lr {given.lr:g}, seed {given.seed}", rows())
    if given.out is not None:
        about = {"batch": given.batch, "lr": given.lr, "seed": given.seed}
        given.out.write_text(json.dumps(about | {"samples_seconds_loss": evaluations}))


if __name__ == "__main__":
    main()
