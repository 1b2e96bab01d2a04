"""Read and check PEFT's `adapter_config.json`, which says what an adapter computes.

In a module that the adapter corrects, PEFT replaces the weight W by

    W + scale * B A        scale = alpha / rank, or alpha / sqrt(rank) with `use_rslora`

A module is a linear layer, such as `model.layers.0.self_attn.q_proj`. These fields say which
modules are corrected:

- `target_modules` selects modules. It is a list of names or of ends of names, or one regular
  expression for whole names, or "all-linear". Without it PEFT selects the query and value
  projections.
- `exclude_modules` removes some of these modules.
- `layers_to_transform` limits them to some layers.

`rank_pattern` and `alpha_pattern` give some modules another rank or alpha. Their keys are regular
expressions for the end of a module's name, and the first key that matches counts.

All other fields must leave the result unchanged. A field that is set, and that this module does not
know to be without effect, raises a UserError that names the field.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
# The modules that PEFT selects without `target_modules`, for Llama, Qwen2 and Qwen3.
DEFAULT_TARGETS = ["q_proj", "v_proj"]
# The fields that this module applies or checks.
APPLIED = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
}
# Fields that describe the training, the file or the base model. They do not change what a trained
# adapter computes.
WITHOUT_EFFECT = {
    "task_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "base_fingerprint",
    "lora_dropout",
    "megatron_core",
    "runtime_config",
    "ensure_weight_tying",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
}
# The values of `init_lora_weights` that are supported. Other initialisations also change the
# weights of the base model (pissa, olora, corda, loftq) or the formula (mica).
KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The checked fields of an adapter's configuration."""

    # The `adapter_config.json` that was read.
    file: Path
    # Name of the model that the adapter was trained on, and the fingerprint of its weights
    # (`adapters.fingerprint`). Only adapters that a run wrote have a fingerprint.
    base_model: str | None
    base_fingerprint: str | None
    # Rank and alpha of modules that no pattern matches.
    rank: int
    alpha: float
    # Whether the scale is alpha / sqrt(rank) instead of alpha / rank.
    is_rank_stabilised: bool
    # Regular expression for the end of a module's name -> rank or alpha of the module.
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    # `target_modules` and `exclude_modules`: a regular expression, or a list of names.
    targets: str | list[str]
    excluded: str | list[str]
    # Numbers of the layers that are corrected. Empty for all layers.
    layers: list[int]
    # Regular expressions for the name of the list of layers in a module's name, such as "layers" in
    # `model.layers.0`. Empty for any name.
    layers_patterns: list[str]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module such as `model.layers.0.self_attn.q_proj`."""
        return _first_that_fits(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which the product B A of a module's matrices is multiplied."""
        rank = self.rank_of(module)
        alpha = _first_that_fits(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def corrects(self, module: str) -> bool:
        """Return whether the adapter has matrices for a module."""
        if self.excluded and _names(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return self.targets.lower() == ALL_LINEAR or _names(self.targets, module)
        # As in PEFT, a module whose whole name is listed is corrected in any layer.
        if module in self.targets:
            return True
        return _names(self.targets, module) and self._is_in_layers(module)

    def _is_in_layers(self, module: str) -> bool:
        """Return whether the adapter corrects the layer that a module belongs to."""
        if not self.layers:
            return True
        for name in self.layers_patterns or [r"[^.]*"]:
            layer = re.match(rf".*?\.{name}\.(\d+)\.", module)
            if layer:
                return int(layer[1]) in self.layers
        return False


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the configuration of the adapter in a folder.

    Raises UserError if the folder has no adapter, for a malformed field, and for a setting that
    this package does not support.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise UserError(
            f"there is no {file}: set --adapter to a folder such as RUN/policies/N/adapter"
        )
    fields = read_json(file)
    _refuse_other_methods(fields, file)
    if not {"r", "lora_alpha"} <= fields.keys():
        raise UserError(
            f"{file} lacks r or lora_alpha: use the folder of a LoRA adapter in PEFT's format"
        )
    config = AdapterConfig(
        file=file,
        base_model=fields.get("base_model_name_or_path"),
        base_fingerprint=fields.get("base_fingerprint"),
        rank=_number(fields["r"], "r", file, is_whole=True),
        alpha=_number(fields["lora_alpha"], "lora_alpha", file),
        is_rank_stabilised=_boolean(fields, "use_rslora", file),
        rank_pattern=_pattern(fields, "rank_pattern", file, is_whole=True),
        alpha_pattern=_pattern(fields, "alpha_pattern", file),
        targets=_targets(fields.get("target_modules"), file),
        excluded=_module_names(fields.get("exclude_modules") or [], "exclude_modules", file),
        layers=_layers(fields.get("layers_to_transform"), file),
        layers_patterns=_expressions(fields.get("layers_pattern") or [], "layers_pattern", file),
    )
    if isinstance(config.targets, str) and config.layers:
        raise UserError(
            f"{file} sets layers_to_transform to {config.layers} and target_modules to a string, "
            "which PEFT does not allow: name the modules in a list"
        )
    return config


def _refuse_other_methods(fields: Mapping[str, Any], file: Path) -> None:
    """Check that the file asks for plain LoRA.

    Raises UserError, which names the field, for any setting that would change the result.
    """
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise UserError(
            f"{file} sets peft_type to {kind!r}, but only LORA is supported: use a LoRA adapter"
        )
    start = fields.get("init_lora_weights")
    if not any(start is value or start == value for value in KEEP_THE_BASE):
        raise UserError(
            f"{file} sets init_lora_weights to {start!r}. PEFT then also changes the weights of "
            "the base model, which is not supported: save the adapter converted to plain LoRA "
            "(path_initial_model_for_weight_conversion in PEFT)"
        )
    for name in sorted(fields.keys() - APPLIED - WITHOUT_EFFECT):
        value = fields[name]
        if value not in (None, False, "none", "", [], {}):
            raise UserError(
                f"{file} sets {name} to {value!r}, which is not supported: merge the adapter into "
                "its base with PEFT (merge_and_unload) and pass the result to --init"
            )


def _names(modules: str | list[str], module: str) -> bool:
    """Return whether `modules` selects a module.

    `modules` is a regular expression for the whole name, or a list of names or ends of names.
    """
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in modules)


def _first_that_fits(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that matches the end of a module's name, or `default`."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _number(value: Any, name: str, file: Path, *, is_whole: bool = False) -> Any:
    """Return a checked rank or alpha.

    A rank (`is_whole`) must be a whole number from 1, and an alpha a finite number. Raises
    UserError.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = is_number and math.isfinite(value)
    if is_valid and is_whole:
        is_valid = value >= 1 and int(value) == value
    if not is_valid:
        needed = "a whole number from 1" if is_whole else "a finite number"
        raise UserError(
            f"{file} sets {name} to {value!r}, which must be {needed}: correct the file or "
            "download it again"
        )
    return int(value) if is_whole else float(value)


def _boolean(fields: Mapping[str, Any], name: str, file: Path) -> bool:
    """Return a field that is true or false. An absent field is False. Raises UserError."""
    value = fields.get(name)
    if value not in (None, True, False):
        raise UserError(
            f"{file} sets {name} to {value!r}, which must be true or false: correct the file or "
            "download it again"
        )
    return bool(value)


def _pattern(
    fields: Mapping[str, Any], name: str, file: Path, *, is_whole: bool = False
) -> dict[str, Any]:
    """Return a checked field that maps names of modules to ranks (`is_whole`) or alphas.

    An absent field is an empty dictionary. Raises UserError.
    """
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(
            f"{file} sets {name} to {value!r}, which must be an object whose keys are names of "
            "modules: correct the file or download it again"
        )
    for key in value:
        _check_expression(key, name, file)
    numbers = {}
    for key, number in value.items():
        numbers[key] = _number(number, f"{name} of {key}", file, is_whole=is_whole)
    return numbers


def _targets(value: Any, file: Path) -> str | list[str]:
    """Return the checked value of `target_modules`, or PEFT's default for None."""
    if value is None:
        return DEFAULT_TARGETS
    return _module_names(value, "target_modules", file)


def _module_names(value: Any, name: str, file: Path) -> str | list[str]:
    """Return a checked field that is a regular expression or a list of names."""
    if isinstance(value, str):
        _check_expression(value, name, file)
        return value
    return _strings(value, name, file)


def _strings(value: Any, name: str, file: Path) -> list[str]:
    """Return a field that is a string or a list of strings, as a list. Raises UserError."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(element, str) for element in strings):
        raise UserError(
            f"{file} sets {name} to {value!r}, which must be a string or a list of strings: "
            "correct the file or download it again"
        )
    return strings


def _expressions(value: Any, name: str, file: Path) -> list[str]:
    """Return a field that is a regular expression or a list of them, as a list.

    Raises UserError.
    """
    expressions = _strings(value, name, file)
    for expression in expressions:
        _check_expression(expression, name, file)
    return expressions


def _layers(value: Any, file: Path) -> list[int]:
    """Return a field that is the number of a layer or a list of them, as a list.

    None is an empty list. Raises UserError.
    """
    if value is None:
        return []
    layers = [value] if isinstance(value, int) else value
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise UserError(
            f"{file} sets layers_to_transform to {value!r}, which must be a list of the numbers of "
            "layers: correct the file or download it again"
        )
    return layers


def _check_expression(expression: str, name: str, file: Path) -> None:
    """Check that a string is a valid regular expression. Raises UserError."""
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"{file} has {expression!r} in {name}, which is not a regular expression ({error}): "
            "correct the file or download it again"
        ) from error
