"""Write the conversations of a run as messages, one JSON object a line.

    python -m mujica_jax.conversations RUN --out FILE.jsonl [--phase "round 3"]
        [--correct-only] [--min-reward X] [--pairs]

Each line is one conversation of the planner, of a worker or of a single agent, as
`trajectories.messages` reads it. The text is the text that the model read and wrote, with its
thoughts. `--method.kind sft` and programs that know `role` and `content` can learn the file.

With `--pairs` the lines are the preference pairs that DecEx-RAG made, for `--method.kind dpo`.

Sampled tokens may spell a text in another way than the tokenizer does. A message then also has the
sampled tokens, as `token_ids`. Each conversation is read back and compared, and the program says how
many have other tokens than the stored ones.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mujica_jax import metrics
from mujica_jax.config.program_help import program_name
from mujica_jax.errors import UserError, nearest
from mujica_jax.records import Conversation, Trajectory
from mujica_jax.storage.run_directory import atomic_write, run_path

if TYPE_CHECKING:
    from mujica_jax.models.tokenizer import Tokenizer
    from mujica_jax.trajectories.store import Store

# The few-shot samples of the warm-up are stored as round 0.
WARM_UP = "warm-up"
EVALUATION = "evaluation of "
# A count that only the preference pairs of DecEx-RAG have.
PAIR_COUNT = "chosen_mean"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status: 0, or 2 for a mistake of the user."""
    options = _parser().parse_args(arguments)
    try:
        export(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def export(options: argparse.Namespace) -> None:
    """Write the chosen conversations or pairs of a run into a file, and print how many there are."""
    # These imports take a second. They come late so that mistakes in the arguments are reported fast.
    from mujica_jax.trajectories.store import CONFIG, Store

    out = run_path(options.out)
    if out.exists():
        raise UserError(f"--out {out} exists already: remove it, or choose another file")
    if not (run_path(options.run) / CONFIG).exists():
        raise UserError(f"there is no run in {options.run}: give the directory of a run")
    store = Store(options.run)

    # Choose trajectories, then write the conversations of each.
    phases = _phases(store)
    chosen_phases = _chosen_phases(phases, options)
    is_written = _filter_of(store, options)
    writer = _Writer(_tokenizer_of(store))
    for name in chosen_phases:
        for trajectory in phases[name]():
            if not is_written(trajectory):
                continue
            if options.pairs:
                writer.add_pair(trajectory, phase=name)
            else:
                writer.add_conversations(trajectory, phase=name)

    if not writer.lines:
        raise UserError(
            f"no trajectory of {', '.join(chosen_phases)} is left to write: choose another --phase, "
            "or leave out --correct-only and --min-reward"
        )
    atomic_write(out, "".join(writer.lines).encode())
    print(writer.in_words(str(out), unit="pairs" if options.pairs else "conversations"))


# --- choose trajectories ---


def _phases(store: "Store") -> dict[str, Callable[[], Iterator[Trajectory]]]:
    """Return the phases of a run that have stored trajectories, and what reads them, in order.

    These are the finished rounds of sampling, and the evaluations.
    """
    from mujica_jax.trajectories import shards

    def read_round(number: int) -> Iterator[Trajectory]:
        for entry in store.shards(round_number=number):
            yield from store.read_shard(entry)

    def read_evaluation(file: str) -> Iterator[Trajectory]:
        yield from shards.decode(store.read(file), str(store.root / file))

    phases: dict[str, Callable[[], Iterator[Trajectory]]] = {}
    for name in sorted(store.names("rounds/")):
        finished = re.fullmatch(r"rounds/(\d{4,})/DONE\.json", name)
        if finished:
            number = int(finished[1])
            phases[f"round {number}" if number else WARM_UP] = functools.partial(read_round, number)
    for name in sorted(store.names("eval/")):
        stored = re.fullmatch(r"eval/([^/]+)\.parquet", name)
        if stored:
            phases[f"{EVALUATION}{stored[1]}"] = functools.partial(read_evaluation, name)
    return phases


def _chosen_phases(phases: Collection[str], options: argparse.Namespace) -> list[str]:
    """Return the names of the phases to write: all rounds, or the one that `--phase` names.

    Raises UserError if there is no such phase.
    """
    if options.phase is None:
        rounds = [name for name in phases if not name.startswith(EVALUATION)]
        if not rounds:
            known = ", ".join(phases) or "no finished phase"
            raise UserError(
                f"{options.run} has no finished round of sampling, only {known}: choose an "
                "evaluation with --phase, whose questions are held out and must not be learnt if "
                "they are scored later"
            )
        return rounds
    if options.phase not in phases:
        raise UserError(
            f"{options.run} has no trajectories of the phase {options.phase!r}; "
            f"{nearest(options.phase, list(phases))}"
        )
    return [options.phase]


def _filter_of(store: "Store", options: argparse.Namespace) -> Callable[[Trajectory], bool]:
    """Return a function that says whether to write a trajectory.

    Episodes in which a search or the judge failed are never written.
    """
    is_correct = _correctness(store) if options.correct_only else None

    def is_written(trajectory: Trajectory) -> bool:
        is_pair = PAIR_COUNT in trajectory.counts
        if is_pair != options.pairs or not trajectory.is_rewarded:
            return False
        if options.min_reward is not None and trajectory.reward < options.min_reward:
            return False
        return is_correct is None or is_correct(trajectory)

    return is_written


def _correctness(store: "Store") -> Callable[[Trajectory], bool]:
    """Return a function that says whether the answer of a trajectory is an exact match."""
    from mujica_jax.config.named_objects import implementation
    from mujica_jax.config.schema import Config
    from mujica_jax.config.stored import from_dict
    from mujica_jax.trajectories.store import CONFIG

    config = from_dict(Config, store.read_json(CONFIG)["config"])
    task = implementation(config.task)(config.task)
    answers: dict[str, tuple[str, ...]] = {}
    for split in ("train", "dev", "test"):
        for question in task.questions(split):
            answers[question.id] = question.answers

    def is_correct(trajectory: Trajectory) -> bool:
        if trajectory.question_id not in answers:
            raise UserError(
                f"{store.root} has a trajectory of the question {trajectory.question_id}, which the "
                "task no longer has: restore its data, or give --min-reward instead of "
                "--correct-only"
            )
        gold_answers = answers[trajectory.question_id]
        return metrics.score(trajectory.final_answer, gold_answers, task.rule).em == 1.0

    return is_correct


def _tokenizer_of(store: "Store") -> "Tokenizer":
    """Return the tokenizer of the run's policies. Raises UserError if the run has none yet."""
    from mujica_jax.models.tokenizer import Tokenizer
    from mujica_jax.storage.manifest import COMMITTED

    # Runs that start from random weights store their tokenizer before the first policy.
    if store.exists(f"tokenizer/{COMMITTED}"):
        return Tokenizer.load(store.folder("tokenizer"))
    versions = store.policies()
    if not versions:
        raise UserError(
            f"{store.root} has no policy yet: continue the run until its warm-up is done"
        )
    return Tokenizer.load(store.policy_path(versions[-1]) / "model")


# --- write ---


class _Line(NamedTuple):
    """Messages as JSON objects, and whether they have the tokens of the stored conversation."""

    messages: list[dict[str, Any]]
    is_exact: bool


class _Writer:
    """The lines of the file, and the counts of what is in them."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self.lines: list[str] = []
        self._num_trajectories = 0
        self._num_exact = 0
        self._num_unreadable = 0
        self._num_untrained = 0
        self._num_empty = 0

    def add_conversations(self, trajectory: Trajectory, *, phase: str) -> None:
        """Add a line for each conversation of a trajectory that has a turn to learn."""
        self._num_trajectories += 1
        for conversation in trajectory.conversations:
            # In a conversation without such a turn, a length limit cut the only one.
            if not any(conversation.loss_mask):
                self._num_untrained += 1
                continue
            line = self._line(conversation)
            if line is not None:
                fields = {"messages": line.messages, "role": conversation.role}
                self._add({**fields, **_about(trajectory, phase)}, is_exact=line.is_exact)

    def add_pair(self, trajectory: Trajectory, *, phase: str) -> None:
        """Add the line of a preference pair."""
        self._num_trajectories += 1
        chosen, rejected = (self._line(side) for side in trajectory.conversations)
        if chosen is None or rejected is None or chosen.messages == rejected.messages:
            return
        fields = {
            "chosen": chosen.messages,
            "rejected": rejected.messages,
            "role": trajectory.conversations[0].role,
        }
        is_exact = chosen.is_exact and rejected.is_exact
        self._add({**fields, **_about(trajectory, phase)}, is_exact=is_exact)

    def _line(self, conversation: Conversation) -> _Line | None:
        """Return a conversation as messages, or None if its tokens cannot be read."""
        from mujica_jax.learning.conversations import messages_of, reads_back
        from mujica_jax.trajectories.messages import message_fields

        try:
            messages = messages_of(self._tokenizer, conversation)
        except UserError:
            self._num_unreadable += 1
            return None
        # No program learns an empty turn.
        if any(message.role == "assistant" and not message.content.strip() for message in messages):
            self._num_empty += 1
            return None
        return _Line(
            messages=[message_fields(message) for message in messages],
            is_exact=reads_back(self._tokenizer, conversation, messages),
        )

    def _add(self, fields: dict[str, Any], *, is_exact: bool) -> None:
        """Add a line to the file."""
        self.lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
        self._num_exact += is_exact

    def in_words(self, out: str, *, unit: str) -> str:
        """Return a sentence about what the file holds and what was left out."""
        count = len(self.lines)
        sentence = (
            f"{out}: {count} {unit} of {self._num_trajectories} trajectories; {self._num_exact} of "
            "them read back as exactly the stored tokens"
        )
        if self._num_exact < count:
            sentence += f", and {count - self._num_exact} as other tokens of the same text"
        if self._num_untrained:
            sentence += (
                f"; {self._num_untrained} conversations are left out, because a length limit cut "
                "their only turn"
            )
        if self._num_empty:
            sentence += f"; {self._num_empty} are left out, because the model wrote an empty turn"
        if self._num_unreadable:
            sentence += (
                f"; {self._num_unreadable} conversations are left out, because the chat template "
                "cannot separate their messages"
            )
        return sentence


def _about(trajectory: Trajectory, phase: str) -> dict[str, Any]:
    """Return what a line says about its trajectory."""
    return {
        "question_id": trajectory.question_id,
        "attempt": trajectory.attempt,
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason.value,
        "policy_version": trajectory.policy_version,
        "phase": phase,
    }


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=program_name("conversations"),
        description="Write the conversations of a run as messages, one JSON object a line.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, local or gs://BUCKET/PREFIX")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="file to write, such as a.jsonl"
    )
    parser.add_argument(
        "--phase",
        metavar="NAME",
        help='phase to write, such as "round 3" (default: all rounds of sampling). Trajectories of '
        'evaluations are written if their phase is named, as in "evaluation of round-3"',
    )
    parser.add_argument(
        "--correct-only",
        action="store_true",
        help="write only trajectories whose answer is an exact match",
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        metavar="X",
        help="write only trajectories with at least X reward",
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="write the preference pairs of DecEx-RAG instead of conversations",
    )
    return parser
