"""Find a cross-encoder by its name: a folder, or a Hugging Face name."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mujica_jax.errors import UserError
from mujica_jax.models.hub import hub_name, model_folder, why_local
from mujica_jax.retrieval.embedding.find import hashes_of_files

if TYPE_CHECKING:
    from mujica_jax.retrieval.embedding.cross_encoder import CrossEncoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEncoderFolder:
    """The folder of a cross-encoder. The weights are not loaded."""

    folder: Path
    # The longest pair of query and passage, in tokens.
    max_tokens: int

    @functools.cached_property
    def version(self) -> str:
        """A hash of everything on which a score depends: weights, tokenizer, sizes, longest pair.

        Raises UserError if a file is missing.
        """
        settings = json.dumps({"max_tokens": self.max_tokens})
        digest = hashlib.sha256(settings.encode())
        digest.update(hashes_of_files(self.folder))
        return digest.hexdigest()[:16]

    def load(self) -> "CrossEncoder":
        """Load the cross-encoder.

        Products are computed in float32 on a CPU, and in bfloat16 on an accelerator.
        """
        import jax
        import jax.numpy as jnp

        from mujica_jax.retrieval.embedding.cross_encoder import load_cross_encoder

        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        return load_cross_encoder(self.folder, dtype=dtype)


def find_cross_encoder(name: str) -> CrossEncoderFolder:
    """Find a cross-encoder by its name. Raises UserError if it is not found or not supported."""
    from mujica_jax.retrieval.embedding.cross_encoder import check_cross_encoder, max_pair_tokens

    if not Path(name).is_dir() and hub_name(name) is None:
        raise UserError(
            f"the reranker {name!r} is not a folder{why_local(name)}: give the folder of a "
            "cross-encoder, or a Hugging Face name such as cross-encoder/ms-marco-MiniLM-L6-v2"
        )
    folder = model_folder(name, setting="the reranker")
    config = check_cross_encoder(folder)
    return CrossEncoderFolder(folder=folder, max_tokens=max_pair_tokens(folder, config))
