"""Parts of runs that are made from a user's own code."""

import pytest

from mujica_jax.config.command_line import command_line
from mujica_jax.errors import UserError
from mujica_jax.runs.parts import make_agent
from tests.helpers.paths import HELPERS
from tests.helpers.plug_in_modules import AGENT
from tests.helpers.plug_in_modules import write_module as write_module


def test_an_agent_that_a_function_makes_is_checked_when_it_is_made(write_module):
    """Before, nothing is known but the function."""
    write_module(
        "making_plug_in",
        AGENT.replace("mujica_jax.agents.mujica:Mujica", "making_plug_in:make")
        + "def make(tokenizer, config): return object()\n",
    )
    words = [str(HELPERS / "smoke_config.py"), "--agent.kind", "making_plug_in:PatientConfig"]
    config = command_line(words, default="tiny_world")
    with pytest.raises(UserError) as refused:
        make_agent(config.agent, None)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "the agent making_plug_in:make has no method `async def run(self, attempt, environment, "
        "policy)`: add it (mujica_jax/agents/agent.py describes it)"
    )
