"""The HF Trainer on padding-free batches: the sequences of a row are the samples."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

import bigbatch as bb
from bigbatch.integrations.transformers import AdaptiveTrainer
from tiny_trainer import WORDS, arguments, gpt, logged

LENGTHS = [3, 9, 5, 10, 2, 7, 8, 4, 6, 10, 1, 9]


def sequences(count=48):
    draw = torch.Generator().manual_seed(0)
    lengths = (LENGTHS * count)[:count]
    return [{"input_ids": torch.randint(WORDS, (n,), generator=draw).tolist()} for n in lengths]


@pytest.mark.parametrize("boundaries", [True, False])
def test_packed_sequences_are_cut_at_their_boundaries(tmp_path, boundaries):
    seen = []

    class Watching(AdaptiveTrainer):
        def compute_loss(self, model, inputs, **settings):
            seen.append(inputs)
            return super().compute_loss(model, inputs, **settings)

    trainer = Watching(
        gpt(),
        arguments(tmp_path, per_device_train_batch_size=6, num_train_epochs=1),
        train_dataset=sequences(),
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=boundaries),
        policy=bb.Fixed(12),
        every=1,
    )
    trainer.train()
    assert [size for (size,) in logged(trainer, "batch_size")] == [12] * 4
    counts = [int((inputs["position_ids"] == 0).sum()) for inputs in seen]
    assert counts == [3] * 16  # four micro-batches of a step of twelve sequences
    tokens = sum(inputs["input_ids"].numel() for inputs in seen)
    assert tokens == sum(len(one["input_ids"]) for one in sequences())
    if boundaries:
        assert all(inputs["cu_seq_lens_q"][-1] == inputs["input_ids"].numel() for inputs in seen)
