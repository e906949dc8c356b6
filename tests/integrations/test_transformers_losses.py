"""The losses that models of transformers give by themselves, in a loop of one's own."""

import warnings

import pytest
import torch
from torch.optim import SGD
from transformers import BertConfig, BertForSequenceClassification

import bigbatch as bb
from tiny_trainer import gpt, texts

SMALL = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}


def bert(kind):
    """Of two classes, or of one number."""
    labels = 2 if kind == "classes" else 1
    model = BertForSequenceClassification(
        BertConfig(vocab_size=40, num_hidden_layers=1, num_labels=labels, **SMALL)
    )
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 2} for row in texts()]
    if kind == "numbers":
        rows = [row | {"labels": row["labels"].float()} for row in rows]
    return model, rows


@pytest.mark.parametrize("kind", ["words", "classes", "numbers"])
def test_the_loss_of_a_model_is_neither_refused_nor_said(kind):
    model, rows = (gpt(), texts()) if kind == "words" else bert(kind)
    batches = [{name: torch.stack([row[name] for row in rows]) for name in rows[0]}]
    own = SGD(model.parameters(), lr=0.01)
    train = bb.AdaptiveBatch(
        model, own, batches, policy=bb.SimiGrad(0.9), batch_size=12, micro_batch=5, every=1
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mean loss|.*is a sum|the loss grows")
        for step in train:
            for batch in step:
                step.backward(model(**batch).loss)
            step.update()
    assert train.steps > 1
