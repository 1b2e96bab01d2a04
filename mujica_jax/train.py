"""Train an agent: warm-up, MyGO, the equal-compute control, and the table of what came of it.

    python -m mujica_jax.train [configs/NAME.py] [--run DIR] [--init HF_DIR] [--section.field value ...]

Without a configuration file it trains the tiny world. The same --run directory again goes on where a killed run stopped.
"""

import shlex
import signal
import sys
import time
import traceback
from pathlib import Path

from mujica_jax import distributed
from mujica_jax.config import Config
from mujica_jax.config_checks import check
from mujica_jax.config_files import command_line
from mujica_jax.errors import UserError

DEFAULT_CONFIG = "tiny_world"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 a mistake of the user's, 130 interrupted (and resumable)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    directory = None
    # A preemption notice ends like Ctrl-C: all that matters is on disk.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = command_line(words, default=DEFAULT_CONFIG)
        check(config)
        distributed.start(config.distributed)
        directory = config.run or distributed.told("run directory", lambda: _new_directory(config.name))
        train(config, Path(directory))
        distributed.finish()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        distributed.leave(str(error), 2)
        return 2
    except KeyboardInterrupt:
        again = words if _names_run(words) or directory is None else [*words, "--run", directory]
        print(f"\ninterrupted; go on with: python -m mujica_jax.train {shlex.join(again)}", file=sys.stderr)
        distributed.leave("interrupted", 130)
        return 130
    except Exception:
        if distributed.processes() > 1:
            traceback.print_exc()
            distributed.wait_for_watch()  # an operation over all hosts fails where one of them is lost
            distributed.leave("by an error of the program: see its output", 1)
        raise
    return 0


def train(config: Config, directory: Path) -> None:
    """The whole run. Everything that a restart needs is under `directory`."""
    # Imported here: a mistake in the configuration is answered before JAX has started.
    from mujica_jax.methods.control import run_control
    from mujica_jax.methods.mygo import run_mygo
    from mujica_jax.methods.start import open_training
    from mujica_jax.methods.warmup import warm_up
    from mujica_jax.report import Summary, closing_table, question_tree, summary_dict

    with open_training(config, directory) as run:
        state, warmed, demonstrations = warm_up(run)
        _, rounds = run_mygo(run, state, demonstrations.rewarded)
        control = [run_control(run, state, demonstrations.rows, rounds)] if config.eval.control else []
        phases = tuple(result.phase for result in (warmed, *control, *rounds))
        summary = Summary(
            task=run.task.name,
            method="mygo",
            seed=config.seed,
            phases=phases,
            seconds=sum(phase.seconds for phase in phases),
        )
        if distributed.is_first():
            run.store.write_json_once("summary.json", summary_dict(summary))
        run.progress.show(closing_table(phases))
        if solved := run.solved_question(phases[-1].name):
            run.progress.show(question_tree(*solved))
        run.progress.line(f"policies, predictions and metrics: {directory}")


def _new_directory(name: str) -> str:
    return f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _names_run(words: list[str]) -> bool:
    return any(word == "--run" or word.startswith("--run=") for word in words)


if __name__ == "__main__":
    raise SystemExit(main())
