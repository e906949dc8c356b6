"""Classifies the nodes of graphs of different sizes, in the batches of torch_geometric."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

draw = torch.Generator().manual_seed(1)


def ring(nodes):
    x = torch.randn(nodes, 5, generator=draw, dtype=torch.float64)
    edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
    return Data(x=x, edge_index=edges, y=(x + x.roll(1, 0)).sum(1).sign().long().add(1))


graphs = [ring(int(torch.randint(3, 30, (1,), generator=draw))) for _ in range(96)]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.other, self.head = nn.Linear(5, 16), nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, graph):
        source, target = graph.edge_index
        messages = self.other(graph.x[source])
        h = self.own(graph.x).index_add(0, target, messages)
        return self.head(h.relu())


torch.manual_seed(0)
model = Network().double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(graphs, batch_size=24)
for epoch in range(3):
    for graph in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(graph), graph.y)
        loss.backward()
        optimizer.step()
assert Batch.from_data_list(graphs[:2]).num_graphs == 2
torch.save(model.state_dict(), sys.argv[1])
