"""BERT: networks from `transformers`, WordPiece tokens from `tokenizers`."""

from bigbatch.optional_packages import import_optional

import_optional("transformers", "bert", "bigbatch-recipes")
import_optional("tokenizers", "bert", "bigbatch-recipes")
