"""MyGO: minimalist policy gradient optimisation (Mujica-MyGO paper, section 3.3 and appendix D).

A round samples trajectories for its questions from the current policy, keeps those whose reward
beats a threshold, and maximises their likelihood: no advantages, no ratios, no reference model. The
threshold follows the policy:

    K := max(K', (r_mean / r_sup + 1) / 2 * r_sup)

with r_mean the mean reward of the round's first attempts and r_sup the best reward there is
(`trajectories.select` says how the printed formula is read). A question is tried until m
trajectories are kept or `max_attempts` are spent; each kept planner conversation brings the
conversations of its workers along as rows of their own.

`schedule` says which policy samples a round. Online: the newest one. Asynchronous: round n + 1 is
sampled before round n is learnt, by the policy that round n - 1 left, so that both can go on at
once. Offline: the warm-up's, all rounds before the first is learnt. The stages and the units of
work are the same, in another order; each trajectory says which policy sampled it.

K begins at `initial_threshold`, which the paper chooses for each data set. Offline K stays there in
all rounds, as in appendix E of the paper's first version. `threshold` says otherwise: `rising` lets
K follow the policy offline too, `fixed` keeps it in every schedule. A K that is fixed at 0 is
rejection-sampling fine-tuning.

Differences from the paper, all of them:

- Its printed threshold lacks the factor one half and would accept nothing; a reward of r_sup passes
  where K = r_sup.
- The paper does not print the values at which K begins. Ours is 0 unless `initial_threshold` says
  otherwise.
- A trajectory whose planner conversation repeats one that is kept for its question is not kept, and
  does not count towards m.
- Attempts after the first come in waves of 1, 2, 4, ... for all questions of a shard that lack kept
  ones, so that the engine's batch stays full; what a wave samples beyond m is left out.
- The reward is the one that the configuration names (`rewards`); the paper's is F1.
- Rows of earlier rounds and of the warm-up's correct trajectories are replayed at a stated share,
  and a round may learn its rows in several epochs (`epochs`; the paper does not say how many).
- Conversations are packed and every trained token of a batch weighs the same, so a long
  conversation weighs more than a short one. The paper's objective sums over a trajectory; its SFT
  framework averages over tokens as well.
- Adam's moments live on from phase to phase; the learning rate falls along one cosine over all
  rounds, each round on its stretch of it.
- Questions are taken in the task's fixed order, from the beginning again when all are used; the
  paper draws 20,000 once.
- A turn that a length limit cut carries no loss. A turn ends at its closing tag or where the model
  begins to write an observation of its own (`agents/protocol.py`); the paper does not say how turns
  end.
- A conversation longer than a training row is left out, and counted.
"""

import collections
import time
from collections.abc import Sequence

import numpy as np

from mujica_jax.config.methods import MygoConfig
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.mygo_rounds import plan_round, sample_round
from mujica_jax.methods.phases import Phase, PhaseResult, PhaseState, tokens_of
from mujica_jax.methods.round_statistics import advice, in_words, round_statistics
from mujica_jax.methods.rounds import method_of
from mujica_jax.methods.run import Run
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Conversation, Trajectory
from mujica_jax.trajectories.packing import PackedRows, pack, too_long
from mujica_jax.trajectories.select import select, training_rows

LAG_ROUNDS = {
    "online": 0,
    "asynchronous": 1,
}  # rounds that are sampled before one is learnt; offline: all


def mygo(run: Run) -> list[PhaseResult]:
    """The warm-up, all rounds, and the control if asked for. Finished phases are read from the run
    directory."""
    state, warmed, demonstrations = begin(run, replayed=True)
    rounds = _run_rounds(run, state, demonstrations.rewarded)
    return with_control(run, state, demonstrations, warmed, rounds)


def _run_rounds(run: Run, state: PhaseState, rewarded: Sequence[Conversation]) -> list[PhaseResult]:
    """From the warmed-up state. `rewarded`: rows of the warm-up with the best reward, for the
    replay."""
    config = method_of(run, MygoConfig)
    lag = LAG_ROUNDS.get(config.schedule, config.rounds)
    states = [state]  # by version of their policies
    waiting: collections.deque[tuple[list[Trajectory], float]] = (
        collections.deque()
    )  # sampled and not learnt
    k = config.initial_threshold
    replay = list(rewarded)
    results: list[PhaseResult] = []
    for number in range(1, config.rounds + 1):
        began = time.monotonic()
        phase = Phase(name=f"round {number}", step=number)
        for coming in range(number + len(waiting), min(number + lag, config.rounds) + 1):
            version = max(0, coming - 1 - lag)
            if coming > number and run.config.sampling.workers == "external":
                plan_round(
                    run, coming, version, k
                )  # the samplers begin with it; it is waited for when its turn comes
                break
            trajectories, k = sample_round(
                run, states[version], coming, version=version, previous_k=k
            )
            waiting.append((trajectories, k))
            run.compare(states[version], trajectories, coming, version)
        trajectories, round_k = waiting.popleft()
        kept = select(
            trajectories,
            k=round_k,
            keep_per_question=config.keep_per_question,
            best_reward=run.reward.best,
        )
        found = round_statistics(trajectories, kept, best_reward=run.reward.best)
        behind = min(lag, number - 1)
        stale = f", sampled by policy {number - 1 - behind}, {behind} behind" if lag else ""
        run.progress.line(f"{phase.name}: K {round_k:.3f}, {in_words(found)}{stale}")
        selected = training_rows(kept)
        rows = run.fitting(selected)
        with run.clock.stage("packing"):
            packed = _mixture(run, rows, replay, number)
        steps = (
            steps_of_epochs(packed.num_rows, run.config.trainer.rows_per_step, config.epochs)
            if kept
            else 0
        )
        if steps:
            state = run.learn(
                phase.name,
                state,
                lambda packed=packed: packed,
                steps=steps,
                peak=config.learning_rate,
                end_value=config.end_learning_rate,
                stretch=((number - 1) / config.rounds, number / config.rounds),
            )
        else:
            reason = why_nothing_is_learnt(
                trajectories, kept, k=round_k, row_tokens=run.config.trainer.row_tokens
            )
            run.progress.line(f"{phase.name}: {reason}")
        replay += rows
        states.append(state)
        run.commit_policy(state, number)
        slots = steps * run.config.trainer.rows_per_step * run.config.trainer.row_tokens
        spent = {
            "accepted": len(kept),
            "forward_tokens": tokens_of(trajectories),
            "trained_slots": slots,
        }
        results.append(
            run.finish_phase(phase, state, began=began, trajectories=len(trajectories), **spent)
        )
        left_out = too_long(selected, run.config.trainer.row_tokens)
        of_rows = {"policy_lag": behind, "rows": len(rows), "too_long": left_out, "steps": steps}
        run.metrics.write("mygo", number, {"k": round_k, **found, **of_rows})
    return results


def why_nothing_is_learnt(
    trajectories: Sequence[Trajectory], kept: Sequence[Trajectory], *, k: float, row_tokens: int
) -> str:
    """Return the sentence for a round without a training row: nothing beat K, or all of what was
    kept is too long."""
    if not kept:
        return (
            f"no trajectory of {len(trajectories)} beat K = {k:.3f}; the policy stays as it is. "
            f"{advice(trajectories)}"
        )
    lengths = [len(row.token_ids) for row in training_rows(kept)]
    return (
        f"{len(kept)} of {len(trajectories)} trajectories beat K = {k:.3f}, and none of their "
        f"{len(lengths)} conversations fits trainer.row_tokens {row_tokens}, the shortest has "
        f"{min(lengths)} tokens; the policy stays as it is. Raise trainer.row_tokens, or lower "
        "agent.max_trajectory_tokens"
    )


def _mixture(
    run: Run, rows: Sequence[Conversation], replay: Sequence[Conversation], number: int
) -> PackedRows:
    """The round's rows and `replay` times as many older ones, drawn without replacement."""
    draw = np.random.default_rng((run.config.seed, number))
    count = min(len(replay), round(method_of(run, MygoConfig).replay * len(rows)))
    older = (
        [replay[index] for index in sorted(draw.choice(len(replay), count, replace=False))]
        if count
        else []
    )
    return pack(
        [*rows, *older], row_tokens=run.config.trainer.row_tokens, seed=run.config.seed + number
    )
