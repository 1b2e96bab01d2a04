"""Train an agent with the method that a configuration names, and print a table of its scores.

    python -m mujica_jax.train [configs/NAME.py] [--run DIR] [--init HF_DIR] \\
        [--section.field value ...]

Without a configuration file the program trains on the tiny world. If a run is killed, start it
again with the same --run directory. It continues where it stopped.
"""

import shlex
import sys
import time
from collections.abc import Sequence

from mujica_jax.config.checks import check_training
from mujica_jax.config.command_line import command_line, take_flag
from mujica_jax.config.program_help import ProgramHelp, program_name
from mujica_jax.config.schema import Config
from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.data_folder import check_data_dir

DEFAULT_CONFIG = "tiny_world"
HELP = ProgramHelp(
    summary="Train an agent with the method that a configuration names, and print a table of its "
    "scores. If a run is killed, start it again with the same --run directory: it continues.",
    usage="[CONFIG] [flags]",
    examples={
        "--run runs/first": "Train a small model in the tiny world, in a few minutes on two cores.",
        "two_wiki_text_smollm2 --task.data-dir DIR --init smollm2": "Train SmolLM2-135M on "
        "2WikiMultihopQA, whose files are in DIR.",
    },
    default_config=DEFAULT_CONFIG,
    common={
        "Task and data": (
            "task.kind",
            "task.environment",
            "task.data_dir",
            "task.index",
            "task.retriever",
            "task.train_questions",
        ),
        "Model": (
            "init",
            "adapter",
            "trainer.lora_rank",
            "model.num_layers",
            "model.hidden_size",
        ),
        "Agent": ("agent.kind",),
        "Method": (
            "method.kind",
            "method.rounds",
            "method.max_attempts",
            "method.keep_per_question",
            "method.group_size",
            "method.teacher",
            "method.branches",
            "method.rollouts",
            "method.epochs",
            "reward",
            "warmup.steps",
            "pretraining.steps",
        ),
        "Learning rate": (
            "method.learning_rate",
            "method.end_learning_rate",
            "method.dpo_learning_rate",
            "warmup.learning_rate",
        ),
        "Sizes": (
            "sampling.questions_per_round",
            "trainer.batch_size",
            "trainer.sequence_length",
            "trainer.accumulation_steps",
            "trainer.fsdp",
            "engine.max_num_seqs",
            "agent.max_trajectory_tokens",
        ),
        "Evaluation": ("eval.questions", "eval.split", "eval.control"),
        "Output": ("run", "keep_policies"),
        "Seed": ("seed",),
    },
)


def main(arguments: list[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: the run finished, or the machine asked the program to end and the run can be continued.
    - 2: the user made a mistake.
    - 130: Ctrl-C ended the program. The run can be continued.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    preemption = Preemption()

    def program() -> None:
        config = parse(words)
        check_training(config)
        distributed.start(config.distributed, preemption.on_notice)
        check_data_dir(config.task)

        # All processes of a job use the directory that process 0 chooses.
        new_directory = f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory = config.run or distributed.broadcast("run directory", lambda: new_directory)

        # The same arguments continue the run if they include its directory.
        is_run_named = take_flag([*words], "--run")
        resume_words = words if is_run_named else [*words, "--run", directory]
        preemption.then = f"continue with: {program_name('train')} {shlex.join(resume_words)}"

        # This import starts JAX. It comes late so that configuration mistakes are reported fast.
        from mujica_jax.runs.training import train

        train(config, directory, preemption)
        distributed.finish()

    return preemption.exit_status(program)


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration of a command line `[CONFIG] [flags]`."""
    return command_line(arguments, default=DEFAULT_CONFIG, prog=program_name("train"), program=HELP)
