"""BERT with each of three heads; the weights of the body have the same names in all of them.

N samples, T tokens, P places to predict, V vocabulary, H width.
"""

from torch import Tensor
from transformers import BertConfig
from transformers.models.bert import (
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
)

from bigbatch.errors import SettingError

_POSITIONS = 512  # of every published BERT, so that weights fit whatever the length trained on
_HEAD_WIDTH = 64
_FEED_FORWARD = 4  # widths

SIZES = {  # (layers, width)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


def _config(size: str, vocabulary: int, dropout: float, **more: int) -> BertConfig:
    if size not in SIZES:
        raise SettingError(f"BERT of size {size!r} is unknown; choose one of: {', '.join(SIZES)}")
    layers, width = SIZES[size]
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // _HEAD_WIDTH,
        intermediate_size=_FEED_FORWARD * width,
        max_position_embeddings=_POSITIONS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
        **more,
    )


def _read(bert: BertModel, tokens: Tensor, segments: Tensor, real: Tensor) -> Tensor:
    """States of the last layer, (N, T, H), of tensors (N, T).

    The mask is given in its final shape: from a flat one, `transformers` would first ask the device
    whether anything is padded, which makes the CPU wait, and which meta tensors cannot answer.
    """
    states: Tensor = bert(
        tokens.long(), attention_mask=real[:, None, None, :], token_type_ids=segments.long()
    ).last_hidden_state
    return states


class Pretraining(BertForPreTraining):
    """BERT that fills in masked tokens, and tells whether the second segment follows the first.

    Args:
        size: a name of `SIZES`, as Google published them.
        vocabulary: tokens.
        dropout: of states and of attention.
    Raises:
        SettingError: there is no such size.
    Source:
        J. Devlin et al., BERT, 2018; the small sizes I. Turc et al., 2019.
    """

    def __init__(self, size: str, vocabulary: int, dropout: float = 0.1) -> None:
        super().__init__(_config(size, vocabulary, dropout))

    def forward(
        self, tokens: Tensor, segments: Tensor, real: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits of the tokens at the places (N, P), and of "follows" and "random".

        Returns:
            (N, P, V) and (N, 2).
        """
        states = _read(self.bert, tokens, segments, real)
        at = places[:, :, None].expand(-1, -1, states.shape[-1])
        pooled = self.bert.pooler(states)
        logits: tuple[Tensor, Tensor] = self.cls(states.gather(1, at), pooled)
        return logits


class SpanFinder(BertForQuestionAnswering):
    """BERT that points to the first and the last token of an answer.

    Args:
        size, vocabulary, dropout: as of `Pretraining`.
    """

    def __init__(self, size: str, vocabulary: int, dropout: float = 0.1) -> None:
        super().__init__(_config(size, vocabulary, dropout))

    def forward(self, tokens: Tensor, segments: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each token to be the first, and the last, (N, T) each."""
        logits = self.qa_outputs(_read(self.bert, tokens, segments, real))
        first, last = logits.unbind(-1)
        return first, last


class Classifier(BertForSequenceClassification):
    """BERT that puts a text, or a pair of them, into a class.

    Args:
        size, vocabulary, dropout: as of `Pretraining`.
        classes: how many.
    """

    def __init__(self, size: str, vocabulary: int, dropout: float = 0.1, classes: int = 2) -> None:
        super().__init__(_config(size, vocabulary, dropout, num_labels=classes))

    def forward(self, tokens: Tensor, segments: Tensor, real: Tensor) -> Tensor:
        """Logits of the classes, (N, classes)."""
        states = _read(self.bert, tokens, segments, real)
        logits: Tensor = self.classifier(self.dropout(self.bert.pooler(states)))
        return logits
