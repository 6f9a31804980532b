"""Trees of TOML and flags in, frozen dataclasses out (and back), with one clear sentence for each mistake.

A field's type says what is accepted: `Bytes` takes "4GiB", `Count` takes 4096 or "4K", a union of dataclasses takes
a table whose `method` is the class's name in kebab case (left out where only one class has the keys given), and a
trailing underscore in a field's name is dropped from its key (`from_` is written `from`).
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from planish.errors import UsageError
from planish.units import parse_bytes, parse_count

T = TypeVar("T")

Bytes = Annotated[int, "bytes"]
Count = Annotated[int, "count"]

_EXACT_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def decode(cls: type[T], tree: Mapping[str, Any], where: str = "") -> T:
    """Return `cls` built from `tree`, whose dotted position in the whole is `where`.

    Raises:
        UsageError: An unknown key (the nearest known one is named), a value of the wrong type, or a value that
            the dataclass itself refuses.
    """
    return typing.cast(T, _decode_table(cls, tree, where))


def encode(value: Any) -> Any:
    """Return `value` as a tree that `decode` reads back to an equal value; fields that are None are left out."""
    return _encode(value, annotation=None)


def method_name(cls: type) -> str:
    """Return the tag of a method's dataclass: its name in kebab case (`StreamAdamW`: "stream-adamw")."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "-", cls.__name__).lower()


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """Return `; did you mean ...?` for the closest of `known`, or the list of them when none is close."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"known: {', '.join(options)}."


def fields_of(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return the keys that `cls` accepts, each with its field and its type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name.removesuffix("_"): (field, hints[field.name]) for field in dataclasses.fields(cls)}


def default_of(field: dataclasses.Field[Any], annotation: Any) -> Any:
    """Return a field's default as a run file has it; None where it is nothing, or where there is none."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return None if default is dataclasses.MISSING else _encode(default, annotation)


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether a value must be given."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _decode_table(cls: type, tree: Any, where: str) -> Any:
    known = fields_of(cls)
    if isinstance(tree, str) and "method" in known:
        tree = {"method": tree}
    if not isinstance(tree, Mapping):
        raise UsageError(f"`{where}` must be a table, got {tree!r}.")
    values = {}
    for key, value in tree.items():
        name = key.replace("-", "_")
        dotted = f"{where}.{name}" if where else name
        if name not in known:
            raise UsageError(f"unknown key `{dotted}`; {nearest(name, known)}")
        field, annotation = known[name]
        preferred = _default_method(field, annotation) if isinstance(value, Mapping) else None
        values[field.name] = _decode_value(annotation, value, dotted, preferred)
    missing = [name for name, (field, _) in known.items() if field.name not in values and is_required(field)]
    if missing:
        dotted = ", ".join(f"`{where}.{name}`" if where else f"`{name}`" for name in missing)
        raise UsageError(f"{dotted} must be given; it has no default.")
    try:
        return cls(**values)
    except ValueError as error:
        raise error if isinstance(error, UsageError) else UsageError(str(error)) from error


def _default_method(field: dataclasses.Field[Any], annotation: Any) -> str | None:
    default = None if is_required(field) else default_of(field, annotation)
    return default.get("method") if isinstance(default, Mapping) else None


def _decode_value(annotation: Any, value: Any, where: str, preferred: str | None = None) -> Any:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _decode_size(annotation.__metadata__[0], value, where)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(annotation), value, where, preferred)
    if origin is typing.Literal:
        return _decode_literal(typing.get_args(annotation), value, where)
    if origin is tuple:
        item = typing.get_args(annotation)[0]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_decode_value(item, each, where) for each in values)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UsageError(f"`{where}` must be a table, got {value!r}.")
        return dict(value)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _decode_table(annotation, value, where)
    return _decode_scalar(annotation, value, where)


def _decode_size(kind: str, value: Any, where: str) -> int:
    plain_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == "bytes" and plain_int and where.endswith("_bytes") and value > 0:
        return value
    if not (plain_int or isinstance(value, str)):
        kind_words = 'a size such as "4GiB"' if kind == "bytes" else 'a whole number such as 4096 or "4K"'
        raise UsageError(f"`{where}` must be {kind_words}, got {value!r}.")
    parse = parse_bytes if kind == "bytes" else parse_count
    try:
        return parse(str(value), name=where)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _decode_union(options: tuple[Any, ...], value: Any, where: str, preferred: str | None) -> Any:
    """Return the value of one of `options`; settings that name no method are `preferred`'s, or the only one's."""
    choices = [option for option in options if option is not types.NoneType]
    if value is None and len(choices) < len(options):
        return None
    if not all(dataclasses.is_dataclass(option) for option in choices) or len(choices) == 1:
        return _decode_value(choices[0], value, where)
    tree = {"method": value} if isinstance(value, str) else value
    by_name = {method_name(option): option for option in choices}
    if isinstance(tree, Mapping) and tree and "method" not in tree:
        able = [name for name, option in by_name.items() if _keys(tree) <= fields_of(option).keys()]
        able = [preferred] if preferred in able else able
        tree = tree | {"method": able[0]} if len(able) == 1 else tree
    if not isinstance(tree, Mapping) or not isinstance(tree.get("method"), str):
        raise UsageError(f"`{where}.method` must name a method; {nearest('', by_name)}")
    name = tree["method"]
    if name not in by_name:
        raise UsageError(f"`{where}.method` has no method {name!r}; {nearest(name, by_name)}")
    return _decode_table(by_name[name], {key: each for key, each in tree.items() if key != "method"}, where)


def _keys(tree: Mapping[str, Any]) -> set[str]:
    return {key.replace("-", "_") for key in tree}


def _decode_literal(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in options:
        words = ", ".join(f'"{option}"' for option in options)
        raise UsageError(f"`{where}` must be one of {words}, got {value!r}.")
    return value


def _decode_scalar(annotation: Any, value: Any, where: str) -> Any:
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation is Path and isinstance(value, str) and value:
        return Path(value)
    if annotation is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if annotation in (int, float, bool, str) and type(value) is annotation and value != "":
        return value
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text that is not empty",
        Path: "a path that is not empty",
    }
    raise UsageError(f"`{where}` must be {words[annotation]}, got {value!r}.")


def _encode(value: Any, annotation: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tree = {} if not _is_method_union(annotation) else {"method": method_name(type(value))}
        for name, (field, hint) in fields_of(type(value)).items():
            encoded = _encode(getattr(value, field.name), hint)
            if encoded is not None:
                tree[name] = encoded
        return tree
    if isinstance(value, tuple):
        item = next(iter(typing.get_args(annotation)), None)
        return [_encode(each, item if _is_method_union(item) else None) for each in value]
    if isinstance(value, Path):
        return str(value)
    if "bytes" in _metadata(annotation) and value is not None:
        return _exact_size(value)
    return value


def _metadata(annotation: Any) -> tuple[Any, ...]:
    """Return what an annotation is marked with, looking through `X | None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return sum((_metadata(option) for option in typing.get_args(annotation)), ())
    return getattr(annotation, "__metadata__", ())


def _is_method_union(annotation: Any) -> bool:
    options = [option for option in typing.get_args(annotation) if option is not types.NoneType]
    return len(options) > 1 and all(dataclasses.is_dataclass(option) for option in options)


def _exact_size(size_bytes: int) -> str:
    for unit, scale in _EXACT_UNITS:
        if size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"
