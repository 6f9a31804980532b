"""Writes the templates of bytes that the package ships for families of models; run it when a library changes.

Not a measurement: a small model of each family, whose widths are all different, runs on tensors without data; each
tensor's bytes a token are then one width times a small number, and its fixed bytes those of one parameter.
"""

import json
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from planish.decode import method_name
from planish.methods import Checkpoint, Pipelined, Plain, Plan
from planish.plan.offers import activation_methods
from planish.price.config import read_config
from planish.price.store import libraries
from planish.price.table import LayerTable, Leg, Line, Lines
from planish.price.template import HALVES, TEMPLATES, kind_of, rotary_width, widths
from planish.sections import ModelSection
from planish.shapes import ModelShape
from planish.train.layer_table import SPELLED_BASE, fit_table, spelled

BASIC = {
    "hidden_size": 15 * 151,
    "intermediate_size": 1097,
    "num_hidden_layers": 4,
    "num_attention_heads": 15,
    "num_key_value_heads": 3,
    "head_dim": 44,
    "vocab_size": 1999,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 15,
    "kv_lora_rank": 139,
    "q_lora_rank": 163,
    "qk_nope_head_dim": 34,
    "qk_rope_head_dim": 22,
    "v_head_dim": 58,
}
GROUPED = {"n_routed_experts": 29, "num_experts_per_tok": 5, "moe_intermediate_size": 127, "n_shared_experts": 1}
SIGMOID = GROUPED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "num_hidden_layers": 5}
LOCAL = {"num_local_experts": 29, "num_experts_per_tok": 5}
EXPERTS = {"num_experts": 29, "num_experts_per_tok": 5, "moe_intermediate_size": 127}
MIXED = {"mlp_only_layers": [0, 1], "num_hidden_layers": 5}
SLIDING = {"sliding_window": 8, "query_pre_attn_scalar": 44}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "nemotron": ("NemotronConfig", {}),
    "nanochat": ("NanoChatConfig", {}),
    "gemma2": ("Gemma2Config", SLIDING),
    "gemma3_text": ("Gemma3TextConfig", SLIDING),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "mixtral": ("MixtralConfig", LOCAL),
    "phimoe": ("PhimoeConfig", LOCAL),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", EXPERTS | MIXED),
    "olmoe": ("OlmoeConfig", {"hidden_size": 15 * 44, "num_experts": 29, "num_experts_per_tok": 5}),
    "granitemoe": ("GraniteMoeConfig", LOCAL),
    "gpt_oss": ("GptOssConfig", LOCAL | {"sliding_window": 8}),
    "glm4_moe": ("Glm4MoeConfig", SIGMOID),
    "deepseek_v2": ("DeepseekV2Config", LATENT | SIGMOID | {"head_dim": 22}),
    "deepseek_v3": ("DeepseekV3Config", LATENT | SIGMOID | {"head_dim": 22}),
}
_POWERS = (0, 1, 2, 4, 8, 16)
BOUNDARIES = {"checkpoint": Checkpoint(), "keep": Checkpoint(keep_attention=True), "plain": Plain()}


class Speller:
    """Knows what each number of bytes is made of.

    Args:
        found: The small model's widths, which must tell themselves apart.
        tensors: Bytes of each parameter by name.
    """

    def __init__(self, found: dict[str, int], tensors: dict[str, int]) -> None:
        self.symbols = ["1", *found]
        self.params = ["1", *tensors]
        self._found, self._tensors = found, tensors
        odd = {width: width // (width & -width) for width in found.values()}
        assert len(set(odd.values())) == len(odd), f"widths are multiples of one another: {found}"
        self._per_token: dict[int, tuple[str, int]] = {}
        for name, width in found.items():
            for halves in (1, 2, 4, 8, 16, 32):
                if width * halves % HALVES == 0:
                    self._per_token.setdefault(width * halves // HALVES, (name, halves))

    def __call__(self, line: Line) -> Line:
        """Return the line in symbols."""
        assert not line.per_square
        assert not line.per_row
        return Line(fixed=self._fixed(line.fixed), per_token=self._token(line.per_token))

    def _token(self, value: int) -> int:
        if value in _POWERS:
            return value * HALVES
        if value not in self._per_token:
            raise ValueError(f"{value} bytes a token are no width of {self._found}.")
        name, halves = self._per_token[value]
        return halves * SPELLED_BASE ** self.symbols.index(name)

    def _fixed(self, value: int) -> int:
        if abs(value) <= 4096 and value not in self._tensors.values():
            return value * HALVES
        for factor in (Fraction(1), Fraction(2), Fraction(1, 2), Fraction(4)):
            for name, nbytes in self._tensors.items():
                if nbytes * factor == value:
                    return int(factor * HALVES) * SPELLED_BASE ** self.params.index(name)
        raise ValueError(f"{value} fixed bytes are no parameter's: {self._tensors}.")


def main() -> None:
    """Write one file for each family, or for those that are named."""
    for name in sys.argv[1:] or FAMILIES:
        tree = {"made_with": libraries(), "tables": dict(_tables(name))}
        (TEMPLATES / f"{name}.json").write_text(json.dumps(tree, separators=(",", ":")) + "\n")
        sys.stdout.write(f"{name}\n")


def _tables(name: str) -> Iterator[tuple[str, Any]]:
    cls, extra = FAMILIES[name]
    config = getattr(transformers, cls)(**BASIC | extra)
    shape = read_config(config.to_dict())
    for dtype in ("bf16", "fp32"):
        for word, boundary in BOUNDARIES.items():
            dispatch = Pipelined() if any(not isinstance(each.ffn, int) for each in shape.layers) else Plain()
            for activation in (Plain(), *activation_methods(shape)):
                plan = Plan(boundary=boundary, dispatch=dispatch, activation=activation)
                named = "" if isinstance(activation, Plain) else f" {method_name(type(activation))}"
                yield f"{dtype} {word}{named}", _template(config, plan, dtype)


def _template(config: PretrainedConfig, plan: Plan, dtype: str) -> dict[str, Any]:
    shape = read_config(config.to_dict())
    itemsize = 2 if dtype == "bf16" else 4
    found: dict[str, int] = {}
    for layer in shape.layers:
        found |= widths(shape, layer)
    tensors = {each.name: each.numel * itemsize for each in shape.tensors}
    speller = Speller(found, tensors)
    table = fit_table(config, ModelSection(config=Path("small"), dtype=dtype), plan, rows=1, spell=speller)
    return _to_tree(table, speller, shape)


def _to_tree(table: LayerTable, speller: Speller, shape: ModelShape) -> dict[str, Any]:
    rows: list[Any] = []
    kinds = [kind_of(layer) for layer in shape.layers]

    def number(leg: Leg) -> int:
        row = [leg.phase, leg.then, *(_lines(each, speller) for each in (leg.change, *leg.peaks))]
        if row not in rows:
            rows.append(row)
        return rows.index(row)

    def place(legs: Any) -> Any:
        return [number(each) if isinstance(each, Leg) else place(each) for each in legs]

    passes = {
        which: {
            part: place(getattr(getattr(table, which), part))
            for part in ("enter", "forward", "turn", "backward", "leave")
        }
        for which in ("first", "later", "evaluation")
    }
    kind_by_number = {number: kinds[index] for index, number in enumerate(table.layers)}
    networks = {
        kind_by_number[number].split()[0]: [each.gated, each.both, each.biased, each.keeps]
        for number, each in enumerate(table.feed_forwards)
        if each is not None
    }
    experts = next((each for each in table.experts if each is not None), None)
    return {
        "kinds": [kind_by_number[number] for number in range(len(table.attention))],
        "buffers_per_width": -(-table.buffers_bytes // rotary_width(shape)),
        "scaled": table.head.scaled,
        "softcapped": table.head.softcapped,
        "biased": table.head.biased,
        **(
            {}
            if experts is None
            else {
                "experts": {
                    "columns": experts.columns // experts.width,
                    "biased": experts.biased,
                    "transposed": experts.transposed,
                    "score_itemsize": experts.score_itemsize,
                }
            }
        ),
        **({"feed_forward": networks} if networks else {}),
        "legs": rows,
        **passes,
    }


def _lines(lines: Lines, speller: Speller) -> dict[str, Any]:
    """Return what each holder has: halves of each width a token, then halves of each parameter.

    The gradient of a tied head would be the embedding's: it goes by the head's own name here.
    """
    found: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    for holder, line in lines.items():
        owner = holder.owner if holder.category == "gradients" else "layers" if "layers" in holder.owner else "model"
        row = found.setdefault(f"{holder.category}: {owner}", ({}, {}))
        spelled_out = (line.per_token, speller.symbols), (line.fixed, speller.params)
        for part, (value, names) in zip(row, spelled_out, strict=True):
            for symbol, digit in zip(names, spelled(value), strict=False):
                name = "lm_head.weight" if "lm_head" in holder.owner and symbol != "1" and part is row[1] else symbol
                part[name] = part.get(name, 0) + digit
    return {
        name: _short(name, *({key: n for key, n in part.items() if n} for part in row)) for name, row in found.items()
    }


def _short(name: str, token: dict[str, int], fixed: dict[str, int]) -> Any:
    """Return how a line is written: a gradient's factor alone, the widths alone where nothing is fixed."""
    if name.startswith("gradients: ") and not token:
        return sum(fixed.values())
    return [token, fixed] if fixed else token


if __name__ == "__main__":
    main()
