"""Read and check the fields of PEFT's `adapter_config.json` that decide what an adapter computes.

For a module with weight W, PEFT computes

    W + scale * B A        scale = alpha / rank, or alpha / sqrt(rank) with `use_rslora`

- `target_modules` names the modules: a list of names or of their ends; one regular expression for
  whole names; "all-linear"; or nothing, which means the query and value projections.
  `exclude_modules` removes some of these modules. `layers_to_transform` limits them to some layers.
- `rank_pattern` and `alpha_pattern` give some modules another rank or alpha. Their keys are regular
  expressions for the end of a module's name. The first one that matches counts.

Every other field must have no effect on the result. An unknown field that is set raises a UserError
that names it.
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
DEFAULT_TARGETS = ["q_proj", "v_proj"]  # PEFT's, for Llama, Qwen2 and Qwen3 alike
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
# These describe the training, the file or the base. They do not change what a trained adapter
# computes.
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
# Other initialisations change the base's weights as well (pissa, olora, corda, loftq), or the
# formula (mica).
KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The checked fields of an adapter's configuration."""

    file: Path
    base_model: str | None
    base_fingerprint: str | None  # in adapters that a run wrote
    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | list[str]
    excluded: str | list[str]
    layers: list[int]  # empty: all
    layers_patterns: list[str]  # names of the list of layers; empty: any

    def rank_of(self, module: str) -> int:
        """Return the rank of a module such as `model.layers.0.self_attn.q_proj`."""
        return _first_that_fits(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module's matrices."""
        rank = self.rank_of(module)
        alpha = _first_that_fits(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def corrects(self, module: str) -> bool:
        """Tell whether the adapter has matrices for a linear module."""
        if self.excluded and _names(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return self.targets.lower() == ALL_LINEAR or _names(self.targets, module)
        # As in PEFT, a module that is named in full is corrected whatever its layer.
        if module in self.targets:
            return True
        return _names(self.targets, module) and self._is_in_layers(module)

    def _is_in_layers(self, module: str) -> bool:
        """Tell whether a module's layer is one of those that the adapter corrects."""
        if not self.layers:
            return True
        for name in self.layers_patterns or [r"[^.]*"]:
            layer = re.match(rf".*?\.{name}\.(\d+)\.", module)
            if layer:
                return int(layer[1]) in self.layers
        return False


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the configuration of an adapter's folder.

    Raises UserError for a setting that this package does not compute.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"there is no {file}: give --adapter a folder as RUN/policies/N/adapter")
    fields = read_json(file)
    _refuse_other_methods(fields, file)
    if not {"r", "lora_alpha"} <= fields.keys():
        raise UserError(f"{file} has no r or no lora_alpha: give a LoRA adapter in PEFT's format")
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
            f"{file} sets layers_to_transform to {config.layers} and target_modules to one text, "
            "which PEFT does not allow: name the modules in a list"
        )
    return config


def _refuse_other_methods(fields: Mapping[str, Any], file: Path) -> None:
    """Check that no other field changes what is computed.

    Raises UserError that names the first field which does.
    """
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise UserError(
            f"{file} sets peft_type to {kind!r} and LORA is computed here: give a LoRA adapter"
        )
    start = fields.get("init_lora_weights")
    if not any(start is value or start == value for value in KEEP_THE_BASE):
        raise UserError(
            f"{file} sets init_lora_weights to {start!r}, by which PEFT changes the base's weights "
            "too, and that is not computed here: save the adapter converted to plain LoRA "
            "(path_initial_model_for_weight_conversion)"
        )
    for name in sorted(fields.keys() - APPLIED - WITHOUT_EFFECT):
        value = fields[name]
        if value not in (None, False, "none", "", [], {}):
            raise UserError(
                f"{file} sets {name} to {value!r}, and that is not computed here: merge the "
                "adapter into its base with PEFT (merge_and_unload) and give --init the result"
            )


def _names(modules: str | list[str], module: str) -> bool:
    """Tell whether a regular expression, or a list of names or of their ends, names a module."""
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in modules)


def _first_that_fits(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that matches the end of a module's name."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _number(value: Any, name: str, file: Path, *, is_whole: bool = False) -> Any:
    """Check a rank (`is_whole`: a number from 1) or an alpha (any finite number)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = is_number and math.isfinite(value)
    if is_valid and is_whole:
        is_valid = value >= 1 and int(value) == value
    if not is_valid:
        needed = "a whole number from 1" if is_whole else "a number"
        raise UserError(
            f"{file} sets {name} to {value!r} and {needed} is needed: correct it, or download it "
            "again"
        )
    return int(value) if is_whole else float(value)


def _boolean(fields: Mapping[str, Any], name: str, file: Path) -> bool:
    """Read a field that is true, false or absent."""
    value = fields.get(name)
    if value not in (None, True, False):
        raise UserError(f"{file} sets {name} to {value!r} and true or false is needed: correct it")
    return bool(value)


def _pattern(
    fields: Mapping[str, Any], name: str, file: Path, *, is_whole: bool = False
) -> dict[str, Any]:
    """Read a map of module names to ranks (`is_whole`) or alphas."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(
            f"{file} sets {name} to {value!r} and a map of module names is needed: correct it"
        )
    for key in value:
        _check_expression(key, name, file)
    numbers = {}
    for key, number in value.items():
        numbers[key] = _number(number, f"{name} of {key}", file, is_whole=is_whole)
    return numbers


def _targets(value: Any, file: Path) -> str | list[str]:
    """Read which modules are corrected, by default PEFT's own choice."""
    if value is None:
        return DEFAULT_TARGETS
    return _module_names(value, "target_modules", file)


def _module_names(value: Any, name: str, file: Path) -> str | list[str]:
    """Check one regular expression, or a list of names."""
    if isinstance(value, str):
        _check_expression(value, name, file)
        return value
    return _strings(value, name, file)


def _strings(value: Any, name: str, file: Path) -> list[str]:
    """Check a text or a list of texts, and return a list."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(element, str) for element in strings):
        raise UserError(
            f"{file} sets {name} to {value!r} and a text or a list of texts is needed: correct it"
        )
    return strings


def _expressions(value: Any, name: str, file: Path) -> list[str]:
    """Check a regular expression or a list of them, and return a list."""
    expressions = _strings(value, name, file)
    for expression in expressions:
        _check_expression(expression, name, file)
    return expressions


def _layers(value: Any, file: Path) -> list[int]:
    """Check one number of a layer, a list of them or none, and return a list."""
    if value is None:
        return []
    layers = [value] if isinstance(value, int) else value
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise UserError(
            f"{file} sets layers_to_transform to {value!r} and numbers of layers are needed: "
            "correct it"
        )
    return layers


def _check_expression(expression: str, name: str, file: Path) -> None:
    """Check that a text is a regular expression. Raises UserError."""
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"{file} has {expression!r} in {name}, which is no regular expression ({error})"
        ) from error
