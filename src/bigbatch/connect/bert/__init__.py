"""BERT: networks from `transformers`, WordPieces from `tokenizers`."""

from bigbatch.connect.packages import required

required("transformers", "transformers")
required("tokenizers", "transformers")

from bigbatch.connect.bert.networks import SIZES, Classifier, Pretraining, SpanFinder
from bigbatch.connect.bert.pieces import Pieces, train_pieces

__all__ = ["SIZES", "Classifier", "Pieces", "Pretraining", "SpanFinder", "train_pieces"]
