"""DPO on a file: the pairs that are learnt, and their loss beside the formula of the paper in
PyTorch.
"""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mujica_jax.errors import UserError
from mujica_jax.learning.conversations import conversation_of
from mujica_jax.learning.losses.preference import DPO
from mujica_jax.methods.dpo import Pair, num_tokens, packed_pairs, pairs_that_fit
from mujica_jax.methods.from_file import check_fits
from mujica_jax.runs.phases import Phase
from mujica_jax.trajectories.messages import read_preferences
from tests.models.test_tokenizer import TRAINED

BETA = 0.3
LENGTH = 256


class FakeRun:
    """What the functions of this test read of a run."""

    def __init__(self, sequence_length: int = LENGTH) -> None:
        trainer = types.SimpleNamespace(sequence_length=sequence_length)
        self.config = types.SimpleNamespace(trainer=trainer, seed=0)
        self.lines: list[str] = []
        self.progress = types.SimpleNamespace(line=self.lines.append)


@pytest.fixture
def pairs(tmp_path) -> list[Pair]:
    prompt = [
        {"role": "user", "content": "Who directed it?"},
        {"role": "assistant", "content": "Ask again"},
        {"role": "user", "content": "Who?"},
    ]
    records = [
        {"prompt": "Who directed it?", "chosen": "Rome", "rejected": "the director of the film"},
        {
            "prompt": prompt,
            "chosen": [
                {"role": "assistant", "content": "<answer>Rome</answer>"},
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": "Paris"},
            ],
            "rejected": [{"role": "assistant", "content": "New York"}],
        },
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [
        (conversation_of(TRAINED, record.chosen), conversation_of(TRAINED, record.rejected))
        for record in read_preferences([str(path)])
    ]


def test_the_loss_of_pairs_from_a_file_is_that_of_the_formula_in_torch(pairs):
    rows = packed_pairs(FakeRun(), Phase(name="dpo", step=1), pairs)  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    policy = random.normal(-1, 0.5, rows.tokens.shape).astype(np.float32)
    reference = random.normal(-1, 0.5, rows.tokens.shape).astype(np.float32)
    loss = DPO(beta=BETA)
    batch = rows.with_columns(reference_log_probs=reference).batch(slice(None), loss.columns)
    value, _ = loss.of(jnp.asarray(policy), batch, loss.counts(batch))

    def log_probability(scores: np.ndarray, pair: int, side: int) -> torch.Tensor:
        """Sum the scores of the tokens of the assistant, found by their text."""
        row, start = rows.placements[2 * pair + side]
        conversation = pairs[pair][side]
        own = torch.tensor(scores[row, start : start + len(conversation.token_ids)])
        return sum(own[place] for place in answered_places(conversation.token_ids, pair))

    expected = []
    for pair in range(len(pairs)):
        policy_ratio = log_probability(policy, pair, 0) - log_probability(policy, pair, 1)
        reference_ratio = log_probability(reference, pair, 0) - log_probability(reference, pair, 1)
        margin = BETA * (policy_ratio - reference_ratio)
        expected.append(-torch.nn.functional.logsigmoid(margin))
    assert float(value) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)


def answered_places(ids: list[int], pair: int) -> list[int]:
    """Return the places of the assistant's tokens after the prompt, read from the text itself."""
    scaffold = TRAINED._backend.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    starts = [
        place + len(scaffold)
        for place in range(len(ids))
        if ids[place : place + len(scaffold)] == scaffold
    ]
    # The prompt of the second pair has a turn of the assistant of its own.
    places: list[int] = []
    for start in starts[pair:]:
        end = ids.index(TRAINED.end_of_turn_id, start)
        places += range(start, end + 1)
    return places


def test_a_pair_that_is_too_long_is_left_out_and_said(pairs):
    longest = max(num_tokens([pair]) for pair in pairs)
    run = FakeRun(longest - 1)
    assert pairs_that_fit(run, pairs) == [  # type: ignore[arg-type]
        pair for pair in pairs if num_tokens([pair]) < longest
    ]
    assert run.lines == [f"1 of 2 pairs exceed {longest - 1} tokens and are left out"]


def test_a_file_whose_pairs_are_all_too_long_is_refused():
    with pytest.raises(
        UserError, match=r"none of the 2 pairs fits trainer.sequence_length 9; the "
    ):
        check_fits(
            FakeRun(9),  # type: ignore[arg-type]
            num_records=2,
            num_fitting=0,
            shortest_tokens=30,
            noun="pairs",
        )
