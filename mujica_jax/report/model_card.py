"""Write the model card of an exported policy: README.md, as the Hugging Face Hub reads it."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

from mujica_jax.config.files import CONFIG_FOLDER
from mujica_jax.config.schema import Config

TAGS = ("mujica", "retrieval-augmented-generation", "question-answering", "agents")
# Texts about each form of an export: the title of its first sentence, and what the folder holds.
FORMS = {
    "model": "all weights of the policy",
    "adapter": "a LoRA adapter in the form of PEFT, without its base model",
    "merged model": "the base model with the LoRA adapter merged into its weights",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseOfCard:
    """The model that a run started from.

    Attributes:
        name: The name that the run was given: a folder, a file or a name at the Hub.
        hub: Its name at the Hugging Face Hub; None if it is not known.
        commit: The commit at the Hub; None if it is not known.
        licence: Its licence; None if it is not known.
        note: How it differs from the model at the Hub; empty if it does not.
    """

    name: str
    hub: str | None
    commit: str | None
    licence: str | None
    note: str = ""

    @property
    def init(self) -> str:
        """The value of `--init` that gives this model again. A branch may have moved."""
        return self.name if self.commit is None else f"{self.hub}@{self.commit}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOfCard:
    """Scores of one evaluation in percent, with 95% bootstrap intervals.

    Attributes:
        task: The task and what it searches, as in "two_wiki (text)".
        split: The evaluated questions: dev or test.
        decoding: "greedy" or "sampled".
        agent: The kind of the agent.
        questions: Number of questions that the scores are means over.
        em, f1: Exact match and F1, with `em_interval` and `f1_interval`.
    """

    task: str
    split: str
    decoding: str
    agent: str
    questions: int
    em: float
    em_interval: tuple[float, float]
    f1: float
    f1_interval: tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The facts that the card of a policy states.

    Attributes:
        name: The title, by which the examples load the policy.
        form: What was exported.
        version: The number of the policy in its run.
        config: The configuration of the run.
        command: The command that started the run; None if the run did not record it.
        revision: The git revision of the program; None if it is not known.
        base: The model that the run started from; None if that was random weights.
        licence: The licence of the policy; None if it is not known.
        scores: The scores of the policy.
    """

    name: str
    form: Literal["model", "adapter", "merged model"]
    version: int
    config: Config
    command: str | None
    revision: str | None
    base: BaseOfCard | None
    licence: str | None
    scores: Sequence[ScoreOfCard]

    def text(self) -> str:
        """Return the card as Markdown, with its front matter."""
        parts = [
            self._front_matter(),
            f"# {self.name}",
            self._description(),
            "## Training",
            self._training(),
            "## Scores",
            self._scores(),
            "## Use",
            self._use(),
            "## Licence",
            self._licence(),
        ]
        return "\n\n".join(parts) + "\n"

    def _front_matter(self) -> str:
        """Return the facts that the Hub reads, as YAML. A JSON string is a YAML string."""
        lines = ["---"]
        if self.licence is not None:
            lines.append(f"license: {json.dumps(self.licence)}")
        if self.base is not None and self.base.hub is not None:
            lines.append(f"base_model: {json.dumps(self.base.hub)}")
        lines.append(f"library_name: {'peft' if self.form == 'adapter' else 'transformers'}")
        lines.append("pipeline_tag: text-generation")
        lines.append("tags:")
        lines += [f"- {tag}" for tag in TAGS]
        return "\n".join([*lines, "---"])

    def _description(self) -> str:
        config = self.config
        agent = f"the agent `{config.agent.kind}`"
        searched = getattr(config.task, "environment", "text")
        place = "a knowledge graph" if searched == "graph" else "passages"
        return (
            f"A policy for {agent} of mujica_jax. It answers multi-hop questions by searching "
            f"{place}. This folder holds {FORMS[self.form]}."
        )

    def _training(self) -> str:
        config = self.config
        environment = getattr(config.task, "environment", None)
        task = f"`{config.task.kind}`"
        if environment is not None:
            task += f", environment `{environment}`"
        rows = {
            "base model": self._base(),
            "method": f"`{config.method.kind}`, reward `{config.reward}`",
            "data set": task,
            "policy": f"{self.version} of its run (0 is the policy after the warm-up)",
            "configuration": f"`{config.name}`, seed {config.seed}",
        }
        if config.trainer.lora_rank:
            rows["LoRA"] = f"rank {config.trainer.lora_rank}, alpha {config.trainer.lora_alpha:g}"
        if config.adapter is not None:
            rows["first adapter"] = f"training continued from the adapter `{config.adapter}`"
        if self.revision is not None:
            rows["revision of mujica_jax"] = f"`{self.revision}`"
        lines = ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())]
        if self.command is None:
            lines += ["", "The command of the run was not recorded."]
        else:
            lines += [
                "",
                "The run was started with this command:",
                "",
                "```bash",
                self.command,
                "```",
            ]
        return "\n".join(lines)

    def _base(self) -> str:
        """Return the words about the base model."""
        base = self.base
        if base is None:
            return "none: trained from random weights"
        if base.hub is None:
            return f"`{base.name}`, a local checkpoint"
        words = f"[{base.hub}](https://huggingface.co/{base.hub})"
        if base.commit is not None:
            words += f", commit `{base.commit}`"
        if base.name != base.hub:
            words += f", given as `{base.name}`"
        if base.note:
            words += f" ({base.note})"
        return words

    def _scores(self) -> str:
        if not self.scores:
            return "The run has no scores of this policy."
        lines = [
            "Means in percent, with 95% bootstrap intervals over the questions. EM is the exact "
            "match.",
            "",
            "| questions | decoding | agent | EM (95%) | F1 (95%) |",
            "|---|---|---|---|---|",
        ]
        for score in self.scores:
            lines.append(
                f"| {score.questions:,} of {score.task}, {score.split} | {score.decoding} "
                f"| {score.agent} | {_with_interval(score.em, score.em_interval)} "
                f"| {_with_interval(score.f1, score.f1_interval)} |"
            )
        return "\n".join(lines)

    def _use(self) -> str:
        """Return two examples: with mujica_jax, and with transformers or PEFT."""
        if self.form == "adapter":
            assert self.base is not None, "adapters are trained on a model"
            model = f"--init {self.base.init} --adapter {self.name}"
            arguments = repr(self.base.hub or self.base.name)
            if self.base.commit is not None:
                arguments += f", revision={self.base.commit!r}"
            python = [
                "from peft import PeftModel",
                "from transformers import AutoModelForCausalLM, AutoTokenizer",
                "",
                f"base = AutoModelForCausalLM.from_pretrained({arguments})",
                f"model = PeftModel.from_pretrained(base, {self.name!r})",
            ]
            configuration = ""
        else:
            model = f"--init {self.name}"
            python = [
                "from transformers import AutoModelForCausalLM, AutoTokenizer",
                "",
                f"model = AutoModelForCausalLM.from_pretrained({self.name!r})",
            ]
            has_file = (CONFIG_FOLDER / f"{self.config.name}.py").exists()
            configuration = f" {self.config.name if has_file else 'CONFIG'}"
        python.append(f"tokenizer = AutoTokenizer.from_pretrained({self.name!r})")
        return "\n".join(
            [
                "Evaluate it with mujica_jax. Where all questions of a task search the same "
                'passages, `--ask "QUESTION"` answers a question of your own:',
                "",
                "```bash",
                f"python -m mujica_jax.eval{configuration} {model}",
                "```",
                "",
                "Load it in Python. The agent's prompts and searches are in mujica_jax:",
                "",
                "```python",
                *python,
                "```",
            ]
        )

    def _licence(self) -> str:
        if self.licence is None:
            return "Not stated. The licence of the base model, if there is one, applies."
        if self.base is not None and self.licence == self.base.licence:
            return f"{self.licence}, the licence of the base model."
        return f"{self.licence}."


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    """Return a score with its interval, as in "58.3 (50.0-66.7)"."""
    low, high = interval
    return f"{value:.1f} ({low:.1f}-{high:.1f})"
