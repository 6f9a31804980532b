"""What a family's layers hold, in symbols: the table of any of its models, without torch and without running one."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from planish.price.dispatch import Experts
from planish.price.sharding import is_expert, is_of_layer, own_part, whole_part
from planish.price.table import Holder, LayerTable, Leg, Line, Lines, Pass
from planish.shapes import ExpertsShape, FeedForwardShape, HeadShape, LayerShape, MeshShape, ModelShape

TEMPLATES = Path(__file__).parent / "templates"
HALVES = 2
"""Factors are counted in halves: rotary parts may be half a head."""


def widths(shape: ModelShape, layer: LayerShape) -> dict[str, int]:
    """Return the widths that a token's tensors have in a layer, by symbol."""
    attention = layer.attention
    found = {
        "D": shape.hidden_size,
        "H": attention.num_heads,
        "G": attention.num_kv_heads,
        "w": attention.qk_width,
        "Hw": attention.num_heads * attention.qk_width,
        "Gw": attention.num_kv_heads * attention.qk_width,
        "Hv": attention.num_heads * attention.v_width,
    }
    if shape.latent is not None:
        latent = shape.latent
        nope = attention.qk_width - latent.rope_width
        found |= {
            "r": latent.rope_width,
            "Hr": attention.num_heads * latent.rope_width,
            "Hn": attention.num_heads * nope,
            "Hnv": attention.num_heads * (nope + attention.v_width),
            "Q": latent.q_rank or 0,
            "C": latent.kv_rank,
            "Cr": latent.kv_rank + latent.rope_width,
        }
    if isinstance(layer.ffn, ExpertsShape):
        found |= {"E": layer.ffn.num_experts, "K": layer.ffn.top_k, "S": layer.ffn.shared_width}
    else:
        found["F"] = layer.ffn
    return {name: width for name, width in found.items() if width}


def rotary_width(shape: ModelShape) -> int:
    """Return the width that carries positions, which buffers grow with."""
    return shape.layers[0].attention.qk_width if shape.latent is None else shape.latent.rope_width


def kind_of(layer: LayerShape) -> str:
    """Return what tells layers apart in a template."""
    ffn = "experts" if isinstance(layer.ffn, ExpertsShape) else "dense"
    return f"{ffn} window" if layer.attention.window else ffn


@cache
def _read(model_type: str) -> Mapping[str, Any] | None:
    path = TEMPLATES / f"{model_type}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def templated_activations(shape: ModelShape) -> frozenset[str]:
    """Return the methods of feed-forward networks that the family's template has, beside the plain way."""
    tables = _template_of(shape)["tables"]
    return frozenset(name.rpartition(" ")[2] for name in tables if name.count(" ") > 1)


def has_template(shape: ModelShape) -> bool:
    """Return whether the family of `shape` has a template of its own."""
    return _read(_ALIASES.get(shape.model_type, shape.model_type)) is not None


_ALONE = MeshShape()
_NOTHING = Line()
_EMBEDDING = "model.embed_tokens.weight"
_ALIASES = {
    "mistral": "llama",
    "kimi_k2": "deepseek_v3",
    "deepseek_v2": "deepseek_v3",
    "gemma3": "gemma3_text",
    "gemma": "gemma2",
}


def table_of_shape(
    shape: ModelShape,
    *,
    dtype: str,
    boundary: str,
    activation: str = "plain",
    mesh: MeshShape = _ALONE,
    products_itemsize: int | None = None,
) -> LayerTable:
    """Return the table of a model by its family's template; of a family that has none by Llama's, or its mixture's.

    Exactness:     as `planish.train.layer_table.fit_table` would find it, for packed attention and pipelined experts.

    Args:
        shape: The model.
        dtype: "bf16", "bf16-pure" or "fp32".
        boundary: "plain", "checkpoint" or "keep" (attention).
        activation: The method of feed-forward networks: "plain", "tiled" or "bitmap".
        mesh: The ranks; the table is of what one of them holds beside the weights that it gathers.
        products_itemsize: Bytes of what experts multiply; None: as the weights.
    """
    template = _template_of(shape)
    itemsize = 4 if dtype == "fp32" else 2
    word = "" if activation == "plain" else f" {activation}"
    tree = template["tables"][f"{dtype.removesuffix('-pure')} {boundary}{word}"]
    return _Writer(shape, mesh, tree, itemsize, products_itemsize or itemsize).table()


def _template_of(shape: ModelShape) -> Mapping[str, Any]:
    mixed = any(isinstance(layer.ffn, ExpertsShape) for layer in shape.layers)
    dense = any(not isinstance(layer.ffn, ExpertsShape) for layer in shape.layers)
    name = _ALIASES.get(shape.model_type, shape.model_type)
    own = (mixed and dense and _read(f"{name}_mixed")) or _read(name)
    template = own or _read(_nearest(shape, mixed=mixed, dense=dense))
    assert template is not None
    return template


def _nearest(shape: ModelShape, *, mixed: bool, dense: bool) -> str:
    """Return the family whose layers a model's are most like, where its own has no template."""
    if shape.latent is not None:
        return "deepseek_v3"
    return "llama" if not mixed else "qwen3_moe_mixed" if dense else "qwen3_moe"


class _Writer:
    """Puts a model's widths in the place of a template's symbols."""

    def __init__(
        self, shape: ModelShape, mesh: MeshShape, tree: Mapping[str, Any], itemsize: int, products_itemsize: int
    ) -> None:
        self._shape, self._mesh, self._tree = shape, mesh, tree
        self._itemsize, self._products = itemsize, products_itemsize
        self._own_tensors = [replace(own_part(each, mesh), itemsize=itemsize) for each in shape.tensors]
        self._whole = {each.name: whole_part(each, mesh).numel * itemsize for each in shape.tensors}
        self._own = {each.name: each.numel * itemsize for each in self._own_tensors}
        self._kinds = [kind_of(layer) for layer in shape.layers]
        self._legs: dict[tuple[int, LayerShape], Leg] = {}

    def table(self) -> LayerTable:
        """Return the table; every sort of layer that the model has is one of the template's, or the nearest to it."""
        shape, tree = self._shape, self._tree
        numbers, sources = [], []
        for index, kind in enumerate(self._kinds):
            traced = self._traced(index, kind)
            key = (traced, shape.layers[index])
            if key not in sources:
                sources.append(key)
            numbers.append(sources.index(key))
        layers = [layer for _, layer in sources]
        return LayerTable(
            tensors=tuple(self._own_tensors),
            buffers_bytes=tree["buffers_per_width"] * rotary_width(shape),
            save_bytes=self._save_bytes(),
            head=HeadShape(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                itemsize=self._itemsize,
                biased=any(each.name == "lm_head.bias" for each in shape.tensors),
                softcapped=shape.logit_softcap is not None,
                scaled=tree["scaled"],
            ),
            layers=tuple(numbers),
            attention=tuple(layer.attention for layer in layers),
            experts=tuple(self._experts(layer) for layer in layers),
            feed_forwards=tuple(self._network(layer) for layer in layers) if "feed_forward" in tree else (),
            first=self._with_unknown(self._pass(tree["first"], sources)),
            later=self._pass(tree["first" if self._is_sharded else "later"], sources, again=self._is_sharded),
            evaluation=self._pass(tree["evaluation"], sources),
            buckets=self._mesh.dp == 1 < self._mesh.replicate,
        )

    def _traced(self, index: int, kind: str) -> int:
        """Return the traced layer that is most like a model's: in its place and kind, else in its kind."""
        kinds = self._tree["kinds"]
        last = len(kinds) - 1
        place = 0 if index == 0 else last if index == len(self._kinds) - 1 else None
        if place is not None and kinds[place] == kind:
            return place
        ffn = kind.split()[0]
        by_rank = (
            [number for number in range(1, last) if kinds[number] == kind],
            [number for number in range(1, last) if kinds[number].startswith(ffn)],
            [number for number, each in enumerate(kinds) if each.startswith(ffn)],
            [min(1, last)],
        )
        return next(found[0] for found in by_rank if found)

    @property
    def _is_sharded(self) -> bool:
        return self._whole != self._own

    def _pass(self, tree: Mapping[str, Any], sources: list[tuple[int, LayerShape]], *, again: bool = False) -> Pass:
        """Return a pass; where ranks share weights, one `again` adds to shards of gradients and leaves no others."""
        shape = self._shape
        edge = {"enter": shape.layers[0], "turn": shape.layers[-1], "leave": shape.layers[0]}
        parts = {}
        for part in (each.name for each in fields(Pass)):
            if part in edge:
                parts[part] = tuple(self._leg(number, edge[part]) for number in tree[part])
            else:
                legs = tree[part]
                parts[part] = tuple(
                    tuple(self._leg(number, layer) for number in legs[traced]) if legs else ()
                    for traced, layer in sources
                )
        if shape.tied and any("gradients: lm_head.weight" in change for _, _, change, *_ in self._tree["legs"]):
            later = not any(holder.category == "gradients" for leg in parts["leave"] for holder in leg.change)
            parts["leave"] = tuple(map(_added, parts["leave"]))
            if later and any(parts["leave"]):  # a later microbatch: the head's gradient waits to be added
                nbytes = self._whole[_EMBEDDING]
                *before, turned = parts["turn"]
                first, *after = parts["leave"]
                peaks = tuple(each if _fixed_bytes(each) >= nbytes else _plus(each, nbytes) for each in turned.peaks)
                parts["turn"] = (*before, replace(turned, change=_plus(turned.change, nbytes), peaks=peaks))
                parts["leave"] = (replace(first, change=_plus(first.change, -nbytes)), *after)
        if self._is_sharded:
            parts["backward"] = tuple(self._reduced(legs, again=again) for legs in parts["backward"])
            parts["leave"] = self._reduced((*parts["turn"], *parts["leave"]), again=again)[len(parts["turn"]) :]
        return Pass(**parts)

    def _with_unknown(self, which: Pass) -> Pass:
        """Return a pass whose layers leave the gradients too that the template does not know, each its even share."""
        legs = self._tree["legs"]
        known = {name.removeprefix("gradients: ") for _, _, change, *_ in legs for name in change}
        share = {
            Holder("gradients", each.name): Line(-(-each.numel * each.count * each.itemsize // len(self._kinds)))
            for each in self._own_tensors
            if each.name not in known
        }
        if not share:
            return which
        layers = ((*legs[:-1], replace(legs[-1], change=legs[-1].change | share)) for legs in which.backward)
        return replace(which, backward=tuple(layers))

    def _reduced(self, legs: tuple[Leg, ...], *, again: bool) -> tuple[Leg, ...]:
        """Return `legs` at whose end whole gradients have become this rank's shards of them."""
        if not legs:
            return legs
        grads = {holder: line for leg in legs for holder, line in leg.change.items() if holder.category == "gradients"}
        last = dict(legs[-1].change)
        for holder, line in grads.items():
            if holder.owner not in self._whole:  # a parameter that this model of the family has not
                continue
            gone = self._whole[holder.owner] - (0 if again else self._own[holder.owner])
            last[holder] = Line(last.get(holder, Line()).fixed - gone * (line.fixed > 0))
        return (*legs[:-1], replace(legs[-1], change=last))

    def _leg(self, number: int, layer: LayerShape) -> Leg:
        if (number, layer) not in self._legs:
            phase, then, change, *peaks = self._tree["legs"][number]
            symbols = {"1": 1, **widths(self._shape, layer)}
            if then.startswith("feed forward") and self._network(layer) is None:
                then = ""
            self._legs[number, layer] = Leg(
                phase=phase,
                peaks=_largest([self._lines(each, symbols) for each in peaks]),
                change=self._lines(change, symbols),
                then=then,
            )
        return self._legs[number, layer]

    def _lines(self, tree: Mapping[str, Any], symbols: Mapping[str, int]) -> Lines:
        found: Lines = {}
        for name, row in tree.items():
            token, fixed = _long(name, row)
            per_token = sum(factor * symbols.get(symbol, 0) for symbol, factor in token.items())
            nbytes = sum(factor * self._fixed(param) for param, factor in fixed.items())
            holder = _holder(name, tied=self._shape.tied)
            before = found.get(holder, _NOTHING)
            found[holder] = Line(before.fixed + nbytes // HALVES, before.per_token - -per_token // HALVES)
        return found

    def _fixed(self, name: str) -> int:
        if name == "lm_head.weight" and self._shape.tied:
            name = _EMBEDDING
        return 1 if name == "1" else self._whole.get(name, 0)

    def _experts(self, layer: LayerShape) -> Experts | None:
        ffn, facts = layer.ffn, self._tree.get("experts")
        if not isinstance(ffn, ExpertsShape) or facts is None:
            return None
        return Experts(
            hidden_size=self._shape.hidden_size,
            width=ffn.width,
            columns=ffn.width * facts["columns"],
            num_experts=-(-ffn.num_experts // self._mesh.ep),
            top_k=ffn.top_k,
            itemsize=self._itemsize,
            product_itemsize=self._products,
            score_itemsize=facts["score_itemsize"],
            biased=facts["biased"],
            transposed=facts["transposed"],
        )

    def _network(self, layer: LayerShape) -> FeedForwardShape | None:
        ffn, facts = layer.ffn, self._tree["feed_forward"]
        width = ffn.shared_width if isinstance(ffn, ExpertsShape) else ffn
        kind = kind_of(layer).split()[0]
        if not width or kind not in facts:
            return None
        gated, both, biased, keeps = facts[kind]
        return FeedForwardShape(
            hidden_size=self._shape.hidden_size,
            width=width,
            itemsize=self._itemsize,
            gated=gated,
            both=both,
            biased=biased,
            keeps=keeps,
        )

    def _save_bytes(self) -> int:
        """Return what writing takes at most.

        One layer's experts again. Over ranks a tensor brought together, twice; where there are experts a layer brought
        together, and one more of them, or two that are split both by expert and inside.
        """
        sizes = {each.name: each.numel * self._itemsize for each in self._shape.tensors}
        experts = sorted(nbytes for name, nbytes in sizes.items() if is_expert(name))
        if not self._is_sharded:
            return experts[-1] if experts else 0
        others = {name: nbytes for name, nbytes in sizes.items() if not is_expert(name)}
        again = 3 if self._mesh.vp > 1 else 2
        largest = again * max(others.values())
        if not experts:
            return largest
        pieces = 2 if 1 < self._mesh.ep < self._mesh.dp else 1
        layer = sum(experts) + sum(nbytes for name, nbytes in others.items() if is_of_layer(name))
        return max(layer + pieces * experts[-1], largest)


@cache
def _holder(name: str, *, tied: bool) -> Holder:
    holder = Holder(*name.split(": ", 1))
    return Holder(holder.category, _EMBEDDING) if tied and holder.owner == "lm_head.weight" else holder


def _largest(moments: list[Lines]) -> tuple[Lines, ...]:
    """Return the moments of which none is at most another one for every batch."""
    kept: dict[tuple[int, int], Lines] = {}
    for lines in moments:
        fixed, token = sum(each.fixed for each in lines.values()), sum(each.per_token for each in lines.values())
        if not any(fixed <= other[0] and token <= other[1] for other in kept):
            kept = {other: each for other, each in kept.items() if not (other[0] <= fixed and other[1] <= token)}
            kept[fixed, token] = lines
    return tuple(kept.values())


def _long(name: str, row: Any) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the factors of widths and of parameters that a row says, which is written as short as it can be."""
    match row:
        case int():
            return {}, {name.removeprefix("gradients: "): row}
        case [token, fixed]:
            return token, fixed
        case _:
            return row, {}


def _added(leg: Leg) -> Leg:
    """Return the leg in which the embedding's gradient is added to the head's, where both are one parameter."""
    own, sums = Holder("gradients", _EMBEDDING), Holder("layer working set", "model")
    peaks = tuple(
        {holder: _twice(line) if holder in (own, sums) else line for holder, line in each.items()} for each in leg.peaks
    )
    return replace(leg, peaks=peaks, change={holder: line for holder, line in leg.change.items() if holder != own})


def _plus(lines: Lines, nbytes: int) -> Lines:
    holder = Holder("head tiles", "loss")
    line = lines.get(holder, Line())
    return lines | {holder: Line(line.fixed + nbytes, *line[1:])}


def _fixed_bytes(lines: Lines) -> int:
    return sum(line.fixed for line in lines.values())


def _twice(line: Line) -> Line:
    return Line(*(2 * each for each in line))
