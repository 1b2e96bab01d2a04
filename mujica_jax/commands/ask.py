"""Let a trained agent answer a question in your own words, and show how it finds the answer.

    python -m mujica_jax.ask RUN "QUESTION" [--policy N] [--section.field value ...]
    python -m mujica_jax.ask HF_DIR|FILE.gguf|smollm2 "QUESTION" --config CONFIG [...]

RUN is a run directory. A model outside of a run needs the name of a configuration, which says what
the agent searches. All flags of `python -m mujica_jax.eval` that fit a single question are accepted.

The program prints the entities that the question names, if a graph is searched, and the episode as
a tree: sub-questions, evidence, what the workers answered, and the answer.
"""

import sys
from collections.abc import Sequence

from mujica_jax.commands import eval as evaluation
from mujica_jax.config.command_line import take_flag
from mujica_jax.config.program_help import ProgramHelp, program_name, wanted_help
from mujica_jax.errors import UserError

USAGE = 'RUN|MODEL "QUESTION" [flags]'
HELP = ProgramHelp(
    summary="Let a trained agent answer a question in your own words, and show how it finds the "
    "answer. A model outside of a run needs --config CONFIG.",
    usage=USAGE,
    examples={
        'runs/first "Who is the director of Dark Pilot?"': "Ask the newest policy of a run.",
        'smollm2 "Who is the mayor of Venford?" --config two_wiki_text_smollm2 --task.data-dir DIR': (
            "Ask a model that no run has trained."
        ),
    },
    common={
        "Who answers": ("policy", "adapter", "worker"),
        "What is searched": (
            "task.kind",
            "task.environment",
            "task.data_dir",
            "task.index",
            "task.retriever",
            "task.top_k",
        ),
        "Agent": ("agent.kind", "agent.prompt", "agent.max_iterations"),
        "Sizes": ("engine.max_num_seqs", "agent.max_trajectory_tokens"),
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: the agent played the episode, with or without an answer.
    - 2: the user made a mistake.
    - 130: Ctrl-C ended the program.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if wanted_help(words):
            # This prints the help, and ends the program.
            evaluation.read_flags(words, None, command="ask", program=HELP)
        eval_words = eval_arguments(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return evaluation.main(eval_words)


def eval_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `eval` that ask the question. Raises UserError."""
    words = list(arguments)
    config = take_flag(words, "--config")
    positional = [word for word in words[:2] if not word.startswith("--")]
    if len(positional) < 2:
        raise UserError(
            f"a run and a question are needed, but the first words are {' '.join(words[:2])!r}: "
            f"write {program_name('ask')} {USAGE}"
        )
    checkpoint, question, *flags = words
    if flags and not flags[0].startswith("--"):
        raise UserError(
            f"the question is {question!r}, but {flags[0]!r} follows it: write the question in "
            "quotes"
        )
    named_config = [] if config is None else [config]
    return [*named_config, "--checkpoint", checkpoint, f"--ask={question}", *flags]
