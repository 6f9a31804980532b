"""Initial weights: normal equations against dense least squares, and every option better than as it was published."""

import pytest
import torch

from planish.compress.initialise import (
    attention_product,
    order_by_contribution,
    order_by_refit,
    order_iteratively,
    pool_heads,
    select_heads,
)
from planish.compress.normal import Normal
from planish.compress.refit import Start, Sums
from planish.compress.space import KeepHeads, LinearAttention, LinearFfn, SlidingWindow, Width


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_normal_equations_are_least_squares():
    """Streamed in ragged pieces with weights and ridge, equal to one dense solve of the stacked system."""
    x, y, weight, prior = drawn(70, 9), drawn(70, 5, seed=1), drawn(70, seed=2).exp(), drawn(5, 9, seed=3)
    normal = Normal(9, 5, x)
    for start, end in ((0, 1), (1, 40), (40, 70)):
        normal.add(x[start:end], y[start:end], weight[start:end])
    normal.close()
    root = weight.sqrt()[:, None]
    pull = (1e-2 * (root * x).square().sum(0)).sqrt()
    tall = torch.cat([root * x, torch.diag(pull)])
    expected = torch.linalg.lstsq(tall, torch.cat([root * y, pull[:, None] * prior.T])).solution.T
    found = normal.solve(prior, ridge=1e-2)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    lost = (root * (y - x @ found.T)).square().sum() / (root * y).square().sum()
    assert normal.error(found) == pytest.approx(lost.item(), rel=1e-10)


def test_kept_inputs_alone_and_outputs_of_a_known_matrix():
    x, known = drawn(60, 8), drawn(4, 8, seed=1)
    normal, direct = Normal(8, None, x), Normal(3, 4, x)
    keep = torch.tensor([5, 0, 6])
    normal.add(x)
    direct.add(x[:, keep], x @ known.T)
    normal.close()
    direct.close()
    derived = normal.derived(known)
    matrix = derived.solve(known[:, keep], ridge=1e-3, keep=keep)
    torch.testing.assert_close(matrix, direct.solve(known[:, keep], ridge=1e-3), rtol=1e-9, atol=1e-10)
    assert derived.error(matrix, keep) == pytest.approx(direct.error(matrix), rel=1e-9)
    assert derived.error(known) < 1e-14


def test_the_gram_matrix_is_whole_beyond_a_tile(monkeypatch):
    monkeypatch.setattr("planish.compress.normal._TILE", 4)
    x = drawn(20, 11)
    normal = Normal(11, None, x)
    normal.add(x)
    normal.close()
    torch.testing.assert_close(normal.gram, x.T @ x, rtol=1e-13, atol=1e-13)


def test_orders_against_brute_force():
    """The channel that goes first is the one whose loss, found by trying each, is least."""
    x, down = drawn(200, 6), drawn(3, 6, seed=1)
    x[:, 4] = x[:, 2] + 0.1 * x[:, 4]  # what one does the other can do
    gram, y = x.T @ x, x @ down.T

    def lost(gone, *, refit):
        stay = [i for i in range(6) if i not in gone]
        matrix = torch.linalg.lstsq(x[:, stay], y).solution if refit else down[:, stay].T
        return (y - x[:, stay] @ matrix).square().sum().item()

    refitted = order_by_refit(gram, down, ridge=0.0).tolist()
    assert refitted[-1] == min(range(6), key=lambda i: lost([i], refit=True))
    assert refitted[-1] in (2, 4)
    iterative = order_iteratively(gram, down).tolist()
    assert iterative[-1] == min(range(6), key=lambda i: lost([i], refit=False))
    second = min((i for i in range(6) if i != iterative[-1]), key=lambda i: lost([i, iterative[-1]], refit=False))
    assert iterative[-2] == second
    plain = order_by_contribution(x.abs().mean(0), down)
    assert plain.tolist() == (x.abs().mean(0) * down.norm(dim=0)).argsort(descending=True).tolist()
    assert sorted(refitted) == sorted(iterative) == list(range(6))


def test_heads_are_pooled_and_selected():
    weight = drawn(6 * 2, 3)
    heads = weight.view(6, 2, 3)
    pooled = pool_heads(weight, 6, 3).view(3, 2, 3)
    torch.testing.assert_close(pooled[1], (heads[2] + heads[3]) / 2)
    torch.testing.assert_close(pool_heads(weight[:, 0], 6, 2).view(2, 2)[1], heads[3:, :, 0].mean(0))
    assert torch.equal(select_heads(weight, 6, torch.tensor([4, 1])).view(2, 2, 3), heads[[4, 1]])


def test_the_product_of_values_and_output():
    """Attention of a single token is the product itself."""
    value, output, x = drawn(2 * 4, 8), drawn(8, 4 * 4, seed=1), drawn(1, 8, seed=2)
    values = (x @ value.T).view(2, 4)[torch.tensor([0, 0, 1, 1])].reshape(1, -1)
    torch.testing.assert_close(x @ attention_product(value, output, 4, 2).T, values @ output.T)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixtral"])
def test_every_option_is_better_than_as_it_was_published(library, family):
    """On tokens that were neither fitted to nor chosen by: below the best published start, and below nothing at all."""
    blocks = library(family)
    names = {name: blocks.info(name) for name in blocks if name != "ends"}
    reduced = {name: info for name, info in names.items() if info.made not in ("parent", "nothing")}
    per_layer = {"llama": 4 + 6, "qwen3": 4 + 6, "mistral": 4 + 6, "mixtral": 4 + 8}[family]
    assert len(reduced) == 3 * per_layer
    assert {name: info for name, info in reduced.items() if info.error >= info.plain_error} == {}
    assert {name: info for name, info in reduced.items() if info.error >= 1} == {}
    assert {info.error for info in names.values() if info.made == "parent"} == {0.0}
    assert {info.error for info in names.values() if info.made == "nothing"} == {1.0}


def test_what_is_said_of_an_option_is_what_it_does(library, parent, sentences):
    """The held-out error out of normal equations equals that of running the blocks on the held-out rows."""
    from planish.compress.stack import Stack

    blocks, rows = library("llama"), sentences[48:]
    stack = Stack(blocks)
    space = blocks.space.layers[1]
    hidden = list(stack.states(rows))[1]
    layer = stack.layers[1]
    around = stack.blocks.around_call(layer, hidden)
    attended = layer.self_attn(layer.input_layernorm(hidden), **around)[0]
    between = hidden + attended
    out = layer.mlp(layer.post_attention_layernorm(between))

    def error(found, expected):
        squares = expected.square().sum(-1)
        weight = 1 / (squares + 1e-6 * squares.mean(1, keepdim=True).mean())
        return ((found - expected).square().sum(-1) * weight).sum() / (squares * weight).sum()

    for option in space.attention:
        if isinstance(option, KeepHeads | SlidingWindow | LinearAttention):
            other = stack.layer(1, space.parent.__class__(attention=option, ffn=space.parent.ffn))
            normed = other.input_layernorm(hidden)
            around = stack.blocks.around_call(other, hidden) | (
                {"sliding_window": other.window} if other.hands_on else {}
            )
            found = other.self_attn(normed, **around) if not other.attends else other.self_attn(normed, **around)[0]
            expected = blocks.error(1, "attention", option)
            assert error(found, attended).item() == pytest.approx(expected, rel=1e-3, abs=1e-9), option
    for option in space.ffn:
        if isinstance(option, Width | LinearFfn):
            other = stack.layer(1, space.parent.__class__(attention=space.parent.attention, ffn=option))
            found = other.mlp(other.post_attention_layernorm(between))
            assert error(found, out).item() == pytest.approx(blocks.error(1, "ffn", option), rel=1e-3, abs=1e-9), option


def test_little_text_is_fitted_to_less():
    """With fewer tokens than inputs a weak ridge errs more than none on other tokens, and is not taken."""
    x, known, noise = drawn(400, 40), drawn(30, 40, seed=1), drawn(400, 30, seed=2)
    y = x @ known.T + 4 * noise
    start = Start(made="known", matrix=known + 0.3 * drawn(30, 40, seed=3))
    chosen = {}
    for name, tokens in (("little", 20), ("much", 300)):
        sums = Sums(40, 30, x)
        for part, rows in (("fit", slice(0, tokens)), ("choose", slice(300, 350)), ("held", slice(350, 400))):
            sums.parts[part].add(x[rows], y[rows])
        sums.close()
        errors = [
            sums.parts["choose"].error(sums.parts["fit"].solve(start.matrix, ridge=each)) for each in (1e-3, 10.0)
        ]
        chosen[name] = sums.choose([start], (1e-3, 1e-2, 0.1, 1.0, 10.0))
        assert chosen[name].error <= max(errors)
        plain = sums.parts["held"].error(start.matrix)
        sums.settle()
        assert sums.held.error(sums.solve(chosen[name])) < 1.02 * plain
    assert chosen["little"].ridge is None or chosen["little"].ridge >= 1
    assert chosen["much"].ridge is not None
    assert chosen["much"].ridge < (chosen["little"].ridge or 1e9)
