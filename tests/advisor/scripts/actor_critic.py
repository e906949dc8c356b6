"""Trains an actor and a critic on made rewards."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--kind", choices=["shared", "replayed", "separate"], default="shared")
    return parser.parse_args(argv)


class ActorCritic(nn.Module):
    def __init__(self, observations=4, actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, 16), nn.Tanh())
        self.actor = nn.Linear(16, actions)
        self.critic = nn.Linear(16, 1)

    def forward(self, x):
        x = self.body(x)
        return self.actor(x), self.critic(x).squeeze(1)


def losses_of(logits, values, actions, rewards):
    distribution = torch.distributions.Categorical(logits=logits)
    advantage = rewards - values.detach()
    policy_loss = -(distribution.log_prob(actions) * advantage).mean()
    return policy_loss, 20 * nn.functional.mse_loss(values, rewards)


def train_shared(model, optimizer, observations, actions, rewards):
    """Two backwards of one forward."""
    policy_loss, value_loss = losses_of(*model(observations), actions, rewards)
    optimizer.zero_grad()
    policy_loss.backward(retain_graph=True)
    value_loss.backward()
    optimizer.step()
    return policy_loss.item() + value_loss.item()


def train_replayed(model, optimizer, observations, actions, rewards):
    """Two backwards, of two forwards of one model."""
    optimizer.zero_grad()
    policy_loss, _ = losses_of(*model(observations), actions, rewards)
    policy_loss.backward()
    _, value_loss = losses_of(*model(observations), actions, rewards)
    value_loss.backward()
    optimizer.step()
    return policy_loss.item() + value_loss.item()


def train_separate(models, optimizers, observations, actions, rewards):
    """Two networks, and two optimizers that step after their own backward."""
    logits, values = models[0](observations)[0], models[1](observations)[1]
    total = 0.0
    losses = losses_of(logits, values, actions, rewards)
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def main():
    args = parse()
    torch.manual_seed(0)
    if args.kind == "separate":
        model = ActorCritic(), ActorCritic()
        optimizer = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in model]
        train = train_separate
    else:
        model = ActorCritic()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        train = train_shared if args.kind == "shared" else train_replayed
    losses = []
    for _ in range(args.steps):
        observations = torch.randn(32, 4)
        actions = torch.randint(3, (32,))
        rewards = observations[:, 0] * (actions == 0) + torch.randn(32)
        losses.append(train(model, optimizer, observations, actions, rewards))
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
