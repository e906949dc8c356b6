"""Trains on rows packed from documents, as nanochat's loader gives them: in one buffer."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY, WIDTH, ROWS, LENGTH, STEPS = 50, 16, 8, 12, 12


def documents():
    draw = torch.Generator().manual_seed(1)
    while True:
        length = int(torch.randint(3, 20, (1,), generator=draw))
        yield [0, *torch.randint(1, VOCABULARY, (length,), generator=draw).tolist()]


class PackedLoader:
    """Rows of LENGTH + 1 tokens; inputs and targets are views of one preallocated buffer."""

    def __init__(self, batches):
        self.batches = batches
        self.row_buffer = torch.empty(ROWS, LENGTH + 1, dtype=torch.long)
        self.buffer = torch.empty(2 * ROWS * LENGTH, dtype=torch.long)

    def __iter__(self):
        source, pending = documents(), []
        inputs = self.buffer[: ROWS * LENGTH].view(ROWS, LENGTH)
        targets = self.buffer[ROWS * LENGTH :].view(ROWS, LENGTH)
        for _ in range(self.batches):
            for row in range(ROWS):
                while len(pending) <= LENGTH:
                    pending += next(source)
                self.row_buffer[row] = torch.tensor(pending[: LENGTH + 1])
                del pending[: LENGTH + 1]
            inputs.copy_(self.row_buffer[:, :-1])
            targets.copy_(self.row_buffer[:, 1:])
            targets[targets == 0] = -1  # the first token of a document is not predicted
            yield inputs, targets


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, y):
        h = self.embedding(x)
        with sdpa_kernel(SDPBackend.MATH):
            h = h + F.scaled_dot_product_attention(*self.qkv(h).chunk(3, -1), is_causal=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), ignore_index=-1)


torch.manual_seed(0)
model = Model().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = PackedLoader(STEPS)
for x, y in loader:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
