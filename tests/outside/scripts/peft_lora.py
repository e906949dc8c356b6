"""LoRA by hand, in the shape of peft's examples: a frozen model, adapters, a loop of one's own."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, set_seed

WORDS, LENGTH, SAMPLES = 40, 12, 480


def made_sentences():
    """Words of two kinds; which kind most are of."""
    draw = torch.Generator().manual_seed(0)
    kinds = torch.randint(2, (SAMPLES,), generator=draw)
    words = (
        torch.randint(WORDS // 2, (SAMPLES, LENGTH), generator=draw) + WORDS // 2 * kinds[:, None]
    )
    return [{"input_ids": w, "labels": k} for w, k in zip(words, kinds, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--num_epochs", type=int, default=4)
    args = parser.parse_args()
    set_seed(0)
    sentences = made_sentences()
    train_dataloader = DataLoader(sentences[:400], batch_size=8, shuffle=True)
    eval_dataloader = DataLoader(sentences[400:], batch_size=40)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, intermediate_size=64, **sizes, **still)
    model = BertForSequenceClassification(config)
    peft_config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["query", "value"],
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)

    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = sum(
                (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()
                for batch in eval_dataloader
            )
        print(f"epoch {epoch}: accuracy {right / 80:.4f}")
    unmoved = all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    print("frozen", unmoved)
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
