"""The supported decoder families, and the translation of their Hugging Face `config.json`.

Qwen2.5, Qwen3 and Llama-3 share one architecture. Two booleans depend on the family
(`FamilyTraits`):

                bias on query, key and value   norm on query and key
    Qwen2.5     yes                            no
    Qwen3       no                             yes
    Llama-3     no                             no

Tied embeddings and the scaling of rotary frequencies (`Llama3RopeScaling`, or none) also differ
between the models of one family.

`from_hugging_face` reads a `config.json`, and `to_hugging_face` writes one. If a field asks for a
computation that the decoder lacks, reading it raises a UserError that names the field.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from mujica_jax.errors import UserError

Value = TypeVar("Value")
Family = Literal["qwen2", "qwen3", "llama"]
# Field of `DecoderConfig` -> its name in a `config.json`, where the two differ.
THEIR_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
# Optional fields of a `config.json`, and the type that each must have.
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
# Optional fields whose value must be above 0.
POSITIVE = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """The properties that all models of a family share."""

    # Name of the model's class in transformers.
    architecture: str
    # Whether query, key and value have a bias. The attention output never has one.
    attention_bias: bool
    # Whether query and key have an RMS norm over the head dimension, before rotation.
    qk_norm: bool


FAMILIES: Mapping[Family, FamilyTraits] = {
    "qwen2": FamilyTraits(architecture="Qwen2ForCausalLM", attention_bias=True, qk_norm=False),
    "qwen3": FamilyTraits(architecture="Qwen3ForCausalLM", attention_bias=False, qk_norm=True),
    "llama": FamilyTraits(architecture="LlamaForCausalLM", attention_bias=False, qk_norm=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama-3.1's rule that stretches low rotary frequencies to a longer context.

    transformers calls this rope type `llama3`. `layers.rotary_frequencies` applies the rule.
    """

    # Divisor of the frequencies of slow pairs.
    factor: float
    # Pairs that turn less often than this within the original context are slow.
    low_freq_factor: float
    # Pairs that turn more often than this within the original context keep their frequency.
    high_freq_factor: float
    # Length of the original context, in tokens.
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope scaling has high_freq_factor {self.high_freq_factor} and low_freq_factor "
                f"{self.low_freq_factor}: set high_freq_factor above low_freq_factor"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that determines the shapes and the computation of a decoder."""

    # Architecture, which decides the traits.
    family: Family
    # Rows of the embedding. Checkpoints may have more rows than the tokenizer has tokens.
    vocab_size: int
    # Width of the residual stream.
    hidden_size: int
    # Width of the MLP.
    intermediate_size: int
    # Number of decoder layers.
    num_layers: int
    # Number of query heads.
    num_heads: int
    # Number of key and value heads. It divides the number of query heads.
    num_kv_heads: int
    # Numbers per head, even.
    head_dim: int
    # Base of the rotary frequencies.
    rope_theta: float
    # Rule that scales the rotary frequencies to a longer context. None leaves them as they are.
    rope_scaling: Llama3RopeScaling | None
    # Number that RMS norms add to the mean square.
    rms_norm_eps: float
    # Whether the output head is the embedding.
    tie_word_embeddings: bool
    # Longest sequence that the model was trained for, in tokens.
    max_position_embeddings: int
    # Ids of the tokens that end a reply.
    eos_token_ids: tuple[int, ...]
    # Id of the token that begins a text, if the model has one.
    bos_token_id: int | None
    # Standard deviation of freshly drawn matrices.
    initializer_range: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}: set num_heads to a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim {self.head_dim} is odd, and rotary positions rotate pairs of numbers: "
                "set an even head_dim"
            )

    @property
    def traits(self) -> FamilyTraits:
        """The properties of the family."""
        return FAMILIES[self.family]

    @property
    def context_tokens(self) -> int:
        """The longest sequence that the model can read, in tokens.

        This is `max_position_embeddings`, or the length that the rotary scaling reaches if that is
        longer.
        """
        if self.rope_scaling is None:
            return self.max_position_embeddings
        original_tokens = self.rope_scaling.original_max_position_embeddings
        scaled_tokens = int(self.rope_scaling.factor * original_tokens)
        return max(self.max_position_embeddings, scaled_tokens)


def from_hugging_face(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration from the contents of a `config.json`.

    The file may have the layout of transformers 4 or 5. Raises UserError for another family, for a
    missing or malformed field, and for a field that asks for a computation that the decoder lacks.
    """
    _check_types(config)
    family: Any = config.get("model_type")
    architectures = config.get("architectures") or []
    if family not in FAMILIES or architectures not in ([], [FAMILIES[family].architecture]):
        raise UserError(
            f"the checkpoint has model_type {family!r} and architectures {architectures}, but "
            "this decoder supports only "
            f"{', '.join(traits.architecture for traits in FAMILIES.values())}: choose a "
            "checkpoint of one of these"
        )
    _refuse_other_mathematics(family, config)
    rope_theta, rope_scaling = _rotary(config)
    num_heads = _required(config, "num_attention_heads")
    hidden_size = _required(config, "hidden_size")
    # Without head_dim in the file, transformers takes 128 for Qwen3, and hidden_size / num_heads
    # for the other two families.
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
    """Return the contents of a `config.json` that transformers 4 and 5 can load.

    Rotary fields have the layout of transformers 4, which both versions read.
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
    # In transformers the class of Qwen2 fixes its bias. The other two classes read this field, and
    # True would give the attention output a bias too.
    if config.family != "qwen2":
        fields["attention_bias"] = False
    return fields


def token_ids(value: object, file: object) -> tuple[int, ...]:
    """Return the ids in a field `eos_token_id`, whose value may be None, an id or a list of ids.

    Raises UserError if it is something else. The error names `file`, where the value was read.
    """
    if value is None:
        return ()
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise UserError(
            f"{file} sets eos_token_id to {value!r}, which must be a token id or a list of token "
            "ids: correct the file or download it again"
        )
    return tuple(ids)


def _check_types(config: Mapping[str, Any]) -> None:
    """Check that the optional fields have values of the right type.

    Raises UserError, which names the field, for a value of another type.
    """
    type_names: dict[Any, str] = {
        str: "a string",
        list: "a list",
        dict: "an object",
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
                f"config.json sets {name} to {value!r}, which must be {needed}{positive}: correct "
                "the file or download it again"
            )


def _refuse_other_mathematics(family: Family, config: Mapping[str, Any]) -> None:
    """Check that the file asks for no computation that the decoder lacks.

    Raises UserError, which names the field.
    """
    layers = _required(config, "num_hidden_layers")
    has_window = config.get("use_sliding_window") and config.get("sliding_window") is not None
    layer_types = config.get("layer_types") or []
    if not layer_types and has_window and config.get("max_window_layers", 28) < layers:
        layer_types = ["sliding_attention"]

    # Name -> (value in the file, value that the decoder supports).
    values = {
        "hidden_act": (_or(config.get("hidden_act"), "silu"), "silu"),
        "layer_types": (sorted(set(layer_types) - {"full_attention"}), []),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        # For Llama and Qwen3, True also gives the attention output a bias.
        "attention_bias": (family != "qwen2" and bool(config.get("attention_bias")), False),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for name, (value, supported) in values.items():
        if value != supported:
            raise UserError(
                f"config.json sets {name} to {value!r}, but this decoder supports only "
                f"{supported!r}: choose another checkpoint"
            )


def _rotary(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Return the base of the rotary frequencies and the rule that scales them.

    transformers 5 writes both into `rope_parameters`. transformers 4 writes them into `rope_theta`
    and `rope_scaling`. Raises UserError for a rule that the decoder does not support.
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
            f"config.json sets partial_rotary_factor to {partial}, but this decoder supports only "
            "1.0: choose another checkpoint"
        )
    if kind == "default" and not fields:
        return theta, None

    expected = {field.name for field in dataclasses.fields(Llama3RopeScaling)}
    if kind == "llama3":
        fields.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind != "llama3" or set(fields) != expected:
        raise UserError(
            f"config.json has the rope type {kind!r} with the fields {sorted(fields)}, but this "
            f"decoder supports 'default' without fields and 'llama3' with {sorted(expected)}: "
            "choose another checkpoint, or remove the scaling from config.json if you do not need "
            "it"
        )
    return theta, Llama3RopeScaling(**fields)


def _check_rotary_numbers(fields: Mapping[str, Any]) -> None:
    """Check that the fields of a rotary scaling are positive numbers.

    Raises UserError, which names the field.
    """
    names = {field.name for field in dataclasses.fields(Llama3RopeScaling)}
    names |= {"rope_theta", "partial_rotary_factor"}
    for name in sorted(names & fields.keys()):
        value = fields[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and value > 0):
            raise UserError(
                f"config.json sets {name} of its rotary positions to {value!r}, which must be a "
                "number above 0: correct the file or download it again"
            )


def _required(config: Mapping[str, Any], name: str) -> int:
    """Return a size that every `config.json` must have.

    Raises UserError if it is missing or is no positive whole number.
    """
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UserError(
            f"config.json sets {name} to {value!r}, which must be a positive whole number: correct "
            "the file or download it again"
        )
    return value


def _or(value: Value | None, default: Value) -> Value:
    """Return `value`, or `default` if the value is None. 0 is a value like any other."""
    return default if value is None else value
