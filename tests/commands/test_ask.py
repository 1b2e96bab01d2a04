"""The program `ask`: a run and a question become the arguments of `eval`."""

import pytest

from mujica_jax.commands import ask
from mujica_jax.errors import UserError


def test_a_run_and_a_question_become_flags_of_eval():
    assert ask.eval_arguments(["runs/mine", "Who made Taxi!?", "--policy", "0"]) == [
        "--checkpoint",
        "runs/mine",
        "--ask=Who made Taxi!?",
        "--policy",
        "0",
    ]


def test_a_configuration_comes_first():
    words = ask.eval_arguments(["smollm2", "Who?", "--config", "two_wiki_text_smollm2"])
    assert words[:3] == ["two_wiki_text_smollm2", "--checkpoint", "smollm2"]


@pytest.mark.parametrize("words", [[], ["runs/mine"], ["--policy", "0", "runs/mine", "Who?"]])
def test_without_a_run_and_a_question_first_the_usage_is_told(words):
    with pytest.raises(UserError, match=r"write .*ask RUN"):
        ask.eval_arguments(words)


def test_a_question_without_quotes_is_recognised():
    with pytest.raises(UserError, match="the question is 'Who', but 'made' follows it"):
        ask.eval_arguments(["runs/mine", "Who", "made", "Taxi?"])


def test_mistakes_end_the_program_with_status_2(capsys, tmp_path):
    assert ask.main(["runs/mine"]) == 2
    assert capsys.readouterr().err.startswith("error: a run and a question are needed")
    assert ask.main([str(tmp_path / "nowhere"), "Who made Taxi!?"]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_the_help_shows_the_usage_and_the_flags_that_matter(capsys):
    with pytest.raises(SystemExit) as ended:
        ask.main(["--help"])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert 'ask RUN|MODEL "QUESTION" [flags]' in shown
    assert "--agent.max-iterations" in shown
    assert "--beside" not in shown
