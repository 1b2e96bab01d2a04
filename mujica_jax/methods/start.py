"""Open a run: check the configuration against the machine and the task, make or reload the parts."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from mujica_jax.agents.scripted import sample_text
from mujica_jax.config import Config, TinyWorldConfig
from mujica_jax.errors import UserError
from mujica_jax.methods.run import Run, new_decoder
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.host_memory import keep_freed_memory
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint
from mujica_jax.report import MetricsLog, Progress
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories.store import Store, open_run

TOKENIZER = "tokenizer"
SCRIPT_REPEATS = 200  # how often the scripts' own words are shown to the tokenizer, so that each becomes one token


@contextlib.contextmanager
def open_training(config: Config, directory: Path) -> Iterator[Run]:
    """The run in `directory`, new or begun before; its metrics files are closed at the end."""
    keep_freed_memory()
    use_compilation_cache()
    task = build_task(config)
    store = open_run(directory, dataclasses.asdict(config), ignore=("run",))
    progress = Progress()
    progress.line(f"run directory: {directory}")
    tokenizer = Tokenizer.load(config.init) if config.init else _trained_tokenizer(config, task, store)
    decoder = load_decoder(config.init, tokenizer, config) if config.init else new_decoder(config, tokenizer)
    with MetricsLog(store.root) as metrics:
        yield Run(
            config,
            store=store,
            task=task,
            tokenizer=tokenizer,
            decoder=decoder,
            progress=progress,
            metrics=metrics,
        )


def build_task(config: Config) -> Task:
    if isinstance(config.task, TinyWorldConfig):
        from mujica_jax.tasks import tiny_world

        return tiny_world.build(config.task)
    from mujica_jax.tasks import two_wiki

    return two_wiki.build(config.task)


def load_decoder(directory: str | Path, tokenizer: Tokenizer, config: Config) -> Decoder:
    """A Hugging Face checkpoint; its vocabulary must hold every id of the tokenizer."""
    decoder = load_checkpoint(directory, dtype=config.trainer.dtype)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise UserError(
            f"the tokenizer in {directory} has ids up to {tokenizer.vocab_size - 1} and the model embeds "
            f"{decoder.config.vocab_size}: take both from the same checkpoint"
        )
    return decoder


def use_compilation_cache() -> None:
    """Compiled programs are kept between runs: a second start compiles nothing."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "mujica_jax" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _trained_tokenizer(config: Config, task: Task, store: Store) -> Tokenizer:
    """The run's tokenizer: trained once on the task's training text and the words that our prompts and scripts use."""
    folder = store.root / TOKENIZER
    if not (folder / "COMMITTED").exists():
        texts = itertools.chain(task.tokenizer_text(), *itertools.repeat(tuple(sample_text()), SCRIPT_REPEATS))
        tokenizer = Tokenizer.train(texts, config.model.vocab_tokens)
        tokenizer.save(folder)
        store.write_json_once(f"{TOKENIZER}/COMMITTED", {"vocabulary": tokenizer.vocab_size})
    return Tokenizer.load(folder)
