"""nanoGPT's train.py with a small GPT: get_batch() from a memmap, the rate set by hand."""
# launch: python nanogpt.py DIR, or torchrun --nproc_per_node=2 nanogpt.py DIR

import argparse
import inspect
import math
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("out_dir", type=Path)
parser.add_argument("--init_from", default="scratch")  # or "resume"
parser.add_argument("--max_iters", type=int, default=24)
given = parser.parse_args()
out_dir, init_from, max_iters = given.out_dir, given.init_from, given.max_iters
eval_interval, eval_iters, log_interval = 8, 2, 1
gradient_accumulation_steps, batch_size, block_size = 4, 8, 16
learning_rate, warmup_iters, lr_decay_iters, min_lr = 3e-3, 5, 24, 3e-4
decay_lr, grad_clip, dtype, device = True, 1.0, "float32", "cpu"


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd=32, n_head=2, n_layer=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(
            nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, 0.0, F.gelu, batch_first=True)
            for _ in range(n_layer)
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x, mask, is_causal=True)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


# various inits, derived attributes, I/O setup
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = int(os.environ["RANK"]) == 0
    seed_offset = int(os.environ["RANK"])
    gradient_accumulation_steps //= ddp_world_size
else:
    ddp_world_size, master_process, seed_offset = 1, True, 0
torch.manual_seed(1337 + seed_offset)
ctx = nullcontext()

# poor man's data loader
text = np.frombuffer(inspect.getsource(argparse).encode(), dtype=np.uint8)
if master_process:
    text[:-8192].tofile(out_dir / "train.bin")
    text[-8192:].tofile(out_dir / "val.bin")
if ddp:
    torch.distributed.barrier()


def get_batch(split):
    data = np.memmap(out_dir / f"{split}.bin", dtype=np.uint8, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix]
    )
    return x.to(device), y.to(device)


# model, scaler and optimizer
iter_num, best_val_loss = 0, 1e9
model = GPT(vocab_size=128)
if init_from == "resume":
    checkpoint = torch.load(out_dir / "ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


# learning rate decay scheduler (cosine with warmup)
def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


# training loop
X, Y = get_batch("train")
raw_model = model.module if ddp else model
while True:
    # determine and set the learning rate for this iteration
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    # evaluate the loss on train/val sets and write checkpoints
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, out_dir / "ckpt.pt")

    # forward backward update, with optional gradient accumulation
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    # timing and logging
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, lr {lr:.8f}")
    iter_num += 1

    # termination conditions
    if iter_num > max_iters:
        break

if master_process:
    torch.save(raw_model.state_dict(), out_dir / "final.pt")
if ddp:
    destroy_process_group()
