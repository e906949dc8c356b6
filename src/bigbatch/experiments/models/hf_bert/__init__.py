"""BERT: networks from `transformers`, WordPieces from `tokenizers`."""

from bigbatch.optional_packages import required

required("transformers", "transformers")
required("tokenizers", "transformers")

from bigbatch.experiments.models.hf_bert.bert_heads import (
    SIZES,
    Classifier,
    Pretraining,
    SpanFinder,
)
from bigbatch.experiments.models.hf_bert.wordpiece import Pieces, train_pieces

__all__ = ["SIZES", "Classifier", "Pieces", "Pretraining", "SpanFinder", "train_pieces"]
