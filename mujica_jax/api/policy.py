"""Load a policy, and let it answer questions."""

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from mujica_jax.agents.agent import EnginePolicy
from mujica_jax.api.blocking import do_nothing, outside_event_loop
from mujica_jax.api.overrides import Overrides, as_config, as_words, parsed
from mujica_jax.api.retriever import DEFAULT_TOP_K, Retriever
from mujica_jax.api.trajectories import AnsweredTrajectory, answered
from mujica_jax.commands import eval as evaluation
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.retrieval import retriever as retrieval
from mujica_jax.runs.asking import Answerer
from mujica_jax.runs.episode_events import OnEvent
from mujica_jax.runs.evaluate import prepare_tasks
from mujica_jax.runs.evaluation import ScoredGenerator
from mujica_jax.runs.parts import check_prompts, make_agent
from mujica_jax.runs.policies import Checkpoint, is_run
from mujica_jax.storage.run_directory import run_path
from mujica_jax.tasks.asked import AskedQuestion, asked_question, over_passages
from mujica_jax.tasks.data_folder import check_data_dir
from mujica_jax.tasks.environment import TextEnvironment
from mujica_jax.tasks.task import EnvironmentKind, Task

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenCheckpoint(Checkpoint):
    """A checkpoint whose model is already loaded into an engine."""

    opened: tuple[Tokenizer, ScoredGenerator]

    def open(
        self, config: Config, *, context_setting: str = ""
    ) -> tuple[Tokenizer, ScoredGenerator]:
        """Return the tokenizer and the generator, which are already open."""
        del config, context_setting
        return self.opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySource:
    """The arguments of `load`: where a model and its configuration come from."""

    source: str
    policy: int | None
    adapter: str | None
    config: Config | str | None
    # The overrides as the words of a command line.
    words: tuple[str, ...]

    def load(self) -> "Policy":
        """Find the model, and make its configuration. Raises UserError."""
        words = ["--checkpoint", self.source]
        if self.policy is not None:
            words += ["--policy", str(self.policy)]
        if self.adapter is not None:
            words += ["--adapter", self.adapter]
        words += self.words
        named_config = None if self.config is None else as_config(self.config)
        options, full_config = parsed(words, lambda: evaluation.read_flags(words, named_config))
        return Policy(evaluation.find_checkpoint(options), full_config, self)


class Policy:
    """A trained model with the agent that it plays and the task that it was trained on.

    Make it with `mujica_jax.load`. The model is loaded when the first question is asked. One
    question is answered at a time; calls from other threads wait.

    Attributes:
        checkpoint: Where the model comes from.
        config: The configuration: agent, task and engine.
    """

    def __init__(self, checkpoint: Checkpoint, config: Config, source: PolicySource) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self._source = source
        # The engine, the retrievers and the graph serve one event loop at a time.
        self._lock = threading.Lock()

    def ask(
        self,
        question: str,
        *,
        retriever: Retriever | retrieval.Retriever | None = None,
        on_event: OnEvent | None = None,
    ) -> AnsweredTrajectory:
        """Answer a question with greedy decoding, and return the record of the episode.

        The record prints as a tree: sub-questions, evidence, the workers' answers, the answer. Its
        attribute `answer` is the answer alone.

        Args:
            question: The question, in your own words.
            retriever: The passages to search. None: what the task of the configuration searches.
                Over a graph, the entities that the question names are found first.
            on_event: Called for everything that happens, as it happens
                (`mujica_jax.runs.episode_events`).

        Raises:
            UserError: The question is empty, names no entity of the graph, or has no passages; or
                the agent's prompts have no room in its conversations.

        >>> import mujica_jax as mj
        >>> policy = mj.load("run")
        >>> policy.ask("Who is the director of Dark Pilot?")  # doctest: +ELLIPSIS
        'Dark Pilot' in the question is Dark Pilot (Q...)
        Who is the director of Dark Pilot?
        ...
        """
        return self.call(lambda: self._ask(question, retriever, on_event))

    @functools.cached_property
    def task(self) -> Task:
        """The task of the configuration, with its questions. It is built on first use."""
        check_data_dir(self.config.task)
        return prepare_tasks([self.config], is_scored=False)[self.config.task]

    @functools.cached_property
    def opened(self) -> tuple[Tokenizer, ScoredGenerator]:
        """The tokenizer, and the engine with the model. They are loaded on first use."""
        return self.checkpoint.open(self.config)

    def open_checkpoint(self) -> OpenCheckpoint:
        """Return the checkpoint with its loaded model."""
        return OpenCheckpoint(**vars(self.checkpoint), opened=self.opened)

    def changed(self, config: Config | str | None, overrides: Overrides | None) -> "Policy":
        """Return the policy with another configuration, or with further overrides.

        Raises UserError if they do not fit.
        """
        source = dataclasses.replace(
            self._source,
            config=self._source.config if config is None else config,
            words=(*self._source.words, *as_words(overrides)),
        )
        return source.load()

    def call(
        self, function: Callable[[], Result], *, interrupt: Callable[[], object] = do_nothing
    ) -> Result:
        """Call a function that uses the engine, outside of any event loop and of other calls.

        For `interrupt` see `outside_event_loop`.
        """
        with self._lock:
            return outside_event_loop(function, interrupt=interrupt)

    def __repr__(self) -> str:
        return f"Policy({self.checkpoint.name}, {self.checkpoint.place})"

    def _ask(
        self,
        text: str,
        retriever: Retriever | retrieval.Retriever | None,
        on_event: OnEvent | None,
    ) -> AnsweredTrajectory:
        """Answer a question. No event loop runs in this thread."""
        # Check the question before the model is loaded.
        if retriever is None:
            asked = asyncio.run(asked_question(self.task, text))
        else:
            asked = self._over_retriever(text, retriever)
        answerer = self._answerer(asked.environment.kind)
        trajectory = asyncio.run(answerer.answer(asked, on_event))
        return answered(trajectory, asked.question, asked.notes)

    def _over_retriever(
        self, text: str, retriever: Retriever | retrieval.Retriever
    ) -> AskedQuestion:
        """Return a question that is answered from the passages of a retriever."""
        if not text.strip():
            raise UserError(f"the question is {text!r}, which is empty: write a question")
        source = retriever.source if isinstance(retriever, Retriever) else retriever
        # A task of a plug-in may have no such setting.
        top_k = getattr(self.config.task, "top_k", DEFAULT_TOP_K)
        return over_passages(text, TextEnvironment(source, top_k))

    def _answerer(self, kind: EnvironmentKind) -> Answerer:
        """Return the agent with the loaded model. `kind` is what it searches. Raises UserError."""
        tokenizer, generator = self.opened
        check_prompts(self.config.agent, tokenizer, kind)
        return Answerer(
            agent=make_agent(self.config.agent, tokenizer),
            policy=EnginePolicy(generator),
            tokenizer=tokenizer,
            seed=self.config.seed,
        )


def load(
    source: str,
    *,
    policy: int | None = None,
    adapter: str | None = None,
    config: Config | str | None = None,
    overrides: Overrides | None = None,
) -> Policy:
    """Load a policy with the agent that it plays.

    Args:
        source: A run directory, local or gs://BUCKET/PREFIX. Or a model outside of a run: a Hugging
            Face directory or name, a GGUF file, or "smollm2".
        policy: The number of a policy of the run. None: its newest policy.
        adapter: The folder of a LoRA adapter to add to a model outside of a run.
        config: A configuration, a name in configs/, or a file. It says which agent the model plays
            and what it searches. None: the configuration of the run, or of the run that wrote the
            adapter. A policy of a run plays the agent that it was trained as.
        overrides: Changes to the configuration: {"agent.max_iterations": 6}.

    Raises:
        UserError: There is no such model or configuration, or they do not fit.

    >>> import mujica_jax as mj
    >>> policy = mj.load("run", policy=0, overrides={"agent.max_iterations": 2})
    >>> policy.config.agent.max_iterations
    2
    """
    is_own_run = config is None and run_path(source).is_dir() and is_run(run_path(source))
    if config is None and adapter is None and not is_own_run:
        raise UserError(
            f"{source!r} is not a run directory, so that nothing says which agent it plays: add "
            f"config, such as mujica_jax.load({source!r}, config='two_wiki_text_smollm2')"
        )
    return PolicySource(
        source=source,
        policy=policy,
        adapter=adapter,
        config=config,
        words=tuple(as_words(overrides)),
    ).load()
