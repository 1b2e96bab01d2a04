"""What a policy of the tiny world remembers, and what its episodes made of it.

    python benchmarks/common_knowledge.py RUN [--policy 0] [--rounds 1 3]

RUN is a run directory whose world has common knowledge (`task.common_knowledge`). Prints JSON.
`recalled`: the share of facts behind questions of known kinds, and of other ones, whose object is
the most probable token after token of the sentence that begins with the fact's relation and subject
("The director of Dark Pilot is"), up to 200 facts a split. `episodes`, with --rounds, of the
trajectories that those rounds sampled: for questions of known kinds and others, how many there were
with each number of searches, and the share that answered right.
"""

import argparse
import collections
import json
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from mujica_jax.config.files import from_dict
from mujica_jax.config.schema import Config, TinyWorldConfig
from mujica_jax.methods.policies import find_policy
from mujica_jax.metrics import score
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint
from mujica_jax.records import Evidence
from mujica_jax.tasks.tiny_world.world import TinyWorld, build
from mujica_jax.trajectories.store import Store

SPLITS = ("train", "dev", "test")
FACTS, TOKENS = 200, 48


def recalled(model: Path, facts: list[Evidence]) -> float:
    decoder, tokenizer = load_checkpoint(model), Tokenizer.load(model)

    @jax.jit
    def most_probable(tokens: jax.Array, segments: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)
        return decoder.logits(
            decoder(tokens, positions, causal_self_attention(segments, "xla"))
        ).argmax(axis=-1)

    tokens, whole = np.zeros((len(facts), TOKENS), np.int32), []
    for row, fact in enumerate(facts):
        begun = tokenizer.encode_plain(f"The {fact.relation} of {fact.subject} is")
        ids = begun + tokenizer.encode_plain(f" {fact.object}")
        tokens[row, : len(ids)] = ids
        whole.append(slice(len(begun), len(ids)))
    found = np.asarray(most_probable(tokens, (tokens > 0).astype(np.int32)))
    right = [
        (found[row, place.start - 1 : place.stop - 1] == tokens[row, place]).all()
        for row, place in enumerate(whole)
    ]
    return round(float(np.mean(right)), 3)


def episodes(
    run: Path, world: TinyWorld, first: int, last: int
) -> dict[str, dict[int, list[float]]]:
    questions, store = {question.id: question for question in world.questions("train")}, Store(run)
    found = {kind: collections.defaultdict[int, list[float]](list) for kind in ("known", "others")}
    for number in range(first, last + 1):
        for entry in store.shards(round_number=number):
            for trajectory in store.read_shard(entry):
                question = questions[trajectory.question_id]
                right = score(trajectory.final_answer, question.answers, world.rule).em
                found["known" if question.is_known else "others"][len(trajectory.searches)].append(
                    right
                )
    return {
        kind: {
            searches: [len(right), round(float(np.mean(right)), 3)]
            for searches, right in sorted(of.items())
        }
        for kind, of in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--policy", type=int, default=0)
    parser.add_argument("--rounds", type=int, nargs=2, metavar=("FIRST", "LAST"))
    given = parser.parse_args()
    policy = find_policy(str(given.run), policy=given.policy, adapter=None)
    config = from_dict(Config, json.loads((given.run / "config.json").read_text())["config"])
    world = build(cast(TinyWorldConfig, config.task))
    shares = {}
    for split in SPLITS:
        for name, known in (("known", True), ("others", False)):
            asked = [question for question in world.questions(split) if question.is_known == known]
            facts = list(dict.fromkeys(fact for question in asked for fact in question.evidences))[
                :FACTS
            ]
            shares[f"{split}, {name}"] = recalled(policy.model, facts)
    told = {"recalled": shares}
    if given.rounds:
        told["episodes"] = episodes(given.run, world, *given.rounds)
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
