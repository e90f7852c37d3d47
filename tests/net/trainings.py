"""Kinds of training whose step is more than one forward and backward: each is a whole step, updates included."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net.small import VOCABULARY, WIDTH, Decoder, Trunk, linear, tokens
from net.step import OwnStep
from net.table import Built, architecture, ids

LEARNING_RATE = 0.5


def update(model: nn.Module) -> None:
    """Gradient descent, in place; gradients are left for the judge."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad


class Policy(nn.Module):
    """Log-probabilities of the tokens that follow."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(layers=layers), linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logs = self.head(self.trunk(input_ids))[:, :-1].float().log_softmax(-1)
        return logs.gather(2, input_ids[:, 1:, None]).squeeze(2)


class Preferences(OwnStep):
    """A policy that is trained, and a reference beside it that is not; each is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Policy(), Policy().requires_grad_(False)

    def parts(self) -> list[nn.Module]:
        return [self.policy, self.reference]


class Grpo(Preferences):
    """Group-relative advantages, a clipped ratio to the policy that drew the tokens, a KL term; updates on one batch."""

    def step(self, input_ids: Tensor, rewards: Tensor) -> Tensor:
        with torch.no_grad():
            reference, old = self.reference(input_ids), self.policy(input_ids)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).unsqueeze(1)
        total = rewards.new_zeros(())
        for _ in range(3):
            for parameter in self.policy.parameters():
                parameter.grad = None
            logs = self.policy(input_ids)
            ratio, apart = (logs - old).exp(), reference - logs
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = (0.1 * (apart.exp() - apart - 1) - gain).mean()
            loss.backward()
            update(self.policy)
            total = total + loss.detach()
        return total


@architecture("grpo", "reinforcement, policy and reference, several updates on one batch (GRPO)", fast=True)
def grpo() -> Built:
    return Grpo(), {**tokens(batch=4), "rewards": torch.tensor([0.0, 1.0, 0.25, 2.0])}


class Dpo(Preferences):
    """Two forwards of the policy before one backward."""

    def step(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.reference(chosen).sum(1) - self.reference(rejected).sum(1)
        margin = self.policy(chosen).sum(1) - self.policy(rejected).sum(1) - before
        loss = -F.logsigmoid(0.1 * margin).mean()
        loss.backward()
        return loss


@architecture("dpo", "reinforcement, chosen and rejected by one policy (DPO)")
def dpo() -> Built:
    return Dpo(), {"chosen": ids(2, 12), "rejected": ids(2, 12)}


class ActorCritic(OwnStep):
    """A policy and a value of one trunk; a backward for each, of one graph."""

    backwards = 2

    def __init__(self) -> None:
        super().__init__()
        self.model = Heads()

    def parts(self) -> list[nn.Module]:
        return [self.model]

    def step(self, input_ids: Tensor, returns: Tensor) -> Tensor:
        logs, values = self.model(input_ids)
        gain = (logs * (returns - values.detach())).mean()
        error = F.mse_loss(values, returns)
        (-gain).backward(retain_graph=True)
        error.backward()
        return error - gain


class Heads(nn.Module):
    """Log-probabilities and a value for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.value = Trunk(layers=1), linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 1)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(input_ids)[:, :-1]
        logs = self.head(x).log_softmax(-1)
        return logs.gather(2, input_ids[:, 1:, None]).squeeze(2), torch.tanh(self.value(x)).squeeze(2)


@architecture("value-head", "reinforcement, two losses with a backward each (retain_graph)", fast=True)
def value_head() -> Built:
    return ActorCritic(), {**tokens(), "returns": torch.randn(2, 15)}


class Accumulated(OwnStep):
    """Microbatches whose gradients add up, then an update, twice; a forward without gradients in between."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(layers=1)

    def parts(self) -> list[nn.Module]:
        return [self.model]

    def step(self, input_ids: Tensor) -> Tensor:
        total: Any = 0.0
        for _ in range(2):
            for parameter in self.model.parameters():
                parameter.grad = None
            for batch in input_ids.chunk(3):
                loss = self.model(batch)["loss"] / 3
                loss.backward()
                total = total + loss.detach()
            update(self.model)
            with torch.no_grad():
                total = total + self.model(input_ids[:2])["loss"]
        return total


@architecture("accumulation", "gradient accumulation with a validation between two updates")
def accumulation() -> Built:
    return Accumulated(), tokens(batch=6, length=12)
