"""Let a second model write parts of DecEx-RAG's search trees.

In the paper Qwen3-30B-A3B writes everything in a tree except the retrieval decision, which the
trained policy writes itself. The second model has its own prompt for each kind of execution, as in
the paper's appendix A.1:

- Table 4: decide whether to stop, and write the final answer or the next sub-question.
- Table 5: write a sub-question.
- Table 8: continue an episode with a search or the final answer.

Tables 6 and 7 are about the retrieval decision and are not needed here. The wording of the prompts
is ours. If a tree forces a decision, the prompt allows only this decision.

The replies are written again in the policy's format (`agents/decex.py`) and in the policy's tokens,
so that nothing else of a reply is learnt. If a reply cannot be read, or the endpoint gives none,
the result is empty and makes no branch.
"""

import dataclasses
import re

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Policy
from mujica_jax.agents.decex import (
    AFTER_THOUGHT,
    DECEX,
    DecexState,
    write_answer,
    write_search,
    write_sub_question,
)
from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.agents.single import numbered_passages
from mujica_jax.inference.requests import Completion, ReplyError, SamplingParams, TokenIds
from mujica_jax.models.thoughts import outside_thoughts
from mujica_jax.models.tokenizer import Tokenizer, neutralise

_TASK = (
    "You solve a question step by step: it is broken down into sub-questions, and these are solved "
    "one after the other until the question can be answered."
)
_HISTORY = (
    "You are given the question and the iterations so far. Each has a thought, a sub-question, and "
    "either its answer from memory or the passages that a search found."
)
_BRIEF = "Keep questions, queries and answers short: nouns or brief phrases where possible."
_DECIDE = "\n".join(
    [
        f"{_TASK} {_HISTORY} Judge whether they are enough to answer the question. Rely on them "
        "alone, and bring in nothing that does not stand there, also no knowledge of your own.",
        "If they are enough: give your reasons, with the evidence, inside <reasoning> ... "
        "</reasoning>, and then the final answer inside <answer> ... </answer>.",
        "If they are not: say what is missing inside <reasoning> ... </reasoning>, and then write "
        "the next sub-question inside <question> ... </question>.",
        "If the last sub-question was not solved, rather ask it again than give a hasty answer.",
        _BRIEF,
    ]
)
_ASK = "\n".join(
    [
        f"{_TASK} {_HISTORY} Write the next sub-question that has to be solved.",
        "Give your reasons first, and then the sub-question inside <question> ... </question>.",
        _BRIEF,
    ]
)
_ANSWER = "\n".join(
    [
        f"{_TASK} {_HISTORY} Answer the question from them, as well as they allow.",
        "Give your reasons first, and then the final answer inside <answer> ... </answer>.",
        _BRIEF,
    ]
)
_GO_ON = "\n".join(
    [
        f"{_TASK} {_HISTORY} Take them as true, and reason on from them.",
        "If you lack knowledge, write a query for a search engine inside <search> ... </search>. "
        "If you lack none, write the final answer inside <answer> ... </answer>. Give your reasons "
        "first, and do not end before one of the two.",
        _BRIEF,
    ]
)
_STOPS = ("</question>", "</answer>", "</search>")
_FIRST_FIELD = re.compile(r"<(?:question|answer|search)>", re.IGNORECASE)
_REASONING_TAG = re.compile(r"</?(?:reasoning|think)>", re.IGNORECASE)


class TreeWriter:
    """A `Policy` that writes a second model's turns in the trained policy's format and tokens."""

    def __init__(
        self, model: Policy, model_tokenizer: Tokenizer, policy_tokenizer: Tokenizer, version: int
    ) -> None:
        """Make a writer from a second model. `version` is the version of the trained policy."""
        self._model = model
        self._model_tokenizer = model_tokenizer
        self._policy_tokenizer = policy_tokenizer
        self.version = version

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Ask the second model for the next text, and return it in the trained policy's tokens."""
        # The second model has its own prompts, so the agent's prompt is not used.
        del prompt, continues
        assert isinstance(state, DecexState), "config.checks makes sure that the agent is decex"
        reply = await self._ask(state, params)
        text = self._in_policy_format(state, reply)

        begins_turn = not (state.turn or state.begins)
        if begins_turn:
            ids = tuple(self._policy_tokenizer.encode_turn(text))
        else:
            ids = tuple(self._policy_tokenizer.encode_model(text))
        is_cut = len(ids) > params.max_new_tokens
        return Completion(
            token_ids=ids[: params.max_new_tokens],
            logprobs=None,
            finish_reason="length" if is_cut else "stop_string",
            policy_version=self.version,
        )

    async def _ask(self, state: DecexState, params: SamplingParams) -> str:
        """Return the second model's reply.

        It is empty if the endpoint gave no reply, or if a length limit cut the reply off.
        """
        dialogue = Dialogue(self._model_tokenizer, DECEX, _instruction(state))
        dialogue.add_user(_request(state))
        params = dataclasses.replace(params, stop_strings=_STOPS)
        try:
            completion = await self._model.generate(
                dialogue.token_ids, params, state=state, continues=False
            )
        except ReplyError:
            return ""
        if completion.finish_reason == "length":
            return ""
        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]
        return self._model_tokenizer.decode(ids)

    def _in_policy_format(self, state: DecexState, reply: str) -> str:
        """Return the reply in the policy's format; empty if it lacks the required field."""
        question = _field("question", reply)
        answer = _field("answer", reply)
        query = _field("search", reply)
        if state.begins.endswith(AFTER_THOUGHT["go_on"]):
            return f" {question}\n" if question else ""
        if state.begins.endswith(AFTER_THOUGHT["stop"]):
            return f" {answer} </answer>" if answer else ""
        thought = _reasons(reply)
        if not state.turn:
            thought = f"<think> {thought}"
        if answer:
            return write_answer(thought, answer)
        if state.is_piece:
            return write_sub_question(thought, question) if question else ""
        return write_search(query, thought) if query else ""


def _instruction(state: DecexState) -> str:
    """Return the system prompt for the kind of text that is needed."""
    if state.begins.endswith(AFTER_THOUGHT["go_on"]):
        return _ASK
    if state.begins.endswith(AFTER_THOUGHT["stop"]):
        return _ANSWER
    if not state.is_piece:
        return _GO_ON
    # Before the first step there is nothing to answer from, so the model has to ask.
    return _DECIDE if state.steps else _ASK


def _request(state: DecexState) -> str:
    """Return the question and the iterations so far, as the message to the second model.

    This text may come from outside, so it is not trusted.
    """
    lines = [f"Question: {protocol.one_line(state.question.text)}"]
    for number, step in enumerate(state.steps, start=1):
        lines += [
            f"Iteration {number}",
            f"Thought: {step.thought}",
            f"Sub-question: {step.question}",
        ]
        if step.recalled is not None:
            lines.append(f"Answer from memory: {step.recalled}")
        else:
            lines += [f"Query: {step.query}", "Passages:", numbered_passages(step.materials)]
    if state.asked is not None:
        lines += [f"Iteration {len(state.steps) + 1}", f"Sub-question: {state.asked}"]
    elif not state.steps:
        lines.append("There is no iteration so far.")
    return "\n".join(lines)


def _field(tag: str, reply: str) -> str | None:
    """Return the content of a tag in a reply; None if it is missing or empty."""
    text = protocol.field(tag, reply)
    return neutralise(text) if text else None


def _reasons(reply: str) -> str:
    """Return the reasons in a reply, on one line.

    They are the content of the reasoning tag or, without this tag, the text before the first field.
    """
    reasons = protocol.field("reasoning", reply)
    if reasons is None:
        reasons = _FIRST_FIELD.split(outside_thoughts(reply), maxsplit=1)[0]
    return neutralise(protocol.one_line(_REASONING_TAG.sub(" ", reasons)))
