"""What a user types: names that bring torch only when they are used, and examples that run."""

import doctest
import subprocess
import sys

import pytest

import planish
from planish.peaks.vocab import kl, losses, ring, topk


@pytest.mark.parametrize("module", [losses, kl, topk])
def test_examples_run(module):
    outcome = doctest.testmod(module)
    assert (outcome.failed, outcome.attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("linear_logprob", losses),
        ("linear_cross_entropy", losses),
        ("LinearCrossEntropy", losses),
        ("linear_kl", kl),
        ("linear_topk_kl", topk),
    ],
)
def test_public_names(name, module):
    assert name in planish.__all__
    assert getattr(planish, name) is getattr(module, name)
    words = losses.linear_cross_entropy.__doc__ if name == "LinearCrossEntropy" else getattr(module, name).__doc__
    assert all(section in words for section in ("Memory:", "Exactness:", "Args:", "Returns:", "Raises:", "Example:"))


def test_the_ring_is_public_and_says_what_it_sends():
    assert planish.ring_linear_cross_entropy is ring.ring_linear_cross_entropy
    words = ring.ring_linear_cross_entropy.__doc__
    assert all(section in words for section in ("Memory:", "Communication:", "Exactness:", "Args:", "Raises:"))


def test_importing_planish_brings_no_torch():
    command = "import sys, planish; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
