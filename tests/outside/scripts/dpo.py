"""Direct preference optimization (Rafailov et al. 2023) as TRL's DPOTrainer computes it, short.

A forward has the chosen and then the rejected answer of every pair, so twice the loader's batch.
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, PROMPT, BETA = 32, 12, 6, 0.1


class TinyGPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.tokens(ids) + self.positions(torch.arange(LENGTH))
        return self.head(self.block(x, mask, is_causal=True))


def log_probabilities(model, ids):
    """Of the answers after the prompts."""
    logits = model(ids)[:, PROMPT - 1 : -1].log_softmax(-1)
    return logits.gather(2, ids[:, PROMPT:, None]).sum((1, 2))


def preferences(pairs):
    """Prompts, and answers of which the ones with larger tokens are preferred."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (pairs, PROMPT), generator=draw)
    answers = torch.randint(VOCABULARY, (2, pairs, LENGTH - PROMPT), generator=draw)
    first = answers[0].sum(1) > answers[1].sum(1)
    chosen = torch.where(first[:, None], answers[0], answers[1])
    rejected = torch.where(first[:, None], answers[1], answers[0])
    return TensorDataset(torch.cat([prompts, chosen], 1), torch.cat([prompts, rejected], 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = TinyGPT()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    data = preferences(args.per_device_train_batch_size * args.steps)
    loader = DataLoader(data, args.per_device_train_batch_size, shuffle=True)
    for chosen, rejected in loader:
        ids = torch.cat([chosen, rejected])
        with torch.no_grad():
            expected = log_probabilities(reference, ids)
        margin, other = (log_probabilities(policy, ids) - expected).chunk(2)
        loss = -F.logsigmoid(BETA * (margin - other)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
