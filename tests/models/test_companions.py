"""Damaged files of a checkpoint's folder: each is one sentence that names the file."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.factory import check_context
from mujica_jax.models.families import Llama3RopeScaling, from_hugging_face
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import save_checkpoint
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.runs.model import open_model
from tests.helpers.packed_rows import MODEL
from tests.helpers.tiny_embedder import tiny_embedder
from tests.helpers.tiny_models import filled_decoder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11421896\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return a checkpoint with all the files that a tokenizer may have."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoint"
    tokenizer = Tokenizer.train(iter(["Who is the director of The Purple Shore?"]), 300)
    model = dataclasses.replace(
        MODEL,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tuple(tokenizer.stop_token_ids),
        max_position_embeddings=256,
    )
    save_checkpoint(filled_decoder(model), folder, tokenizer=tokenizer)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "added_tokens.json").write_text("{}")
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        open_model(folder, "float32").load(None)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_whole_folder_is_read(folder):
    assert open_model(folder, "float32").load(None) is not None


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ],
)
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (POINTER, "is a Git LFS pointer and not the file itself: run `git lfs pull`"),
        ('{"eos_token_id": ', "is not JSON"),
        ("", "is not JSON"),
        ('["a", "list"]', "holds no JSON object"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_damaged_json_file_is_named(folder, name, content, complaint):
    (folder / name).write_text(content)
    message = refused(folder)
    assert message.startswith(f"{folder / name} {complaint}")


def test_a_file_that_is_no_utf_8_is_named(folder):
    (folder / "tokenizer_config.json").write_bytes(b'{"a": "\xff"}')
    assert refused(folder).startswith(f"{folder / 'tokenizer_config.json'} is not JSON")


def test_a_folder_in_the_place_of_a_file_is_named(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert refused(folder).startswith(f"{folder / 'config.json'} cannot be read (Is a directory)")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": [], "merges": []}}'),
        ("tokenizer.json", '{"model": []}'),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": ["a"], "chat_template": "{{ messages }}"}',
        ),
        ("tokenizer_config.json", '{"model_max_length": "long", "extra_special_tokens": 3}'),
    ],
)
def test_a_tokenizer_whose_fields_are_wrong_is_named(folder, name, content):
    (folder / name).write_text(content)
    assert refused(folder).startswith(f"{folder / name} cannot be used for this tokenizer (")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", [5, ["<|im_end|>"], {"id": 1}])
def test_a_special_token_that_is_no_text_is_named(folder, name, token):
    (folder / name).write_text(json.dumps({"eos_token": token}))
    assert refused(folder).startswith(f"{folder / name} sets eos_token to {token!r}, ")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }",
        "{% for m in messages %}{{ m['content'] }}",
        "{{ messages + 1 }}",
        "{{ nothing.of.this }}",
        "{{ messages[0]['content'] | unknown_filter }}",
        "{{ raise_exception('roles must alternate') }}",
        POINTER,
    ],
)
def test_a_broken_chat_template_is_named(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    message = refused(folder)
    assert "chat" in message
    assert "chat_template.jinja" in message or "the chat template" in message


def test_a_chat_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    assert refused(folder).startswith(f"{folder / 'chat_template.jinja'} cannot be read (")


def test_a_chat_template_without_a_closing_token_is_named(folder):
    (folder / "chat_template.jinja").write_text("hello")
    assert refused(folder).startswith(
        f"{folder / 'chat_template.jinja'}: the chat template closes a model turn with "
    )


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m['content'] }", "{{ messages + 1 }}"]
)
def test_a_broken_chat_template_of_the_configuration_is_named(folder, template):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": template}))
    assert refused(folder).startswith(f"{folder / 'tokenizer_config.json'} cannot be used (")


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("rope_scaling", ["llama3"], "sets rope_scaling to ['llama3'], which must be an object"),
        (
            "rope_parameters",
            "default",
            "sets rope_parameters to 'default', which must be an object",
        ),
        ("rope_theta", "1e6", "sets rope_theta to '1e6', which must be a number above 0"),
        ("rope_theta", 0, "sets rope_theta to 0, which must be a number above 0"),
        (
            "architectures",
            "Qwen3ForCausalLM",
            "sets architectures to 'Qwen3ForCausalLM', which must be a list",
        ),
        ("model_type", ["qwen3"], "sets model_type to ['qwen3'], which must be a string"),
        (
            "num_key_value_heads",
            0,
            "sets num_key_value_heads to 0, which must be a whole number above 0",
        ),
        (
            "num_key_value_heads",
            "2",
            "sets num_key_value_heads to '2', which must be a whole number",
        ),
        ("head_dim", 8.0, "sets head_dim to 8.0, which must be a whole number"),
        ("rms_norm_eps", {}, "sets rms_norm_eps to {}, which must be a number"),
        (
            "layer_types",
            {"0": "full_attention"},
            "sets layer_types to {'0': 'full_attention'}, which must be a list",
        ),
        (
            "eos_token_id",
            "<|im_end|>",
            "sets eos_token_id to '<|im_end|>', which must be a token id or a list of token ids",
        ),
        ("eos_token_id", [1, None], "sets eos_token_id to [1, None], which must be a token id"),
        ("bos_token_id", [1], "sets bos_token_id to [1], which must be a whole number"),
        ("hidden_size", "16", "sets hidden_size to '16', which must be a positive whole number"),
        ("hidden_size", True, "sets hidden_size to True, which must be a positive whole number"),
        (
            "rope_scaling",
            {"rope_type": "llama3", "factor": "8"},
            "sets factor of its rotary positions to '8'",
        ),
    ],
)
def test_a_field_of_the_configuration_with_a_wrong_value_is_named(folder, field, value, complaint):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {field: value}))
    assert f"config.json {complaint}" in refused(folder)


@pytest.mark.parametrize("value", ["<|im_end|>", [[1]], {"id": 1}, -1])
def test_a_stop_token_that_is_no_id_is_named(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert refused(folder).startswith(
        f"{folder / 'generation_config.json'} sets eos_token_id to {value!r}, "
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (POINTER, "is a Git LFS pointer"),
        ("[]", "holds no JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": ["model.safetensors"]}', "has no weight_map"),
        ('{"weight_map": {"model.norm.weight": 1}}', "has no weight_map"),
    ],
)
def test_a_damaged_index_of_weights_is_named(folder, content, complaint):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    assert refused(folder).startswith(f"{folder / 'model.safetensors.index.json'} {complaint}")


def test_weights_that_are_a_pointer_are_named(folder):
    (folder / "model.safetensors").write_text(POINTER)
    assert refused(folder).startswith(f"{folder / 'model.safetensors'} is a Git LFS pointer")


@pytest.mark.parametrize(
    "name", ["modules.json", "pooling/config.json", "config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("content", [POINTER, '{"a": ', '"text"'])
def test_a_damaged_file_of_an_embedder_is_named(tmp_path, name, content):
    folder = tmp_path / "embedder"
    tiny_embedder(folder)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "pooling").mkdir()
    (folder / "pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    find_embedder(str(folder)).load()
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=f"^{folder / name} "):
        find_embedder(str(folder)).load()


def test_a_conversation_beyond_the_models_context_is_refused_with_both_numbers():
    model = dataclasses.replace(MODEL, max_position_embeddings=256)
    check_context(model, 256)
    with pytest.raises(
        UserError,
        match=r"may have 4,000 tokens, but the model reads at most 256 .max_position_embeddings",
    ):
        check_context(model, 4000)


def test_a_rotary_scaling_reaches_further():
    scaling = Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256
    )
    model = dataclasses.replace(MODEL, max_position_embeddings=256, rope_scaling=scaling)
    assert model.context_tokens == 2048
    # Llama-3.1 states the length that its scaling was tuned for.
    longer = dataclasses.replace(model, max_position_embeddings=131_072)
    assert longer.context_tokens == 131_072


def test_an_evaluation_with_a_context_beyond_the_models_is_refused(folder, tmp_path, capsys):
    words = [
        "tiny_world",
        "--init",
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "--agent.max-trajectory-tokens",
        "4000",
    ]
    assert evaluation.main(words) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert "4,000 tokens" in message
    assert "at most 256" in message


def test_a_checkpoint_without_a_chat_template_is_refused_before_anything_is_played(
    folder, tmp_path, capsys
):
    (folder / "chat_template.jinja").write_text("")
    limits = [
        "--agent.kind",
        "direct",
        "--agent.max-turn-tokens",
        "8",
        "--agent.max-trajectory-tokens",
        "256",
    ]
    assert (
        evaluation.main(
            ["tiny_world", "--init", str(folder), "--out", str(tmp_path / "out"), *limits]
        )
        == 2
    )
    output = capsys.readouterr()
    assert (
        output.err.strip()
        .splitlines()[-1]
        .startswith("error: the tokenizer has no chat template: use the checkpoint")
    )
    assert "episodes" not in output.out + output.err


def test_from_hugging_face_still_reads_what_transformers_writes(folder):
    assert (
        from_hugging_face(json.loads((folder / "config.json").read_text())).max_position_embeddings
        == 256
    )
