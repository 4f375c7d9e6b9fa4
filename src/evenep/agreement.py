"""What ranks must agree on, and the words they exchange to make sure (C1, C9).

R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import AgreementError, explain
from .transport import Tag, Transport


@dataclass(frozen=True, slots=True)
class StepHeader:
    """What a rank says before its counts; all but the tokens must be equal on every rank."""

    layer: int
    epoch: int
    lane: int
    weight_version: int
    policy: int
    tokens: int

    FIELDS: ClassVar = ("layer", "epoch", "lane", "weight version", "policy", "tokens")

    def words(self) -> list[int]:
        """The header as it travels."""
        return [
            self.layer, self.epoch, self.lane, self.weight_version, self.policy, self.tokens,
        ]  # fmt: skip


def gather_words(num_experts: int) -> int:
    """The most words one exchange of a step needs."""
    return len(StepHeader.FIELDS) + num_experts


def agreed_max(transport: Transport, value: int, tag: Tag, lane: int = 0) -> int:
    """The largest of the ranks' numbers. Collective."""
    words = torch.tensor([value], dtype=torch.int64)
    return int(transport.all_gather(words, tag, lane).max())


def exchange_counts(transport: Transport, header: StepHeader, counts_E: Tensor) -> Tensor:
    """Every rank's counts, int64 ``[R, E]``. The first of a step's three waits. Collective.

    Raises:
        AgreementError: ranks are in different steps, or ask for different policies.
    """
    words = torch.cat([torch.tensor(header.words(), dtype=torch.int64), counts_E])
    tag = Tag("counts", header.layer, header.epoch)
    said_RN = transport.all_gather(words, tag, header.lane)
    for i, name in enumerate(StepHeader.FIELDS[:-1]):
        said_R = said_RN[:, i]
        if not (said_R == said_R[0]).all():
            raise AgreementError(
                explain(
                    f"ranks disagree on the {name} of this step",
                    where=f"layer {header.layer}, epoch {header.epoch}",
                    got=f"by rank: {said_R.tolist()}",
                    fix="make the same calls in the same order on every rank",
                )
            )
    return said_RN[:, len(StepHeader.FIELDS) :]
