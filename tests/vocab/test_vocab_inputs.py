"""One clear sentence for each mistake; a budget below the smallest tile is said and takes the smallest tile."""

import warnings

import pytest
import torch

from planish.peaks.vocab.losses import linear_cross_entropy, linear_logprob


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.ones(4, 5)}, ValueError, r"`hidden` must end in the weight's 6 columns, got shape \[4, 5\]"),
        ({"hidden": torch.ones(4, 6, dtype=torch.long)}, TypeError, "`hidden` must be floating point"),
        ({"weight": torch.ones(10)}, ValueError, r"`weight` must be \[V, D\]"),
        ({"weight": torch.ones(10, 0)}, ValueError, r"`weight` must be \[V, D\]"),
        ({"bias": torch.ones(9)}, ValueError, "`bias` must have the weight's 10 rows"),
        ({"bias": torch.ones(10, dtype=torch.int)}, TypeError, "`bias` must be floating point"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, "`target` must have the shape of `hidden` without"),
        ({"target": torch.zeros(4)}, TypeError, "`target` must be whole numbers"),
        ({"target": torch.zeros(4, dtype=torch.bool)}, TypeError, "`target` must be whole numbers"),
        ({"bias": torch.ones(10, device="meta")}, ValueError, "`bias` is on meta and `weight` on cpu"),
        ({"num_valid": 3}, ValueError, "`num_valid` must be the number of targets that are not ignored, 4, got 3"),
        ({"softcap": 0.0}, ValueError, "`softcap` must be above 0"),
        ({"logit_scale": 0.0}, ValueError, "`logit_scale` must be finite and not 0"),
        ({"logit_scale": float("nan")}, ValueError, "`logit_scale` must be finite and not 0"),
        ({"tile_bytes": 0}, ValueError, "`tile_bytes` must be above 0"),
        ({"logits_dtype": "bf16"}, ValueError, '`logits_dtype` must be "auto" or "float32"'),
    ],
)
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_logprob])
def test_mistakes_of_both_functions(function, change, error, words):
    arguments = {"hidden": torch.ones(4, 6), "weight": torch.ones(10, 6), "target": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=words):
        function(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduction": "avg"}, '`reduction` must be "mean", "sum" or "none"'),
        ({"divisor": 3, "reduction": "sum"}, "`divisor` has no effect"),
        ({"divisor": 0}, "`divisor` must be above 0"),
        ({"label_smoothing": 1.5}, r"`label_smoothing` must be in \[0, 1\]"),
        ({"z_loss": -1.0}, "`z_loss` must be at least 0"),
        ({"strategy": "fast"}, "`strategy` must be one of auto, gradients-in-forward, recompute"),
        ({"strategy": "gradients-in-forward", "reduction": "none"}, "needs one loss for all tokens"),
    ],
)
def test_mistakes_of_the_loss(draw_head, change, words):
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(*draw_head(4, 6, 10).operands, **change)


def test_unknown_statistic(draw_head):
    with pytest.raises(ValueError, match="`want` must name any of nll, lse, entropy, argmax, got logits"):
        linear_logprob(*draw_head(4, 6, 10).operands, want=("nll", "logits"))


@pytest.mark.parametrize("strategy", ["auto", "gradients-in-forward", "recompute"])
def test_a_budget_below_the_smallest_tile_is_said_once_and_still_right(draw_head, strategy):
    head = draw_head(20, 6, 3000)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            loss = linear_cross_entropy(*head.operands, tile_bytes=1000, strategy=strategy)
    [warning] = said
    assert "`tile_bytes` (1000 B) is below the smallest tile for this head" in str(warning.message)
    assert warning.filename == __file__
    torch.testing.assert_close(loss, linear_cross_entropy(*head.operands))
