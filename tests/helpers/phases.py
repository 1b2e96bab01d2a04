"""Every phase of the smoke run in its order, each with the progress report at which a test acts (0:
as it begins).
"""

PHASES = {
    "warm-up: playing the demonstrations": 0,
    "pretraining: learning": 7,
    "warm-up: learning": 40,
    "committing policy 0": 0,
    "warm-up: evaluating, greedy": 1,
    "warm-up: evaluating, sampled": 1,
    "round 1: sampling": 2,
    "round 1: learning": 2,
    "committing policy 1": 0,
    "round 1: evaluating, greedy": 1,
    "round 1: evaluating, sampled": 1,
    "round 2: sampling": 2,
    "round 2: learning": 2,
    "committing policy 2": 0,
    "round 2: evaluating, greedy": 1,
    "round 2: evaluating, sampled": 1,
    "control: learning": 4,
    "control: evaluating, greedy": 1,
    "control: evaluating, sampled": 1,
}


def next_phase(phase: str) -> str:
    names = list(PHASES)
    return names[names.index(phase) + 1]
