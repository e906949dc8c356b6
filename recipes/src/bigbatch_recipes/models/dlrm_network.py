"""DLRM: numbers through one network, categories through tables, their products through another.

Source: M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation
Systems, arXiv 1906.00091, 2019; the initial weights are those of its published code.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """Logit of a click.

        x = bottom(numbers)
        e_j = table_j[row_j]
        logit = top([x, all a . b of two different a, b among x, e_1, e_2, ...])

    The gradients of the tables are dense.

    Args:
        numbers: number of numeric features of a row.
        tables: number of categories, each with an embedding table.
        table_rows: rows of each table.
        bottom: widths of the layers, each with a ReLU; the last is the embedding's.
        top: widths of the layers, with a ReLU between them; the last is 1.
    """

    def __init__(
        self, numbers: int, tables: int, table_rows: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        width, vectors = bottom[-1], tables + 1
        self.bottom = _layers((numbers, *bottom), last_relu=True)
        self.tables = nn.ModuleList(_table(table_rows, width) for _ in range(tables))
        self.top = _layers((width + vectors * (vectors - 1) // 2, *top), last_relu=False)
        pairs = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)

    pairs: Tensor

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Logits (n,) of numbers (n, numbers) and rows of the tables (n, tables)."""
        x = self.bottom(numbers)
        embeddings = [table(row) for table, row in zip(self.tables, rows.unbind(1), strict=True)]
        vectors = torch.stack([x, *embeddings], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return logits


def _table(rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(rows, width)
    nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)
    return table


def _layers(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(widths):
        layer = nn.Linear(in_features, out_features)
        nn.init.normal_(layer.weight, std=(2 / (in_features + out_features)) ** 0.5)
        nn.init.normal_(layer.bias, std=out_features**-0.5)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))
