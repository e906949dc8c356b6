"""BERT with each of two heads; the weights of the body have the same names in both.

N samples, T tokens, P positions to predict, V vocabulary, H width.
"""

from torch import Tensor
from transformers import BertConfig
from transformers.models.bert import BertForPreTraining, BertForQuestionAnswering, BertModel

from bigbatch_recipes.models.bert import FEED_FORWARD, HEAD_WIDTH, POSITIONS, size_of


def _config(size: str, vocabulary: int, dropout: float) -> BertConfig:
    layers, width = size_of(size)
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_WIDTH,
        intermediate_size=FEED_FORWARD * width,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )


def _encode(bert: BertModel, tokens: Tensor, segments: Tensor, is_token: Tensor) -> Tensor:
    """States of the last layer, (N, T, H), of tensors (N, T).

    The mask has its final shape: for a flat mask `transformers` would first check on the device
    whether anything is padded, which makes the CPU wait and fails for meta tensors.
    """
    states: Tensor = bert(
        tokens.long(), attention_mask=is_token[:, None, None, :], token_type_ids=segments.long()
    ).last_hidden_state
    return states


class Pretraining(BertForPreTraining):
    """BERT that predicts masked tokens, and whether the second segment follows the first.

    Source:
        J. Devlin et al., BERT, 2018; the small sizes I. Turc et al., 2019.
    """

    def __init__(self, size: str, vocabulary: int, dropout: float = 0.1) -> None:
        super().__init__(_config(size, vocabulary, dropout))

    def forward(
        self, tokens: Tensor, segments: Tensor, is_token: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits of the tokens at the positions (N, P), and of "follows" and "random".

        Returns:
            (N, P, V) and (N, 2).
        """
        states = _encode(self.bert, tokens, segments, is_token)
        index = positions[:, :, None].expand(-1, -1, states.shape[-1])
        pooled = self.bert.pooler(states)
        logits: tuple[Tensor, Tensor] = self.cls(states.gather(1, index), pooled)
        return logits


class SpanFinder(BertForQuestionAnswering):
    """BERT that predicts the first and the last token of an answer."""

    def __init__(self, size: str, vocabulary: int, dropout: float = 0.1) -> None:
        super().__init__(_config(size, vocabulary, dropout))

    def forward(self, tokens: Tensor, segments: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each token to be the first, and the last, (N, T) each."""
        logits = self.qa_outputs(_encode(self.bert, tokens, segments, is_token))
        first, last = logits.unbind(-1)
        return first, last
