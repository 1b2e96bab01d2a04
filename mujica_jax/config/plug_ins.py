"""Check a user's own task, agent, method and reward before a run starts.

A plug-in is Python code outside this package that a setting names as `module:name`. Its interface is
checked here, so that a mistake ends the program with one sentence and not with a traceback in the
middle of a run.
"""

import inspect
from collections.abc import Callable
from typing import Any

from mujica_jax.config.agents import PromptedAgent
from mujica_jax.config.kinds import is_plug_in
from mujica_jax.config.methods import DecexTreeConfig
from mujica_jax.config.named_objects import (
    implementation,
    imported_object,
    is_place,
    named_object,
    place_of,
)
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError

# The arguments with which the implementation of a section is called.
CALLED_WITH = {"task": ("config",), "agent": ("tokenizer", "config"), "method": ("run",)}
RUN_CALLED_WITH = ("attempt", "environment", "policy")
REWARD_CALLED_WITH = ("score", "trajectory")
REWARD_WITH_QUESTION = ("score", "trajectory", "question")


def check_plug_ins(config: Config) -> None:
    """Check the plug-ins of a configuration. Their modules are imported. Raises UserError."""
    for name in CALLED_WITH:
        section = getattr(config, name)
        if is_plug_in(type(section)):
            _check_section(name, section)
    if is_place(config.reward):
        _check_reward(config)


def reward_function(place: str) -> Callable[..., Any]:
    """Return the reward that a user names as module:name.

    Raises UserError if it cannot be imported or cannot be called as a reward.
    """
    reward = named_object(place, setting="reward")
    if not (takes(reward, REWARD_CALLED_WITH) or takes(reward, REWARD_WITH_QUESTION)):
        raise UserError(
            f"the reward {place} takes {_parameters(reward)}, but it is called with "
            f"{_in_brackets(REWARD_CALLED_WITH)} or {_in_brackets(REWARD_WITH_QUESTION)}: change "
            "its parameters"
        )
    return reward


def reads_question(reward: Callable[..., Any]) -> bool:
    """Return whether a reward needs the question as its third argument."""
    return not takes(reward, REWARD_CALLED_WITH)


def takes(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """Return whether a function or class can be called with this many positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        # A function that is written in C may have no signature.
        return True
    return True


def check_agent_methods(agent: Any, *, name: str, needs_opening: bool) -> None:
    """Check that an agent, or the class of an agent, has the methods that are called.

    `name` is the agent's name in messages. Raises UserError.
    """
    # A method that is looked up in a class also takes the object.
    own_argument = ("self",) if inspect.isclass(agent) else ()
    run = getattr(agent, "run", None)
    if not inspect.iscoroutinefunction(run) or not takes(run, own_argument + RUN_CALLED_WITH):
        raise UserError(
            f"the agent {name} has no method `async def run(self, attempt, environment, policy)`: "
            "add it (mujica_jax/agents/agent.py describes it)"
        )
    opening = getattr(agent, "opening", None)
    if needs_opening and not (
        callable(opening) and takes(opening, (*own_argument, "role", "kind"))
    ):
        raise UserError(
            f"the agent {name} has no method `opening(self, role, kind)`, but its settings derive "
            "from PromptedAgent: add it, or derive the settings from AgentLimits"
        )


def _check_section(section_name: str, section: Any) -> None:
    """Check that a plug-in can be imported again, and that its implementation can be called."""
    place = place_of(type(section))
    is_in_function = "<locals>" in place or place.startswith("mujica_config_")
    if is_in_function or imported_object(place, setting=section_name) is not type(section):
        raise UserError(
            f"{section_name} is a {type(section).__name__}, which a run cannot import again: move "
            "it from the configuration file into a module of its own"
        )

    implemented = implementation(section)
    arguments = CALLED_WITH[section_name]
    if not takes(implemented, arguments):
        raise UserError(
            f"the {section_name} {section.implementation} takes {_parameters(implemented)}, but it "
            f"is called with {_in_brackets(arguments)}: change its parameters"
        )
    if section_name == "agent" and inspect.isclass(implemented):
        check_agent_methods(
            implemented,
            name=section.implementation,
            needs_opening=isinstance(section, PromptedAgent),
        )


def _check_reward(config: Config) -> None:
    """Check a user's own reward. Raises UserError."""
    reward = reward_function(config.reward)
    # A reward is a function, or an object of a class with `async def __call__`.
    is_asynchronous = any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__)))
    if is_asynchronous and isinstance(config.method, DecexTreeConfig):
        raise UserError(
            f"the reward {config.reward} is asynchronous, but method.kind decex scores its trees "
            "without waiting: give a reward that is a plain function"
        )


def _parameters(function: Callable[..., Any]) -> str:
    """Return the names of a function's parameters, in brackets."""
    return _in_brackets(tuple(inspect.signature(function).parameters))


def _in_brackets(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"
