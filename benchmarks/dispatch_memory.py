"""Claim: pipelined experts hold a small part of what transformers' grouped experts hold, the same for every routing.

Bytes beside operands, result included, by the ledger: forward peak, kept for backward, backward peak less the
gradients of weights, which both make. 4,096 tokens, 16 experts, 4 a token, 64 wide, 128 inside, fp32, with tiles of one
K-th of the routes; then two experts hot. Exact numbers: one run, no timing.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from harness import write_result
from planish.memory.ledger import Ledger
from planish.models.experts import gate_of, weights_of
from planish.peaks.dispatch.pipelined import Options, pipelined_experts
from planish.peaks.dispatch.profiles import Profile

N, E, K, H, F = 4096, 16, 4, 64, 128
SEED = 0


def measure(run: Callable[[Tensor, Tensor], Tensor], ids_leaves: list[Tensor]) -> dict[str, int]:
    """Return forward peak, bytes kept, and backward peak less weight gradients."""
    hidden, scores, *weights = ids_leaves
    upstream = torch.ones_like(hidden)
    with Ledger() as ledger:
        with ledger.phase("forward"):
            result = run(hidden, scores)
        kept = ledger.live_bytes - result.nbytes
        with ledger.phase("backward"):
            grads = torch.autograd.grad(result, ids_leaves, upstream)
            del grads
    weight_bytes = sum(each.nbytes for each in weights)
    return {
        "forward": ledger.peak_bytes["forward"],
        "kept": kept,
        "backward": ledger.peak_bytes["backward"] - result.nbytes - weight_bytes,
    }


def main() -> None:
    """Measure, print and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(num_experts=E, hidden_size=H, moe_intermediate_size=F, hidden_act="silu")
    module = Qwen3MoeExperts(config)
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.1)
    hidden, scores = torch.randn(N, H, requires_grad=True), torch.rand(N, K, requires_grad=True)
    leaves = [hidden, scores, *module.parameters()]
    figures: dict[str, dict[str, dict[str, int]]] = {}
    for profile in (Profile(), Profile(percent=80, hot=2)):
        ids = profile.ids(N, num_experts=E, top_k=K)
        module.config._experts_implementation = "grouped_mm"
        found = {"grouped_mm": measure(lambda hidden, scores, ids=ids: module(hidden, ids, scores), leaves)}
        for parts in (1, 2, 4, 8, 16, 32, 128):
            options = Options(gate=gate_of(module), tile_rows=N * K // parts, block_rows=N)
            found[f"K={parts}"] = measure(
                lambda hidden, scores, ids=ids, options=options: pipelined_experts(
                    hidden, ids, scores, weights_of(module), options
                ),
                leaves,
            )
        figures[profile.name] = found
        print(profile.name)
        for name, sizes in found.items():
            shares = (
                f"{size / 2**20:8.2f} ({size / max(1, found['grouped_mm'][phase]):6.1%})"
                for phase, size in sizes.items()
            )
            print(f"  {name:12s}", *shares)
    print(write_result("dispatch_memory", figures, seed=SEED))


if __name__ == "__main__":
    main()
