"""A small transformer that predicts the next character of a text."""

import torch
from torch import Tensor, nn


class CharTransformer(nn.Module):
    """Causal transformer over character codes: norm first, learned positions, GELU.

    Source:
        Radford et al. 2019, GPT-2, with its initial weights, normal with standard deviation 0.02.
    """

    def __init__(
        self,
        characters: int,
        length: int,
        *,
        width: int,
        depth: int,
        heads: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(
            layer, depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, characters)
        for parameter in self.parameters():
            if parameter.ndim > 1:  # the layers begin as copies of one
                nn.init.normal_(parameter, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits of what follows each character, (samples, length, characters)."""
        length = codes.shape[1]
        positions = torch.arange(length, device=codes.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, codes.device)
        x = self.characters(codes) + self.positions(positions)
        x = self.body(x, mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits
