"""GRPO by hand: a tiny transformer copies tokens; prompts, rollouts, normalised advantages."""

import argparse
from pathlib import Path

import torch
from torch import nn

TOKENS, PROMPT, ANSWER = 6, 3, 3


class Policy(nn.Module):
    """A causal transformer over a prompt and its answer."""

    def __init__(self, width=24):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.1 * torch.randn(PROMPT + ANSWER, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.tokens(text) + self.places[: text.shape[1]]
        return self.head(self.layer(hidden, src_mask=mask, is_causal=True))


def drawn(count, generator):
    return torch.randint(TOKENS, (count, PROMPT), generator=generator)


@torch.no_grad()
def rollouts(policy, prompt, count, generator):
    """So many answers to a prompt, after it."""
    text = prompt.expand(count, -1)
    for _ in range(ANSWER):
        chances = policy(text)[:, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], 1)
    return text


def rewards(text):
    """The share of an answer that repeats its prompt."""
    return (text[:, :PROMPT] == text[:, PROMPT:]).double().mean(1)


def advantages(text):
    """Of the rollouts of one prompt: rewards less their mean, over their deviation."""
    reward = rewards(text)
    return (reward - reward.mean()) / (reward.std() + 1e-4)


def policy_loss(policy, text, advantage):
    """On-policy: the mean over rollouts and tokens of -advantage log p."""
    logits = policy(text[:, :-1])[:, PROMPT - 1 :]
    log_p = logits.log_softmax(-1).gather(2, text[:, PROMPT:, None]).squeeze(2)
    return -(advantage[:, None] * log_p).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--num_generations", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(args.steps):
        reward = 0.0
        for prompt in drawn(args.prompts, generator):
            text = rollouts(policy, prompt, args.num_generations, generator)
            advantage = advantages(text)
            loss = policy_loss(policy, text, advantage)
            (loss / args.prompts).backward()
            reward += rewards(text).mean().item() / args.prompts
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: reward {reward:.4f}")
    torch.save(policy.state_dict(), args.output_dir / "policy.pt")


if __name__ == "__main__":
    main()
