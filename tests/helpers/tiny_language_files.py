"""A text, a tokenizer and a model to pretrain, written to a folder as the Hub has them."""

import inspect
import shlex
import textwrap
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, PreTrainedTokenizerFast

WORDS = 320  # of the tokenizer: 256 bytes, and what is most frequent
LENGTH = 64


def write_language(folder: Path) -> None:
    """`train.txt` and `validation.txt`, two modules of Python; `model` with both configurations."""
    (folder / "train.txt").write_text(inspect.getsource(textwrap))
    (folder / "validation.txt").write_text(inspect.getsource(shlex))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [inspect.getsource(textwrap)], WORDS, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.save_pretrained(folder / "model")
    GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_positions=LENGTH,
        vocab_size=len(tokenizer),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder / "model")
