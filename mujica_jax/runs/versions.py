"""Commit versions of a run's policy, sample from a version, and load a version again.

To commit a policy means to write it as a Hugging Face directory into the run directory. Version 0
is the policy after the warm-up. If the run trains adapters, the adapter is written next to the
policy.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax import nnx

from mujica_jax.config.stored import to_dict
from mujica_jax.learning.trainer import TrainState
from mujica_jax.models.adapters import (
    BaseModel,
    adapter_tensors,
    fingerprint,
    save_adapter,
    trained_adapters,
)
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.hub import commit_of
from mujica_jax.models.weights import gather_checkpoint, open_checkpoint, save_checkpoint
from mujica_jax.runs import phases
from mujica_jax.runs.parts import use_weights
from mujica_jax.runs.phases import GetState, PhaseState, learning_folder
from mujica_jax.runs.run import Run
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.store import CONFIG


def use_policy(run: Run, state: GetState, version: int) -> None:
    """Load the policy in `state` into the engine, so that the engine samples from it.

    `version` is the version of that policy. If the state is not in memory, the committed policy is
    loaded instead.
    """
    reads_committed = reads_committed_policy(run, state, version)
    with run.clock.stage("weight_sync"):
        run.generator.release_weights()
        if reads_committed:
            weights = nnx.state(_load_committed(run, version))
        else:
            weights = run.trainer.policy(state())
        use_weights(
            run.generator,
            run.decoder,
            weights,
            storage=run.config.engine.weights,
            version=version,
        )


def reads_committed_policy(run: Run, state: GetState, version: int) -> bool:
    """Return whether to load the committed policy instead of this state.

    This is the case if the state is not in memory and its policy is committed.
    """
    is_absent = isinstance(state, PhaseState) and not state.is_here
    return is_absent and distributed.broadcast(
        f"policy {version}", lambda: version in run.store.policies()
    )


def committed_state(run: Run, version: int) -> TrainState:
    """Load a committed policy as a training state without an optimiser, for `Trainer.score`."""
    state = run.trainer.initial_state(_load_committed(run, version))
    return state._replace(opt_state=())


def _load_committed(run: Run, version: int) -> Decoder:
    """Load a committed policy, with its arrays sharded over the trainer's mesh."""
    folder = distributed.primary_first("a policy is read", lambda: run.store.policy_path(version))
    _, load = open_checkpoint(folder / "model", dtype=run.config.trainer.dtype)
    return load(run.trainer.mesh, run.config.trainer.dtype)


def commit_policy(run: Run, state: GetState, version: int) -> None:
    """Write the policy in `state` to the run directory, as a Hugging Face directory.

    The weights are stored in the compute type. If the run trains adapters, the adapter is written
    next to the policy, together with the configuration. The first process writes, and the others
    help to gather the weights. If this version is already committed, nothing happens.

    Afterwards the checkpoints of earlier phases are removed, and also the oldest policies if there
    are more than `keep_policies`.
    """
    run.preemption.enter(f"committing policy {version}")
    name = f"policy {version}"
    if distributed.broadcast(name, lambda: version <= max(run.store.policies(), default=-1)):
        return

    decoder = nnx.merge(nnx.graphdef(run.decoder), run.trainer.policy(state()))
    trains_adapters = run.config.trainer.lora_rank > 0
    adapters: dict[str, np.ndarray] = {}
    if trains_adapters:
        adapters = adapter_tensors(decoder, trained_adapters(state().params))
        # The fingerprint is missing if the state was restored from a checkpoint.
        if not run.base_fingerprint:
            run.base_fingerprint = fingerprint(run.load_decoder())
    if not distributed.is_primary():
        gather_checkpoint(decoder)
        distributed.barrier(name)
        return

    def write(directory: Path) -> None:
        save_checkpoint(
            decoder,
            directory / "model",
            tokenizer=run.tokenizer,
            dtype=run.config.trainer.dtype,
        )
        if trains_adapters:
            _write_adapter(run, directory / "adapter", adapters)

    with run.clock.stage("saving"):
        run.store.commit_policy(version, write)
        remove_past_checkpoints(run)
        if run.config.keep_policies:
            for past_version in run.store.policies()[: -run.config.keep_policies]:
                run.store.remove_policy(past_version)
    distributed.barrier(name)


def _write_adapter(run: Run, directory: Path, adapters: Mapping[str, np.ndarray]) -> None:
    """Write an adapter into a directory, together with the run's configuration."""
    config = json.dumps({"config": to_dict(run.config)}, indent=2)
    save_adapter(
        adapters,
        directory,
        alpha=run.config.trainer.lora_alpha,
        base=BaseModel(
            fingerprint=run.base_fingerprint,
            name=str(run.config.init).partition("@")[0],
            revision=commit_of(run.config.init),
        ),
    )
    (directory / CONFIG).write_text(config + "\n")


def remove_past_checkpoints(run: Run) -> None:
    """Remove the checkpoints of all phases except the newest.

    If the run has a control run, the warm-up's checkpoints stay, because the control run starts
    from them. Only the first process calls this, after the newest phase is finished.
    """
    phase_names = {run.newest_phase}
    if run.config.eval.control:
        phase_names.add(phases.WARM_UP.name)
    needed_folders = {learning_folder(name) for name in phase_names}
    files = run.store.names(f"{phases.LEARNING}/")
    stored_folders = {"/".join(file.split("/")[:2]) for file in files}
    for folder in sorted(stored_folders - needed_folders):
        run.store.remove_folder(folder)
