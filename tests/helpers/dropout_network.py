"""A network with everything that a trial of some steps may leave changed."""

import torch
from torch import nn


class Network(nn.Module):
    """Dropout, running statistics, and a buffer that every forward replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 12), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(12, 3)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        self.forwards = self.forwards + 1
        x = self.first(x)
        x = self.norm(x) if len(x) > 1 else x
        return self.last(self.drop(x.tanh()))
