"""Fields of a configuration by their dotted names: what each may be, said in one sentence."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from mujica_jax.config.remote import RemoteConfig
from mujica_jax.errors import UserError


def check_types(config: Any, section: str = "") -> None:
    """A flag has the type of its field, and is one of its choices; what a configuration file says
    need not."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, hint, value = section + field.name, hints[field.name], getattr(config, field.name)
        is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        options = typing.get_args(hint) if is_union else (hint,)
        if not any(_fits(value, option) for option in options):
            what = " or ".join(map(_shown, options))
            raise UserError(
                f"{name} is {value!r} and must be {what}: change it in the configuration"
            )
        if dataclasses.is_dataclass(value):
            check_types(value, f"{name}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in options
    if origin is tuple and isinstance(value, tuple) and options[-1] is not ...:
        return len(value) == len(options) and all(map(_fits, value, options))
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(
            value, bool
        )
    kind = origin or hint
    return not isinstance(kind, type) or kind is Any or isinstance(value, kind)


def _shown(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if hint is types.NoneType:
        return "None"
    return str(hint) if typing.get_origin(hint) else getattr(hint, "__name__", str(hint))


def check_least(config: Any, least_of: Mapping[str, int | float]) -> None:
    for name, least in least_of.items():
        require(config, name, lambda value, least=least: value >= least, f"at least {least}")


def require(config: Any, name: str, holds: Callable[[float], bool], what: str) -> None:
    if (value := field_value(config, name)) is ...:
        return
    if not (isinstance(value, int | float) and math.isfinite(value) and holds(value)):
        raise UserError(
            f"{name} is {value!r} and must be {what}: change it in the configuration or pass "
            f"{flag_of(name)}"
        )


def field_value(config: Any, name: str) -> Any:
    """`...` where it is of a section of several kinds, and this kind has no such field."""
    section, _, field = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, field, ...)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_remote(remote: RemoteConfig, section: str = "remote") -> None:
    """An endpoint is described wholly, or not at all."""
    if remote.base_url is None:
        for field in dataclasses.fields(remote):
            if getattr(remote, field.name) != field.default:
                name = flag_of(f"{section}.{field.name}")
                raise UserError(
                    f"{name} is {getattr(remote, field.name)} and there is no endpoint: give "
                    f"--{section}.base-url too"
                )
        return
    for name in ("model", "mode", "tokenizer"):
        if not getattr(remote, name):
            raise UserError(
                f"--{section}.base-url is {remote.base_url} and --{section}.{name} is not given: "
                "an endpoint needs both"
            )
    for name, least in (("concurrency", 1), ("timeout_seconds", 0), ("deadline_seconds", 0)):
        value = getattr(remote, name)
        if not (math.isfinite(value) and value >= least and value > 0):
            raise UserError(
                f"{flag_of(f'{section}.{name}')} is {value} and must be "
                f"{'at least 1' if least else 'above 0'}"
            )
