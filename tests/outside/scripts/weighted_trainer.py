"""The class-weighted Trainer of Hugging Face's documentation, on a small model."""

import sys

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

CLASSES = 3

draw = torch.Generator().manual_seed(1)
tokens = torch.randint(1, 40, (96, 8), generator=draw)
labels = (tokens[:, 0] > 25).long() + (tokens[:, 1] > 35).long()
train = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 30.0]).double())
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=40, num_attention_heads=2, num_labels=CLASSES, **sizes, **dropout)
model = BertForSequenceClassification(config).double()
trainer = CustomTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=sys.argv[1] + ".run",
        num_train_epochs=3,
        per_device_train_batch_size=24,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    ),
    train_dataset=train,
    optimizers=(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None),
)
trainer.train()
torch.save(model.state_dict(), sys.argv[1])
