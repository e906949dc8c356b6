"""nanochat's base_train.py with a small GPT: Muon for matrices, AdamW for others, rates by hand."""
# launch: python nanochat.py DIR

import argparse
import inspect
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("out_dir", type=Path)
parser.add_argument("--num_iterations", type=int, default=24)
args = parser.parse_args()
out_dir, num_iterations = args.out_dir, args.num_iterations
device_batch_size, max_seq_len, total_batch_size = 8, 16, 32 * 16
embedding_lr, unembedding_lr, matrix_lr = 0.02, 0.004, 0.02
warmup_ratio, warmdown_ratio, final_lr_frac = 0.1, 0.4, 0.1


class Block(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.c_mix = nn.Linear(n_embd, n_embd, bias=False)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        means = x.cumsum(1) / torch.arange(1, x.size(1) + 1).view(1, -1, 1)
        x = x + self.c_mix(F.rms_norm(means, (x.size(-1),)))
        return x + self.c_proj(F.relu(self.c_fc(F.rms_norm(x, (x.size(-1),)))).square())


class GPT(nn.Module):
    def __init__(self, vocab_size=128, n_embd=32, n_layer=2):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd) for _ in range(n_layer))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def setup_optimizers(self):
        dmodel_lr_scale = (self.wte.embedding_dim / 768) ** -0.5
        adam_groups = [
            {"params": [*self.lm_head.parameters()], "lr": unembedding_lr * dmodel_lr_scale},
            {"params": [*self.wte.parameters()], "lr": embedding_lr * dmodel_lr_scale},
        ]
        adamw = torch.optim.AdamW(
            adam_groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True
        )
        muon = torch.optim.Muon([*self.h.parameters()], lr=matrix_lr, weight_decay=0.0)
        optimizers = [adamw, muon]
        for opt in optimizers:
            for group in opt.param_groups:
                group["initial_lr"] = group["lr"]
        return optimizers

    def forward(self, idx, targets):
        x = F.rms_norm(self.wte(idx), (self.wte.embedding_dim,))
        for block in self.h:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(x) / 15)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


torch.manual_seed(1337)
model = GPT()
optimizers = model.setup_optimizers()
adamw_optimizer, muon_optimizer = optimizers


def batches():
    text = torch.tensor(list(inspect.getsource(argparse).encode())).clamp(max=127)
    while True:
        first = torch.randint(len(text) - max_seq_len, (device_batch_size,))
        rows = torch.stack([text[i : i + max_seq_len + 1] for i in first])
        yield rows[:, :-1], rows[:, 1:]


train_loader = batches()
x, y = next(train_loader)  # kick off load of the very first batch of data


# learning rate schedule
def get_lr_multiplier(it):
    warmup_iters = round(warmup_ratio * num_iterations)
    warmdown_iters = round(warmdown_ratio * num_iterations)
    if it < warmup_iters:
        return (it + 1) / warmup_iters
    if it <= num_iterations - warmdown_iters:
        return 1.0
    progress = (num_iterations - it) / warmdown_iters
    return progress * 1.0 + (1 - progress) * final_lr_frac


# momentum schedule of Muon
def get_muon_momentum(it):
    frac = min(it / 300, 1)
    return (1 - frac) * 0.85 + frac * 0.95


grad_accum_steps = total_batch_size // (device_batch_size * max_seq_len)
step = 0
while True:
    last_step = step == num_iterations
    if last_step:
        break
    # single training step
    for micro_step in range(grad_accum_steps):
        loss = model(x, y)
        train_loss = loss.detach()
        loss = loss / grad_accum_steps
        loss.backward()
        x, y = next(train_loader)
    # step the optimizers
    lrm = get_lr_multiplier(step)
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * lrm
    muon_momentum = get_muon_momentum(step)
    for group in muon_optimizer.param_groups:
        group["momentum"] = muon_momentum
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
    # logging
    rates = [group["lr"] for opt in optimizers for group in opt.param_groups]
    print("step", step, *rates)
    step += 1

torch.save(model.state_dict(), out_dir / "final.pt")
