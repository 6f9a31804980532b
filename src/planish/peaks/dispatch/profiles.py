"""Routings that break runs: the published skew profiles, for tests, benches and stress."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A share of the tokens goes to a few hot experts, the others walk through the cold ones.

    Attributes:
        percent: Tokens that go to hot experts.
        hot: Hot experts; 0: every token walks through all experts, which is as even as it gets.
    """

    percent: int = 0
    hot: int = 0

    @property
    def name(self) -> str:
        """The name that figures carry."""
        return f"{self.percent}/{self.hot}" if self.hot else "balanced"

    def ids(self, tokens: int, *, num_experts: int, top_k: int) -> Tensor:
        """Return the experts [T, K] of each token, the same on every rank.

        Hot tokens choose {j mod hot}, cold ones {hot + (i + j) mod (E - hot)}, with j below `top_k`.

        Raises:
            ValueError: More hot experts than there are.

        References:
            Flattening Every Memory Peak in Long-Context MoE Training (arXiv 2609.14306), appendix B.2.
        """
        if self.hot >= num_experts:
            raise ValueError(f"`hot` must be below the number of experts, {num_experts}; got {self.hot}.")
        token, slot = torch.arange(tokens)[:, None], torch.arange(top_k)[None, :]
        ids = self.hot + (token + slot) % (num_experts - self.hot)
        if self.hot:
            ids[: tokens * self.percent // 100] = slot % self.hot
        return ids


PUBLISHED = (
    Profile(),
    Profile(percent=30, hot=16),
    Profile(percent=50, hot=16),
    Profile(percent=80, hot=16),
    Profile(percent=95, hot=16),
    Profile(percent=50, hot=4),
)
ONE_EXPERT = Profile(percent=100, hot=1)
