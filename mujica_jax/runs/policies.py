"""Find a policy by the name that a user gives it.

The name is a run directory, a model on disk, or a model that is converted first. Called by `eval`
and `serve`.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mujica_jax.config.schema import AgentConfig, Config
from mujica_jax.errors import UserError
from mujica_jax.models.gguf import checkpoint_folder, is_converted
from mujica_jax.runtime.provenance import differences
from mujica_jax.storage.manifest import json_object
from mujica_jax.storage.run_directory import RunPath, local_folder, run_path
from mujica_jax.trajectories.store import Store

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mujica_jax.models.decoder import Decoder
    from mujica_jax.models.tokenizer import Tokenizer
    from mujica_jax.runs.evaluation import ScoredGenerator

WANTED = (
    "give --checkpoint a run directory, or a Hugging Face directory, a GGUF file or smollm2 and a "
    "configuration"
)
_INIT = re.compile("--init(=|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """A policy that can be loaded."""

    name: str
    model: Path  # a Hugging Face directory
    place: str  # where it comes from: the same, or the name of which it is a local copy
    version: int
    run: RunPath | None  # the directory of the run that made it
    adapter: Path | None = None

    def load(
        self,
        dtype: str,
        mesh: "Mesh | None" = None,
        *,
        context_tokens: int = 0,
        context_setting: str = "",
    ) -> "tuple[Tokenizer, Decoder]":
        """Load the policy in the type it computes in, over `mesh`. An adapter is added in float32.

        Raises UserError, before the weights are read, where the model cannot read `context_tokens`.
        The sentence names `context_setting`, if it is given, as what to lower.
        """
        from mujica_jax.inference.engine.factory import CONTEXT_SETTING, check_context
        from mujica_jax.models.adapters import with_adapter
        from mujica_jax.runs.model import open_model

        model = open_model(self.model, dtype)
        check_context(
            model.decoder.config, context_tokens, setting=context_setting or CONTEXT_SETTING
        )
        if self.adapter is None:
            return model.tokenizer, model.load(mesh, dtype)
        return model.tokenizer, with_adapter(model.load(mesh), self.adapter)

    def trained_otherwise(self, agent: AgentConfig) -> list[str]:
        """Return how this agent differs from the one of the run that made the policy.

        They may differ because a configuration beside a run replaces the run's own.
        """
        if self.run is None:
            return []
        trained_agent = read_object(self.run / "config.json")["config"]["agent"]
        configured_agent = dataclasses.asdict(agent)
        if trained_agent["kind"] != configured_agent["kind"]:
            trained_agent = {"kind": trained_agent["kind"]}
        comparable_fields = {key: configured_agent.get(key) for key in trained_agent}
        return differences({"agent": trained_agent}, {"agent": comparable_fields}, ignore=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(SavedPolicy):
    """A policy that is evaluated, and the folder of its results."""

    out: RunPath

    def concurrency(self, config: Config) -> int:
        """Return how many episodes are played at a time."""
        return config.engine.max_num_seqs

    def open(
        self, config: Config, *, context_setting: str = ""
    ) -> "tuple[Tokenizer, ScoredGenerator]":
        """Load the policy into an engine. `context_setting`: see `load`."""
        from flax import nnx

        from mujica_jax.inference.engine.factory import engine_mesh
        from mujica_jax.runs.parts import make_generator, use_weights

        tokenizer, decoder = self.load(
            config.trainer.dtype,
            engine_mesh(config.engine),
            context_tokens=config.agent.max_trajectory_tokens,
            context_setting=context_setting,
        )
        generator = make_generator(decoder, config, tokenizer)
        if config.engine.weights != "compute" or self.adapter is not None:
            use_weights(generator, decoder, nnx.state(decoder), config.engine.weights, self.version)
        generator.policy_version = self.version
        return tokenizer, generator

    def about(self) -> dict[str, Any]:
        """Return what results say of the policy."""
        fields = {"checkpoint": self.place, "policy": self.version}
        if self.adapter is not None:
            fields["adapter"] = str(self.adapter)
        return fields


def init_as_checkpoint(words: Sequence[str]) -> list[str]:
    """Replace `--init` by `--checkpoint`: it is another name of it, for models that are no run."""
    return [
        "--checkpoint" + word.removeprefix("--init") if _INIT.match(word) else word
        for word in words
    ]


def find_policy(checkpoint: str, *, policy: int | None, adapter: str | None) -> SavedPolicy:
    """Find what `--checkpoint`, `--policy` and `--adapter` name.

    The files of a run are compared with their checksums. Raises UserError.
    """
    folder = checkpoint_folder(checkpoint) if is_converted(checkpoint) else run_path(checkpoint)
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: {WANTED}")
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} is an adapter: give --init the checkpoint it was trained on, and --adapter "
            f"{folder}"
        )
    if is_run(folder):
        return _find_in_run(folder, policy=policy, adapter=adapter)

    # A model that is no run.
    if policy is not None:
        raise UserError(
            f"--policy is {policy} and {folder} is no run directory: leave --policy out"
        )
    name = checkpoint
    adapter_folder = None
    if adapter:
        name = f"{checkpoint} with {adapter}"
        adapter_folder = local_folder(adapter)
    return SavedPolicy(
        name=name,
        model=local_folder(folder),
        place=str(folder),
        version=0,
        run=None,
        adapter=adapter_folder,
    )


def _find_in_run(folder: RunPath, *, policy: int | None, adapter: str | None) -> SavedPolicy:
    """Find a policy of a run; `policy` None is the newest. Raises UserError."""
    if adapter is not None:
        raise UserError(
            f"--adapter is {adapter} and {folder} is a run, whose policies have theirs merged in: "
            "give --init the checkpoint that the adapter was trained on, or leave --adapter out"
        )
    store = Store(folder)
    version = max(store.policies(), default=None) if policy is None else policy
    if version is None:
        raise UserError(f"{folder} has no policy yet: go on with the run until its warm-up is done")
    return SavedPolicy(
        name=f"policy {version}",
        model=store.policy_path(version) / "model",
        place=str(store.policy_place(version) / "model"),
        version=version,
        run=folder,
    )


def is_run(folder: RunPath) -> bool:
    """Return whether a folder is a run directory.

    A run's config.json holds `config`; that of a Hugging Face directory is the model's own.
    """
    file = folder / "config.json"
    return file.exists() and isinstance(read_object(file).get("config"), dict)


def read_object(file: RunPath) -> dict[str, Any]:
    """Read a JSON object. Raises UserError where the file holds none."""
    return json_object(file.read_bytes(), file, "restore it or choose another --checkpoint")
