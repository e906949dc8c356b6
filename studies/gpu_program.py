"""A plain training of a GPT on the texts of Python's standard library, as a user writes it.

python -m studies.gpu_program --batch 32 --lr 3e-4 --seconds 60 --out losses.json
bigbatch advise -m studies.gpu_program
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from studies.gpu import DEVICE, GPT, autocast

LENGTH = 256


class Windows(Dataset):
    """Bytes of a text, in windows that overlap by half."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - LENGTH - 1) // (LENGTH // 2)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * (LENGTH // 2)
        window = self.text[start : start + LENGTH + 1].long()
        return window[:-1], window[1:]


def stdlib_bytes() -> torch.Tensor:
    """All modules of the standard library, at most 12 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts)
    text = b"\n".join(file.read_bytes() for file in files)[:12_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def main() -> None:
    """Trains, and writes held-out losses by samples and seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    text = stdlib_bytes()
    held_out = Windows(text[-200_000:])
    windows = [held_out[number] for number in range(min(512, len(held_out)))]
    x, y = (torch.stack(columns).to(DEVICE) for columns in zip(*windows, strict=True))
    loader = DataLoader(Windows(text[:-200_000]), given.batch, shuffle=True, drop_last=True)
    model = GPT(given.layers, given.width, 256, LENGTH).to(DEVICE)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.02)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=given.lr, betas=(0.9, 0.95), fused=DEVICE.type == "cuda"
    )
    rows, samples, spent, start = [], 0, 0.0, time.perf_counter()
    checked = 0.0
    for _ in range(100):
        for inputs, labels in loader:
            inputs, labels = inputs.to(DEVICE), labels.to(DEVICE)
            optimizer.zero_grad()
            with autocast():
                loss = cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            samples += len(inputs)
            if time.perf_counter() - start - checked > 1.5:
                loss.item()
                spent += time.perf_counter() - start
                with torch.no_grad(), autocast():
                    score = cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
                rows.append([samples, spent, score])
                start, checked = time.perf_counter(), 0.0
                if spent > given.seconds:
                    break
        else:
            continue
        break
    if given.out:
        about = {"batch": given.batch, "lr": given.lr, "seed": given.seed}
        given.out.write_text(json.dumps(about | {"samples_seconds_loss": rows}))
    print(given.batch, given.lr, rows[-1] if rows else "no score")


if __name__ == "__main__":
    main()
