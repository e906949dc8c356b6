"""BERT: networks from `transformers`, WordPiece tokens from `tokenizers`."""

from bigbatch.optional_packages import required

required("transformers", "transformers")
required("tokenizers", "transformers")
