"""Options: transformers' names mean the same, and what does not fit is refused with its remedy."""

import math

import pytest
import torch
from torch import nn

from planish.optim import Apollo
from planish.peaks.optim.apollo_options import read_transformers, split_parameters


def weight(*shape):
    return torch.ones(shape or (6, 9), requires_grad=True)


def test_transformers_optim_args_are_read_with_their_defaults():
    assert read_transformers("") == {"proj_rank": 128, "granularity": "channel", "alpha": 1.0, "update_gap": 200}
    text = "rank=1, proj=random, scale_type=tensor, scale=128, update_proj_gap=50, proj_type=std"
    assert read_transformers(text) == {
        "proj_rank": 1, "projection": "rademacher", "granularity": "tensor", "alpha": math.sqrt(128),
        "update_gap": 50, "side": "auto",
    }  # fmt: skip
    Apollo([weight()], **read_transformers(text))


def test_scale_is_the_square_of_alpha():
    ones = []
    for options in ({"scale": 9.0}, {"alpha": 3.0}):
        param = weight()
        param.grad = torch.arange(54.0).view(6, 9)
        Apollo([param], proj_rank=2, **options).step()
        ones.append(param.detach())
    assert torch.equal(*ones)


@pytest.mark.parametrize(("options", "message"), [
    ({}, "`proj_rank` must be given"),
    ({"proj_rank": 7}, r"`proj_rank` \(7\) must not exceed the projected dimension \(6\)"),
    ({"proj_rank": 0}, "`proj_rank` must be a whole number above 0, got 0"),
    ({"proj_rank": 2, "projection": "svd"}, '`projection` "svd" is not offered: the APOLLO paper'),
    ({"proj_rank": 2, "projection": "hadamard"}, '`projection` must be one of "rademacher", "gaussian", "identity"'),
    ({"proj_rank": 2, "projection": "identity"}, r'"identity" needs `proj_rank` \(2\) equal'),
    ({"proj_rank": 2, "granularity": "row"}, '`granularity` must be one of "channel", "tensor"'),
    ({"proj_rank": 2, "limiter": "on"}, '`limiter` must be one of "safe", "paper", "off"'),
    ({"proj_rank": 2, "refresh": "warm"}, '`refresh` must be one of "keep", "reset"'),
    ({"proj_rank": 2, "side": "reverse_std"}, '`side` must be one of "auto", "left", "right"'),
    ({"proj_rank": 2, "update_gap": 0}, "`update_gap` must be a whole number above 0"),
    ({"proj_rank": 2, "growth": 0.9}, "`growth` must be 1 or more"),
    ({"proj_rank": 2, "alpha": -1.0}, "`alpha` must be a number above 0"),
    ({"proj_rank": 2, "scale": 0.0}, "`scale` must be a number above 0"),
    ({"proj_rank": 2, "alpha": 1.0, "scale": 1.0}, "two names of one option"),
    ({"proj_rank": 2, "seed": -1}, "`seed` must be in"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Apollo([weight()], **options)


@pytest.mark.parametrize(("group", "message"), [
    ({"rank": 1, "proj": "svd"}, '"svd" is not offered'),
    ({"rank": 1, "proj_rank": 1}, "`rank` and `proj_rank` are two names"),
    ({"rank": 1, "scale": 4.0, "alpha": 2.0}, "`scale` and `alpha` are two names"),
])  # fmt: skip
def test_a_group_in_transformers_names_is_checked_too(group, message):
    with pytest.raises(ValueError, match=message):
        Apollo([{"params": [weight()], **group}])


@pytest.mark.parametrize(("text", "message"), [
    ("rank=x", "needs a number for 'rank'"), ("ranks=1", "no option 'ranks'; known: rank"),
])  # fmt: skip
def test_optim_args_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        read_transformers(text)


@pytest.mark.parametrize(("changed", "message"), [
    ({"seed": 1}, "`seed` of parameter group 0 is 1 here and 0 in the saved state"),
    ({"proj_rank": 3}, "`proj_rank` of parameter group 0 is 3 here and 2"),
    ({"update_gap": 7}, "`update_gap`"),
    ({"projection": "gaussian"}, "`projection`"),
    ({"side": "right"}, "`side`"),
    ({"granularity": "tensor"}, "`granularity`"),
    ({"refresh": "reset"}, "`refresh`"),
])  # fmt: skip
def test_state_of_another_projection_is_refused(changed, message):
    saved = Apollo([weight()], proj_rank=2).state_dict()
    other = Apollo([weight()], **{"proj_rank": 2} | changed)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)


def test_state_of_adamw_is_refused():
    saved = torch.optim.AdamW([weight()]).state_dict()
    with pytest.raises(ValueError, match="`proj_rank` of parameter group 0"):
        Apollo([weight()], proj_rank=2).load_state_dict(saved)


@pytest.mark.parametrize(("target", "count"), [
    ("all-linear", 3), ("all_linear", 3), (["attn"], 1), (["attn", "mlp"], 2), (r".*\.mlp", 1), ([r".*0\.m.."], 1),
])  # fmt: skip
def test_targets_are_chosen_as_transformers_does(target, count):
    model = nn.ModuleDict({
        "embed": nn.Embedding(5, 4),
        "layers": nn.ModuleList([nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 4)})]),
        "head": nn.Linear(4, 5),
    })  # fmt: skip
    projected, rest = split_parameters(model, target)
    assert len(projected) == count
    assert len(projected) + len(rest) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="names no linear layer"):
        split_parameters(model, ["absent"])
