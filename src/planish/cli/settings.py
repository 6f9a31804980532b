"""Every setting of a run file with its default and its meaning, read from the dataclasses that hold them."""

import dataclasses
import json
import typing
from collections.abc import Iterator
from types import NoneType
from typing import Any

from planish.decode import default_of, fields_of, is_required, method_name
from planish.methods import Plan
from planish.runfile import RunFile

_WIDTH = 26


def describe_settings() -> str:
    """Return the settings as a text table for `--help`."""
    lines = []
    for name, (_, section) in fields_of(RunFile).items():
        lines += _plan() if section is Plan else _section(name, section)
    return "\n".join(lines)


def setting_flags() -> list[str]:
    """Return every setting outside the plan as its flag."""
    sections = [(name, section) for name, (_, section) in fields_of(RunFile).items() if section is not Plan]
    return [f"--{name}.{key}" for name, section in sections for key in fields_of(section)]


def _section(name: str, cls: type) -> Iterator[str]:
    yield ""
    yield f"[{name}]  {_summary(cls)}"
    if name == "memory":
        yield _line("--memory X", "Short for `--memory.budget X`.")
    yield from _fields(name, cls)


def _plan() -> Iterator[str]:
    """Yield each peak with the methods that bound it and their settings."""
    for peak, (field, methods) in fields_of(Plan).items():
        default = default_of(field, methods)
        told = "" if default is None else f" (default: {default['method']})"
        yield ""
        yield f"[plan.{peak}]  The method for this peak, `--plan.{peak} METHOD`.{told}"
        for cls in (each for each in typing.get_args(methods) if each is not NoneType):
            yield _line(method_name(cls), _summary(cls))
            yield from _fields(f"plan.{peak}", cls)


def _fields(prefix: str, cls: type) -> Iterator[str]:
    meanings = _meanings(cls)
    for name, (field, annotation) in fields_of(cls).items():
        default = default_of(field, annotation)
        told = " (required)" if is_required(field) else "" if default is None else f" (default: {json.dumps(default)})"
        yield _line(f"--{prefix}.{name}", f"{meanings.get(field.name, '')}{told}".strip())


def _line(name: str, meaning: str) -> str:
    return f"  {name:<{_WIDTH}} {meaning}"


def _summary(cls: Any) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _meanings(cls: type) -> dict[str, str]:
    """Return the meaning of each field, read from the docstring's `Attributes:` section."""
    known = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, str] = {}
    section = (cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    for line in map(str.strip, section.splitlines()):
        name, _, meaning = line.partition(": ")
        if name in known:
            found[name] = meaning
        elif found:
            found[list(found)[-1]] += f" {line}"
    return {name: meaning.strip() for name, meaning in found.items()}
