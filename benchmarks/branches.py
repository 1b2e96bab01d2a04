"""What a second branch of a question costs: wall time of episodes whose planner asks one
sub-question, or two at once.

    python benchmarks/branches.py --checkpoint smollm2 [--repeats 5]

The model computes every token of every turn (lengths are forced by what a script writes; what it
draws is thrown away), so that time is the engine's and the same turns are compared: one
sub-question and the answer; two in one turn and the answer; two in two turns
(`agent.parallel=False`) and the answer. One episode runs at a time. Prints one JSON line with the
medians, and both of the latter against the first. The first run of each compiles and is left out.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt
from mujica_jax.agents.mujica import Mujica, PlannerState, WorkerState
from mujica_jax.config.schema import EngineConfig, MujicaConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.factory import make_engine
from mujica_jax.inference.requests import Completion, SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Entity, Question, StopReason
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.runs.model import open_model
from mujica_jax.runtime.compilation_cache import use_compilation_cache
from mujica_jax.tasks.task import EnvironmentKind, Material

CONFIG = MujicaConfig(
    prompt="zero_shot",
    max_iterations=5,
    max_searches_per_turn=4,
    max_turn_tokens=128,
    max_trajectory_tokens=1024,
    max_observation_tokens=400,
)
PASSAGE = (
    "A film of 1961 about a harbour, its pilots and a winter in which the river froze for the "
    "first time. " * 3
)
QUERIES = ("When was the film Amber Tide released?", "When was the film The Tin Orchard released?")
THOUGHT = (
    "I need the release dates of the films, which do not depend on each other, and compare them."
)


class Passages:
    """An environment in which every search finds the same three passages, at once."""

    kind: EnvironmentKind = "text"
    statistics = RetrievalStatistics()

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        return tuple(Material(text=f"Film {number}: {PASSAGE}") for number in range(3))


class Written:
    """A policy whose engine computes as many tokens as the script writes."""

    version = 0

    def __init__(self, generator: BatchedGenerator, tokenizer: Tokenizer, branches: int) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._branches = branches
        self.tokens = 0

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        text = self._text(state)
        ids = (*self._tokenizer.encode_model(text), self._tokenizer.end_of_turn_id)
        self.tokens += len(ids)
        forced = SamplingParams(max_new_tokens=len(ids), temperature=1.0, seed=params.seed)
        await self._generator.generate(prompt, forced, continues=continues)
        return Completion(
            token_ids=ids,
            logprobs=None,
            sampling_logprobs=None,
            finish_reason="stop",
            policy_version=self.version,
        )

    def _text(self, state: object) -> str:
        if isinstance(state, WorkerState):
            return protocol.write_worker(
                "Passage [0] says when it was released.", [0], "It was released in 1961."
            )
        assert isinstance(state, PlannerState)
        if len(state.searches) == self._branches:
            return protocol.write_answer("1948 is earlier than 1961.", "The Tin Orchard")
        queries = QUERIES[len(state.searches) : self._branches]
        return protocol.write_text_searches(
            THOUGHT, [protocol.SearchCall(query=query, candidate=None) for query in queries]
        )


def play(
    generator: BatchedGenerator, tokenizer: Tokenizer, branches: int, parallel: bool, seed: int
) -> tuple[float, int]:
    """Return seconds and tokens of one episode, from an empty cache."""
    generator.reset_cache()
    agent = Mujica(tokenizer, dataclasses.replace(CONFIG, parallel=parallel))
    policy = Written(generator, tokenizer, branches)
    question = Question(
        id="films", text="Which film came out first, Amber Tide or The Tin Orchard?", answers=("x",)
    )
    attempt = Attempt(question=question, number=0, seed=seed, temperature=1.0)
    start_time = time.perf_counter()
    trajectory = asyncio.run(agent.run(attempt, Passages(), policy))
    seconds = time.perf_counter() - start_time
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert len(trajectory.searches) == branches
    return seconds, policy.tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--checkpoint", required=True, help="a Hugging Face directory, a GGUF file, or smollm2"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    use_compilation_cache()
    try:
        model = open_model(arguments.checkpoint, arguments.dtype)
        tokenizer = model.tokenizer
        decoder = model.load(None, arguments.dtype)
        slots = EngineConfig(max_num_seqs=8, decode_steps_per_call=8, prefill_tokens=1024)
        # No token has this id, so nothing stops.
        never = decoder.config.vocab_size
        engine = make_engine(
            decoder, slots, positions=CONFIG.max_trajectory_tokens, stop_token_ids=[never]
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    generator = BatchedGenerator(engine, prefix_reuse=True)
    kinds = {"one": (1, True), "two at once": (2, True), "two in turn": (2, False)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    tokens: dict[str, int] = {}
    # the kinds take turns, so that a busy minute is every one's
    for run in range(1 + arguments.repeats):
        for name, (branches, parallel) in kinds.items():
            episode_seconds, tokens[name] = play(generator, tokenizer, branches, parallel, seed=run)
            if run > 0:
                seconds[name].append(episode_seconds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result: dict[str, Any] = {
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "tokens": tokens,
        "two_at_once_against_one": round(medians["two at once"] / medians["one"], 3),
        "two_in_turn_against_one": round(medians["two in turn"] / medians["one"], 3),
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
