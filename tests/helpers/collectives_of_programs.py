"""The messages that devices send each other in a compiled program, read from its text
(`compiled.as_text()`).

    for one in collectives(text): print(one.kind, one.bytes, one.loops)

`bytes` is what a collective gives on each device: the gathered whole for an all-gather, the part
that is left for a reduce-scatter. A collective in the body of a loop is listed once and not once a
turn: `loops` says in how many loops it lies (1: in the scan over layers; 2: in a ring that the TPU
compiler made of a product in there, whose turns are collective-permutes of one device's part).
Pieces of one collective that the compiler spread over several fusions share a channel and count as
one.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "f4": 4,
}  # of the types whose names do not say; f8e4m3fn and the like do

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    rf"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?:-start)?\("
)
_CALLED = re.compile(
    r"(?P<how>body|condition|calls|to_apply|called_computations|branch_computations)=(?P<names>\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    kind: str
    bytes: int  # of its result on one device; of the largest array where it gives several
    loops: int
    source: str  # the operation of the traced function that it comes from, where the compiler says


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program, the largest first.

    Raises ValueError for a text that holds no program.
    """
    lines, entry = _computations(text)
    if entry is None:
        raise ValueError(
            "the text has no ENTRY computation: give what `compiled.as_text()` returns"
        )
    depths = _loops_around(lines, entry)
    largest_by_key: dict[str, Collective] = {}
    for name, body in lines.items():
        for line in body:
            match = _COLLECTIVE.match(line)
            if match is None or name not in depths:
                continue
            channel = _CHANNEL.search(line)
            source = _SOURCE.search(line)
            arrays = list(_array_bytes(match["type"]))
            key = f"{match['kind']} {channel[1]}" if channel else f"{name} {match['name']}"
            collective = Collective(
                kind=match["kind"],
                bytes=max(arrays, default=0),
                loops=depths[name],
                source=source[1] if source else "",
            )
            if key not in largest_by_key or collective.loops > largest_by_key[key].loops:
                largest_by_key[key] = collective

    def order(collective: Collective) -> tuple[int, str, int, str]:
        return -collective.bytes, collective.kind, collective.loops, collective.source

    return sorted(largest_by_key.values(), key=order)


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """Return the lines of each computation by its name, and the name of the entry computation."""
    lines: dict[str, list[str]] = {}
    entry = name = None
    for line in text.splitlines():
        if not line.startswith(" ") and (match := _COMPUTATION.match(line)):
            name = match["name"]
            lines[name] = []
            entry = name if match["entry"] else entry
        elif name is not None and line.startswith(" "):
            lines[name].append(line)
    return lines, entry


def _loops_around(lines: Mapping[str, list[str]], entry: str) -> dict[str, int]:
    """Return how many loops surround each computation that the entry reaches.

    A computation with several callers has the largest of their numbers.
    """
    depths = {entry: 0}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        for line in lines[name]:
            for match in _CALLED.finditer(line):
                inside = depths[name] + (match["how"] in ("body", "condition"))
                for called in re.findall(r"[\w.\-]+", match["names"]):
                    if called in lines and depths.get(called, -1) < inside:
                        depths[called] = inside
                        waiting.append(called)
    return depths


def _array_bytes(type_text: str) -> Iterator[int]:
    for kind, shape in _ARRAY.findall(type_text):
        digits = re.search(r"\d+", kind)
        bits = BITS.get(kind) or (int(digits[0]) if digits else 0)
        yield math.prod(int(size) for size in shape.split(",") if size) * bits // 8
