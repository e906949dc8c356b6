"""BERT: networks from `transformers`, WordPiece tokens from `tokenizers`."""

from bigbatch.optional_packages import import_optional

import_optional("transformers", "transformers")
import_optional("tokenizers", "transformers")
