"""What a machine can do, as published: rates of products, memories and links; with them prices become seconds."""

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from planish.decode import Bytes, Count, decode, nearest
from planish.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices that are all alike, in nodes.

    Attributes:
        name: What they are called.
        kind: "cuda", or "cpu" where tensors lie in host memory.
        memory: Bytes of one device.
        devices_per_node: Devices that share a host and fast links.
        bf16_flops: Floating-point operations a second in bf16, dense.
        fp32_flops: The same in fp32.
        memory_rate: Bytes a second of the device's memory.
        link_rate: Bytes a second that one device sends to others of its node.
        network_rate: Bytes a second that one device sends to other nodes.
        host_rate: Bytes a second between a device and its host, each way.
        disk_rate: Bytes a second of the node's disk, each way.
        product_share: Share of the published rate that products reach.
        attention_share: Share of it that attention reaches.
    """

    name: str = "custom"
    kind: Literal["cuda", "cpu"] = "cuda"
    memory: Bytes
    devices_per_node: Count = 8
    bf16_flops: float
    fp32_flops: float
    memory_rate: float
    link_rate: float
    network_rate: float
    host_rate: float
    disk_rate: float = 6e9
    product_share: float = 0.65
    attention_share: float = 0.45

    def __post_init__(self) -> None:
        rates = ("bf16_flops", "fp32_flops", "memory_rate", "link_rate", "network_rate", "host_rate", "disk_rate")
        for name in rates:
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` of the hardware must be above 0, got {getattr(self, name)}.")
        for name in ("product_share", "attention_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"`{name}` of the hardware must be in (0, 1], got {getattr(self, name)}.")

    def flops(self, dtype: str) -> float:
        """Return operations a second of products in a dtype."""
        return self.fp32_flops if dtype == "fp32" else self.bf16_flops

    def exchange_rate(self, ranks: int) -> float:
        """Return bytes a second that one device sends within a group of so many ranks."""
        return self.link_rate if ranks <= self.devices_per_node else self.network_rate


KNOWN = {
    each.name: each
    for each in (
        Hardware(
            name="h200",
            memory=141 * 10**9,
            bf16_flops=989e12,
            fp32_flops=67e12,
            memory_rate=4.8e12,
            link_rate=450e9,
            network_rate=50e9,
            host_rate=55e9,
        ),
        Hardware(
            name="h100",
            memory=80 * 10**9,
            bf16_flops=989e12,
            fp32_flops=67e12,
            memory_rate=3.35e12,
            link_rate=450e9,
            network_rate=50e9,
            host_rate=55e9,
        ),
        Hardware(
            name="a100",
            memory=80 * 10**9,
            bf16_flops=312e12,
            fp32_flops=19.5e12,
            memory_rate=2.0e12,
            link_rate=300e9,
            network_rate=25e9,
            host_rate=25e9,
        ),
        Hardware(
            name="rtx4090",
            memory=24 * 10**9,
            bf16_flops=165e12,
            fp32_flops=82.6e12,
            memory_rate=1.0e12,
            link_rate=25e9,
            network_rate=1.25e9,
            host_rate=25e9,
        ),
        Hardware(
            name="cpu",
            kind="cpu",
            memory=64 * 2**30,
            devices_per_node=1,
            bf16_flops=0.2e12,
            fp32_flops=0.1e12,
            memory_rate=50e9,
            link_rate=2e9,
            network_rate=1e9,
            host_rate=20e9,
            disk_rate=1e9,
        ),
    )
}
SOURCES = "vendors' data sheets; shares that products and attention reach are assumed (0.65 and 0.45)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The file that describes a machine: `[hardware]`, with `like` for what is not said."""

    hardware: dict[str, object] = field(default_factory=dict)


def find_hardware(text: str) -> Hardware:
    """Return the hardware called `text`, or described in a TOML file of that name.

    Raises:
        UsageError: Neither, or a description that cannot be used; how to write one.
    """
    known = KNOWN.get(text.lower())
    if known is not None:
        return known
    path = Path(text)
    if not path.is_file():
        raise UsageError(
            f"`--hardware` {text!r} is neither known nor a file; {nearest(text.lower(), KNOWN)} A TOML file describes "
            'any other: `[hardware]`, `like = "h100"`, `memory = "96GiB"`, `bf16_flops = 9.9e14`.'
        )
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"`--hardware` {path} is not TOML that can be read: {error}") from error
    table = dict(decode(_File, tree).hardware)
    like = str(table.pop("like", ""))
    if like and like.lower() not in KNOWN:
        raise UsageError(f"`like` of {path} is {like!r}; {nearest(like.lower(), KNOWN)}")
    base = {} if not like else {name: getattr(KNOWN[like.lower()], name) for name in KNOWN["cpu"].__slots__}
    base["memory"] = f"{base['memory']}B" if like else None
    tree = {name: value for name, value in {**base, "name": path.stem, **table}.items() if value is not None}
    return decode(Hardware, tree, "hardware")


def with_memory(hardware: Hardware, memory: int | None) -> Hardware:
    """Return the hardware with so many bytes a device instead, where they are given."""
    return hardware if memory is None else replace(hardware, memory=memory)
