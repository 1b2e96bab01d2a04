"""The supported decoder families, and their Hugging Face configurations.

Qwen2.5, Qwen3 and Llama-3 are one architecture. They differ in three booleans (bias on query, key
and value; norm on query and key; tied embeddings) and in the rule for rotary positions.
`from_hugging_face` and `to_hugging_face` translate `config.json`. A field that asks for mathematics
which the decoder does not compute raises an error that names the field. It is never ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from mujica_jax.errors import UserError

Value = TypeVar("Value")
Family = Literal["qwen2", "qwen3", "llama"]
# Names in a `config.json` of fields that have another name here.
THEIR_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
# Other fields that are read where a `config.json` has them, and what they hold.
FIELD_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "model_type": str,
    "architectures": list,
    "num_key_value_heads": int,
    "head_dim": int,
    "rope_theta": (int, float),
    "rope_scaling": dict,
    "rope_parameters": dict,
    "partial_rotary_factor": (int, float),
    "rms_norm_eps": (int, float),
    "initializer_range": (int, float),
    "layer_types": list,
    "max_window_layers": int,
    "bos_token_id": int,
}
POSITIVE = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """The properties that all members of a family share."""

    architecture: str  # class name in transformers
    attention_bias: bool  # bias on query, key and value, none on the output
    qk_norm: bool  # RMS norm over the head dimension of query and key, before rotation


FAMILIES: Mapping[Family, FamilyTraits] = {
    "qwen2": FamilyTraits(architecture="Qwen2ForCausalLM", attention_bias=True, qk_norm=False),
    "qwen3": FamilyTraits(architecture="Qwen3ForCausalLM", attention_bias=False, qk_norm=True),
    "llama": FamilyTraits(architecture="LlamaForCausalLM", attention_bias=False, qk_norm=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama-3.1's stretching of slow rotary frequencies to a longer context.

    transformers calls this rope type `llama3`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope scaling has high_freq_factor {self.high_freq_factor} and low_freq_factor "
                f"{self.low_freq_factor}: give a high_freq_factor above low_freq_factor"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that determines a decoder's shapes and mathematics."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int  # longest sequence the model was made for, in tokens
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    initializer_range: float  # standard deviation of freshly drawn matrices

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}: every key head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim {self.head_dim} is odd, rotary positions turn pairs: make it even"
            )

    @property
    def traits(self) -> FamilyTraits:
        return FAMILIES[self.family]

    @property
    def context_tokens(self) -> int:
        """The longest sequence that the model can read, in tokens.

        This is the length it was made for, or the length that its rotary scaling reaches.
        """
        if self.rope_scaling is None:
            return self.max_position_embeddings
        original_tokens = self.rope_scaling.original_max_position_embeddings
        scaled_tokens = int(self.rope_scaling.factor * original_tokens)
        return max(self.max_position_embeddings, scaled_tokens)


def from_hugging_face(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the contents of a `config.json`, in the layout of transformers 4 or 5."""
    _check_types(config)
    family: Any = config.get("model_type")
    architectures = config.get("architectures") or []
    if family not in FAMILIES or architectures not in ([], [FAMILIES[family].architecture]):
        raise UserError(
            f"the checkpoint is a {family!r} of architecture {architectures}, this decoder runs "
            f"{', '.join(traits.architecture for traits in FAMILIES.values())}: choose a "
            "checkpoint of one of these"
        )
    _refuse_other_mathematics(family, config)
    rope_theta, rope_scaling = _rotary(config)
    num_heads = _required(config, "num_attention_heads")
    hidden_size = _required(config, "hidden_size")
    # Qwen3 leaves out head_dim where it is 128; the other two derive it from the hidden size.
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    return DecoderConfig(
        family=family,
        vocab_size=_required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(config, "intermediate_size"),
        num_layers=_required(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_or(config.get("num_key_value_heads"), num_heads),
        head_dim=_or(config.get("head_dim"), default_head_dim),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=_or(config.get("rms_norm_eps"), 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=_required(config, "max_position_embeddings"),
        eos_token_ids=token_ids(config.get("eos_token_id"), "config.json"),
        bos_token_id=config.get("bos_token_id"),
        initializer_range=_or(config.get("initializer_range"), 0.02),
    )


def to_hugging_face(config: DecoderConfig) -> dict[str, Any]:
    """Return a `config.json` that transformers 4 and 5 load.

    Rotary fields have the older layout, which both versions read.
    """
    fields: dict[str, Any] = {
        "architectures": [config.traits.architecture],
        "model_type": config.family,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": "float32",
    }
    for name, value in vars(config).items():
        if name not in ("family", "rope_scaling", "eos_token_ids"):
            fields[THEIR_NAMES.get(name, name)] = value
    if config.rope_scaling is not None:
        fields["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    # Qwen2 has its bias by class, the others by this field, and then on the output as well.
    if config.family != "qwen2":
        fields["attention_bias"] = False
    return fields


def token_ids(value: object, file: object) -> tuple[int, ...]:
    """Read an `eos_token_id` field, which may be absent, one id or a list.

    Raises UserError that names `file`.
    """
    if value is None:
        return ()
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise UserError(
            f"{file} sets eos_token_id to {value!r} and a token id or a list of them is needed: "
            "correct it, or download it again"
        )
    return tuple(ids)


def _check_types(config: Mapping[str, Any]) -> None:
    """Check that fields hold values of their type.

    Raises UserError that names a field which does not.
    """
    type_names: dict[Any, str] = {
        str: "a text",
        list: "a list",
        dict: "a map",
        int: "a whole number",
    }
    for name, kind in FIELD_TYPES.items():
        value = config.get(name)
        if value is None:
            continue
        is_of_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not is_of_kind or (name in POSITIVE and not value > 0):
            needed = type_names.get(kind, "a number")
            positive = " above 0" if name in POSITIVE else ""
            raise UserError(
                f"config.json sets {name} to {value!r} and {needed}{positive} is needed: correct "
                "it, or download it again"
            )


def _refuse_other_mathematics(family: Family, config: Mapping[str, Any]) -> None:
    """Check that transformers would compute what this decoder computes. Raises UserError."""
    layers = _required(config, "num_hidden_layers")
    has_window = config.get("use_sliding_window") and config.get("sliding_window") is not None
    layer_types = config.get("layer_types") or []
    if not layer_types and has_window and config.get("max_window_layers", 28) < layers:
        layer_types = ["sliding_attention"]

    # Name -> (value of the file, value that the decoder computes).
    values = {
        "hidden_act": (_or(config.get("hidden_act"), "silu"), "silu"),
        "layer_types": (sorted(set(layer_types) - {"full_attention"}), []),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        # In Llama and Qwen3 this field puts a bias on the attention output too.
        "attention_bias": (family != "qwen2" and bool(config.get("attention_bias")), False),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for name, (value, supported) in values.items():
        if value != supported:
            raise UserError(
                f"config.json sets {name} to {value!r}, this decoder computes only {supported!r}: "
                "choose another checkpoint"
            )


def _rotary(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Read base and scaling of rotary positions.

    They stand in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`
    (transformers 4). Raises UserError.
    """
    fields = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    _check_rotary_numbers(fields)
    theta = float(_or(fields.pop("rope_theta", None), _or(config.get("rope_theta"), 10_000.0)))
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    partial = _or(
        fields.pop("partial_rotary_factor", None), _or(config.get("partial_rotary_factor"), 1.0)
    )
    if partial != 1.0:
        raise UserError(
            f"partial_rotary_factor is {partial}, this decoder rotates whole heads (1.0): choose "
            "another checkpoint"
        )
    if kind == "default" and not fields:
        return theta, None

    expected = {field.name for field in dataclasses.fields(Llama3RopeScaling)}
    if kind == "llama3":
        fields.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind != "llama3" or set(fields) != expected:
        raise UserError(
            f"rope type {kind!r} with fields {sorted(fields)} is not supported, 'default' without "
            f"fields and 'llama3' with {sorted(expected)} are: choose another checkpoint, or "
            "remove a scaling that you do not need from config.json"
        )
    return theta, Llama3RopeScaling(**fields)


def _check_rotary_numbers(fields: Mapping[str, Any]) -> None:
    """Check that the fields of a rotary scaling are positive numbers. Raises UserError."""
    names = {field.name for field in dataclasses.fields(Llama3RopeScaling)}
    names |= {"rope_theta", "partial_rotary_factor"}
    for name in sorted(names & fields.keys()):
        value = fields[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and value > 0):
            raise UserError(
                f"config.json sets {name} of its rotary positions to {value!r} and a number above "
                "0 is needed: correct it, or download it again"
            )


def _required(config: Mapping[str, Any], name: str) -> int:
    """Return a size that every configuration has. Raises UserError."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UserError(
            f"config.json has {name} = {value!r} where a positive number is needed: correct it"
        )
    return value


def _or(value: Value | None, default: Value) -> Value:
    """Return the default for an absent field only: 0 is a value."""
    return default if value is None else value
