"""The decoder families we run, and their Hugging Face configurations.

Qwen2.5, Qwen3 and Llama-3 are one architecture that differs in three booleans (bias on query, key and value; norm on
query and key; tied embeddings) and in the rule for rotary positions. `from_hugging_face` and `to_hugging_face`
translate `config.json`; a field that would change the mathematics in a way the decoder does not compute is refused by
name, never ignored.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from mujica_jax.errors import UserError

Value = TypeVar("Value")
Family = Literal["qwen2", "qwen3", "llama"]
THEIR_NAMES = {  # where a `config.json` calls a field of ours otherwise
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
REQUIRED = ("num_heads", "hidden_size", "vocab_size", "intermediate_size", "num_layers", "max_position_embeddings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """What a family fixes for all its members."""

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
    """Llama-3.1's stretching of slow rotary frequencies to a longer context (transformers' rope type `llama3`)."""

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
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: "
                "every key head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd, rotary positions turn pairs: make it even")

    @property
    def traits(self) -> FamilyTraits:
        return FAMILIES[self.family]


def from_hugging_face(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the contents of a `config.json`, in the layout of transformers 4 or 5."""
    family: Any = config.get("model_type")
    architectures = config.get("architectures") or []
    if family not in FAMILIES or architectures not in ([], [FAMILIES[family].architecture]):
        raise UserError(
            f"the checkpoint is a {family!r} of architecture {architectures}, this decoder runs "
            f"{', '.join(traits.architecture for traits in FAMILIES.values())}: choose a checkpoint of one of these"
        )
    _refuse_other_mathematics(family, config)
    rope_theta, rope_scaling = _rotary(config)
    sizes: dict[str, Any] = {name: _required(config, THEIR_NAMES.get(name, name)) for name in REQUIRED}
    # Qwen3 leaves out head_dim where it is 128; the other two derive it from the hidden size.
    default_head_dim = 128 if family == "qwen3" else sizes["hidden_size"] // sizes["num_heads"]
    return DecoderConfig(
        **sizes,
        family=family,
        num_kv_heads=_or(config.get("num_key_value_heads"), sizes["num_heads"]),
        head_dim=_or(config.get("head_dim"), default_head_dim),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=_or(config.get("rms_norm_eps"), 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
        initializer_range=_or(config.get("initializer_range"), 0.02),
    )


def to_hugging_face(config: DecoderConfig) -> dict[str, Any]:
    """A `config.json` that transformers 4 and 5 load: rotary fields in the older layout, which both read."""
    written: dict[str, Any] = {
        "architectures": [config.traits.architecture],
        "model_type": config.family,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": "float32",
    }
    ours = {
        name: value for name, value in vars(config).items() if name not in ("family", "rope_scaling", "eos_token_ids")
    }
    written |= {THEIR_NAMES.get(name, name): value for name, value in ours.items()}
    if config.rope_scaling is not None:
        written["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    # Qwen2 has its bias by class, the others by this field, and then on the output as well.
    if config.family != "qwen2":
        written["attention_bias"] = False
    return written


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """An `eos_token_id` field, which may be absent, one id or a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _refuse_other_mathematics(family: Family, config: Mapping[str, Any]) -> None:
    """Refuse what transformers would compute and this decoder does not."""
    layers = _required(config, "num_hidden_layers")
    windowed = config.get("use_sliding_window") and config.get("sliding_window") is not None
    layer_types = config.get("layer_types") or (
        ["sliding_attention"] if windowed and config.get("max_window_layers", 28) < layers else []
    )
    unsupported = {
        "hidden_act": (_or(config.get("hidden_act"), "silu"), "silu"),
        "layer_types": (sorted(set(layer_types) - {"full_attention"}), []),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        # In Llama and Qwen3 this field puts a bias on the attention output too.
        "attention_bias": (family != "qwen2" and bool(config.get("attention_bias")), False),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for name, (found, supported) in unsupported.items():
        if found != supported:
            raise UserError(
                f"config.json sets {name} to {found!r}, this decoder computes only {supported!r}: choose another "
                "checkpoint"
            )


def _rotary(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    fields = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(_or(fields.pop("rope_theta", None), _or(config.get("rope_theta"), 10_000.0)))
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    partial = _or(fields.pop("partial_rotary_factor", None), _or(config.get("partial_rotary_factor"), 1.0))
    if partial != 1.0:
        raise UserError(
            f"partial_rotary_factor is {partial}, this decoder rotates whole heads (1.0): choose another checkpoint"
        )
    if kind == "default" and not fields:
        return theta, None
    expected = {field.name for field in dataclasses.fields(Llama3RopeScaling)}
    if kind == "llama3":
        fields.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind != "llama3" or set(fields) != expected:
        raise UserError(
            f"rope type {kind!r} with fields {sorted(fields)} is not supported, 'default' without fields and 'llama3' "
            f"with {sorted(expected)} are: choose another checkpoint, or remove a scaling that you do not need from "
            "config.json"
        )
    return theta, Llama3RopeScaling(**fields)


def _required(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"config.json has {name} = {value!r} where a positive number is needed: correct it")
    return value


def _or(value: Value | None, default: Value) -> Value:
    """The default for an absent field only: 0 is a value."""
    return default if value is None else value
