"""Tiny texts, models and Trainers for tests; nothing is downloaded."""

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

WORDS = 40
LENGTH = 10
SEED = 3


def texts(count=64, padded=True):
    """Sequences with unequally many labels: their beginnings, as prompts, have none."""
    draw = torch.Generator().manual_seed(SEED)
    samples = []
    for _ in range(count):
        ids = torch.randint(WORDS, (LENGTH,), generator=draw)
        prompt = int(torch.randint(LENGTH - 1, (1,), generator=draw)) if padded else 0
        labels = ids.clone()
        labels[:prompt] = -100
        mask = (torch.arange(LENGTH) < LENGTH - prompt // 2).long()
        samples.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return samples


def records_of_loop(train, model, epochs=2):
    """The updates of a loop by hand, whose losses weigh by labels and whose norm is cut at 1."""
    records = []
    for _ in train.epochs(epochs):
        for step in train:
            for batch in step:
                labels = int(batch["labels"][:, 1:].ne(-100).sum())
                step.backward(model(**batch).loss, weight=labels)
            step.clip_grad_norm_(1.0)
            records.append(step.update())
    return records


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """The loss of transformers in the type of the logits, as its own is in float32."""
    total = cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size),
        labels[:, 1:].reshape(-1),
        ignore_index=-100,
        reduction="sum",
    )
    return total / (
        labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    )


def gpt(dropout=0.0, exact=False):
    """Two layers of width 16; all in float64 if `exact`."""
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=16,
            n_head=2,
            vocab_size=WORDS,
            n_positions=LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.loss_type = "ForCausalLM"  # which its name does not say, so that the first label counts
    if exact:
        model = model.double()
        model.loss_function = causal_loss
    return model


def arguments(folder, **settings):
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    } | settings
    return TrainingArguments(output_dir=str(folder), use_cpu=True, disable_tqdm=True, **settings)


def logged(trainer, *names):
    """Values that the Trainer has logged for every update."""
    return [
        tuple(line.get(name) for name in names)
        for line in trainer.state.log_history
        if "loss" in line
    ]


class Gradients(TrainerCallback):
    """Keeps the gradients of the optimizer's step, which must not change during the step."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.before = [p.grad.clone() for p in model.parameters()]

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients = [p.grad.clone() for p in model.parameters()]
        for before, after in zip(self.before, self.gradients, strict=True):
            torch.testing.assert_close(before, after, rtol=0, atol=0)
