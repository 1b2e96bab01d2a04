"""A reward that charges for tokens: between two right answers, the shorter episode is better."""

from mujica_jax.metrics import Score
from mujica_jax.records import Reward, Trajectory, generated_tokens

# An episode with at most this many generated tokens costs nothing, so that the best total is 1.
FREE_TOKENS = 200
COST_PER_TOKEN = 0.001
# The most that an episode can cost. A long right answer is still better than a wrong one.
MAX_COST = 0.5


def brevity(score: Score, trajectory: Trajectory) -> Reward:
    """Return the F1 of the answer, less a charge for each token above the free ones."""
    charged_tokens = max(0, generated_tokens([trajectory]) - FREE_TOKENS)
    cost = min(MAX_COST, COST_PER_TOKEN * charged_tokens)
    return Reward(total=max(0.0, score.f1 - cost), parts={"f1": score.f1, "length": -cost})
