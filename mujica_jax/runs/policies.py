"""Find the policy that a user names with `--checkpoint`, for `eval` and `serve`.

The name may be a run directory, a model on disk, or a model that has to be converted first.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mujica_jax.config.schema import AgentConfig, Config
from mujica_jax.config.stored import to_dict
from mujica_jax.errors import UserError
from mujica_jax.models.gguf import checkpoint_folder, is_converted
from mujica_jax.models.hub import commit_of, hub_name, model_folder, why_local
from mujica_jax.runs.commits import use_recorded_commits
from mujica_jax.runtime.provenance import differences
from mujica_jax.storage.manifest import json_object
from mujica_jax.storage.run_directory import RunPath, local_folder, run_path
from mujica_jax.trajectories.store import Store

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mujica_jax.models.decoder import Decoder
    from mujica_jax.models.tokenizer import Tokenizer
    from mujica_jax.runs.evaluation import ScoredGenerator

# The end of error messages about --checkpoint.
WANTED = (
    "give --checkpoint a run directory; or give it a Hugging Face directory or name, a GGUF file "
    "or smollm2, together with a configuration"
)
_INIT = re.compile("--init(=|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """A policy that can be loaded.

    Attributes:
        name: The name that is shown to the user.
        model: The Hugging Face directory of the model, on local disk.
        place: Where the model comes from. This is `model`, or the original if `model` is a copy.
        version: The version of the policy in its run; 0 if it is not from a run.
        run: The directory of the run that made the policy; None if it is not from a run.
        adapter: The folder of an adapter to add to the model; None if there is none.
    """

    name: str
    model: Path
    place: str
    version: int
    run: RunPath | None
    adapter: Path | None = None

    def load(
        self,
        dtype: str,
        mesh: "Mesh | None" = None,
        *,
        context_tokens: int = 0,
        context_setting: str = "",
    ) -> "tuple[Tokenizer, Decoder]":
        """Load the policy, and return its tokenizer and its model.

        The model computes in `dtype` and is sharded over `mesh`. If there is an adapter, it is
        added to the weights in float32.

        Raises UserError if the model cannot read `context_tokens` tokens. This is checked before
        the weights are read. The message tells the user to lower the setting `context_setting`.
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
        """Return how an agent differs from the agent that the policy was trained with.

        They may differ if the user gives a configuration in addition to a run directory, because
        this configuration replaces the run's own. Returns one text for each difference.
        """
        if self.run is None:
            return []
        trained_agent = read_object(self.run / "config.json")["config"]["agent"]
        configured_agent = to_dict(agent)
        if trained_agent["kind"] != configured_agent["kind"]:
            trained_agent = {"kind": trained_agent["kind"]}
        comparable_fields = {key: configured_agent.get(key) for key in trained_agent}
        return differences({"agent": trained_agent}, {"agent": comparable_fields}, ignore=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(SavedPolicy):
    """A policy that is evaluated, and the folder `out` for its results."""

    out: RunPath

    def concurrency(self, config: Config) -> int:
        """Return how many episodes are played at the same time."""
        return config.engine.max_num_seqs

    def open(
        self, config: Config, *, context_setting: str = ""
    ) -> "tuple[Tokenizer, ScoredGenerator]":
        """Load the policy into an engine, and return its tokenizer and a generator.

        For `context_setting` see `load`.
        """
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
        """Return the description of the policy that is written into the results."""
        fields = {"checkpoint": self.place, "policy": self.version}
        if self.adapter is not None:
            fields["adapter"] = str(self.adapter)
        return fields


def init_as_checkpoint(words: Sequence[str]) -> list[str]:
    """Replace the option `--init` by `--checkpoint` in command-line arguments.

    `--init` is another name of this option, for models that are not from a run.
    """
    return [
        "--checkpoint" + word.removeprefix("--init") if _INIT.match(word) else word
        for word in words
    ]


def find_policy(
    checkpoint: str, *, policy: int | None, adapter: str | None, setting: str = "--checkpoint"
) -> SavedPolicy:
    """Find the policy that `--checkpoint`, `--policy` and `--adapter` name.

    If the policy is from a run, its files are compared with their checksums. Error messages about
    downloads name `setting` in place of `--checkpoint`. Raises UserError if there is no such
    policy.
    """
    if is_converted(checkpoint) or hub_name(checkpoint):
        folder = checkpoint_folder(checkpoint, setting=setting)
    else:
        folder = run_path(checkpoint)
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}{why_local(checkpoint)}: {WANTED}")
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} is an adapter: use --adapter {folder}, and give --init the checkpoint that "
            "the adapter was trained on"
        )
    if is_run(folder):
        return _find_in_run(folder, policy=policy, adapter=adapter)

    # The folder holds a model that is not from a run.
    if policy is not None:
        raise UserError(
            f"--policy is {policy}, but {folder} is not a run directory and has no numbered "
            "policies: leave --policy out"
        )
    name = checkpoint
    adapter_folder = None
    if adapter:
        name = f"{checkpoint} with {adapter}"
        adapter_folder = model_folder(adapter, setting="--adapter")
    return SavedPolicy(
        name=name,
        model=local_folder(folder),
        place=model_place(checkpoint, folder),
        version=0,
        run=None,
        adapter=adapter_folder,
    )


def _find_in_run(folder: RunPath, *, policy: int | None, adapter: str | None) -> SavedPolicy:
    """Find a policy of a run. If `policy` is None, this is the newest one.

    Raises UserError if the run has no such policy.
    """
    if adapter is not None:
        raise UserError(
            f"--adapter is {adapter}, but {folder} is a run, and the policies of a run already "
            "include their adapters: give --init the checkpoint that the adapter was trained on, "
            "or leave --adapter out"
        )
    store = Store(folder)
    use_recorded_commits(store)
    version = max(store.policies(), default=None) if policy is None else policy
    if version is None:
        raise UserError(f"{folder} has no policy yet: continue the run until its warm-up is done")
    return SavedPolicy(
        name=f"policy {version}",
        model=store.policy_path(version) / "model",
        place=str(store.policy_place(version) / "model"),
        version=version,
        run=folder,
    )


def model_place(checkpoint: str, folder: RunPath) -> str:
    """Return where a model comes from: its folder, or its name at the Hub with its commit."""
    name = hub_name(checkpoint)
    if name is None:
        return str(folder)
    return str(dataclasses.replace(name, revision=commit_of(checkpoint)))


def is_run(folder: RunPath) -> bool:
    """Return whether a folder is a run directory.

    Run directories and Hugging Face directories both have a file config.json. Only the one of a run
    has the key `config`.
    """
    file = folder / "config.json"
    return file.exists() and isinstance(read_object(file).get("config"), dict)


def read_object(file: RunPath) -> dict[str, Any]:
    """Read a JSON object from a file. Raises UserError if the file does not hold one."""
    return json_object(file.read_bytes(), file, "restore it or choose another --checkpoint")
