"""BERT: networks from `transformers`, WordPieces from `tokenizers`."""

from bigbatch.optional_packages import import_optional

import_optional("transformers", "transformers")
import_optional("tokenizers", "transformers")

from bigbatch.experiments.models.hf_bert.bert_heads import (
    SIZES,
    Classifier,
    Pretraining,
    SpanFinder,
)
from bigbatch.experiments.models.hf_bert.wordpiece import WordPieceTokenizer, train_wordpiece

__all__ = [
    "SIZES",
    "Classifier",
    "Pretraining",
    "SpanFinder",
    "WordPieceTokenizer",
    "train_wordpiece",
]
