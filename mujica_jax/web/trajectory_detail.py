"""One trajectory for the page: its tree, its conversations, and its tokens one by one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow
import pyarrow.compute
import tokenizers

from mujica_jax.records import Conversation, GoldPassage, Search, Trajectory, Turn

# What a decoder writes for bytes that are no complete character.
REPLACEMENT = "\ufffd"
WORKER = "worker"


def detail(
    trajectory: Trajectory, question: dict[str, Any] | None, tokenizer: tokenizers.Tokenizer | None
) -> dict[str, Any]:
    """Return a trajectory as a JSON object.

    `question` is its row in the table of questions, or None if the run has not recorded it.
    """
    gold = _gold_passages(question)
    return {
        "question_id": trajectory.question_id,
        "question": question["question"] if question else None,
        "kind": question["kind"] if question else None,
        "answers": (question["answers"] or []) if question else [],
        "gold_passages": [dataclasses.asdict(passage) for passage in gold],
        "attempt": trajectory.attempt,
        "policy_version": trajectory.policy_version,
        "seed": trajectory.seed,
        "answer": trajectory.answer,
        "stop_reason": trajectory.stop_reason.value,
        "reward": trajectory.reward if trajectory.is_rewarded else None,
        "rewards_by_part": dict(trajectory.rewards_by_part),
        "counts": dict(trajectory.counts),
        "seconds": trajectory.seconds,
        "iterations": _iterations(trajectory, gold),
        "conversations": [
            _conversation(conversation, tokenizer) for conversation in trajectory.conversations
        ],
        "has_tokenizer": tokenizer is not None,
    }


def question_of(questions: pyarrow.Table, question_id: str) -> dict[str, Any] | None:
    """Return the row of a question, or None."""
    # Arrow makes its functions when it is imported, so a type checker does not see them.
    compute: Any = pyarrow.compute
    rows = questions.filter(compute.equal(questions["id"], question_id)).slice(0, 1)
    return rows.to_pylist()[0] if rows.num_rows else None


def token_texts(ids: Sequence[int], tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Return the text that each token adds to the text of the tokens before it.

    Together they are the decoded text. If several tokens make up one character, the last of them
    has it, and the text of the others is empty.
    """
    texts: list[str] = []
    # The tokens between `start` and `read` are decoded again with each new token, because the text
    # of a token may depend on the one before it: some tokenizers drop the first blank of a text.
    start = 0
    read = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if text.endswith(REPLACEMENT) and end < len(ids) and end - read < 4:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start = read
        read = end
    return texts


def _gold_passages(question: dict[str, Any] | None) -> list[GoldPassage]:
    """Return the gold passages of a question, as far as they are recorded."""
    passages = (question["gold_passages"] or []) if question else []
    return [
        GoldPassage(
            title=passage["title"] or "",
            text=passage["text"] or "",
            by_title=bool(passage["by_title"]),
        )
        for passage in passages
    ]


def _iterations(trajectory: Trajectory, gold: Sequence[GoldPassage]) -> list[dict[str, Any]]:
    """Return the planner's turns, each with its searches and the worker's conversation of each."""
    workers = _workers_by_search(trajectory)
    planner_turns = []
    if trajectory.conversations:
        turns = trajectory.conversations[0].turns
        planner_turns = [turn.text for turn in turns if turn.role == "model"]
    numbers = sorted({search.iteration for search in trajectory.searches})
    last = max([*numbers, len(planner_turns) - 1], default=-1)

    iterations = []
    for number in range(last + 1):
        searches = []
        for place, search in enumerate(trajectory.searches):
            if search.iteration == number:
                searches.append({**_search(search, gold), "conversation": workers.get(place)})
        turn = planner_turns[number] if number < len(planner_turns) else None
        iterations.append({"number": number + 1, "turn": turn, "searches": searches})
    return iterations


def _workers_by_search(trajectory: Trajectory) -> dict[int, int]:
    """Return the number of the worker's conversation for each search.

    Workers' conversations have the order of the searches. If there are fewer of them, a worker
    wrote nothing, and it cannot be told which one.
    """
    workers = [
        number
        for number, conversation in enumerate(trajectory.conversations)
        if conversation.role == WORKER
    ]
    if len(workers) != len(trajectory.searches):
        return {}
    return dict(enumerate(workers))


def _search(search: Search, gold: Sequence[GoldPassage]) -> dict[str, Any]:
    """Return a search with its materials, each marked as selected and as gold."""
    is_cut = len(search.materials) == 1
    materials = []
    for number, text in enumerate(search.materials):
        material = {
            "text": text,
            "selected": number in search.selected,
            "gold": any(passage.is_shown_by(text, cut=is_cut) for passage in gold),
        }
        materials.append(material)
    return {
        "query": search.query,
        "entity": search.entity,
        "sentence": search.sentence,
        "found": search.found,
        "materials": materials,
    }


def _conversation(
    conversation: Conversation, tokenizer: tokenizers.Tokenizer | None
) -> dict[str, Any]:
    """Return a conversation with its turns and their tokens."""
    turns = [_turn(turn, tokenizer) for turn in conversation.turns]
    return {"role": conversation.role, "turns": turns}


def _turn(turn: Turn, tokenizer: tokenizers.Tokenizer | None) -> dict[str, Any]:
    """Return a turn. Its tokens are columns: ids, texts, log-probabilities, marks of special ones.

    `texts` is null without a tokenizer.
    """
    texts = None
    special = None
    if tokenizer is not None:
        added = tokenizer.get_added_tokens_decoder()
        texts = token_texts(turn.token_ids, tokenizer)
        special = [token_id in added for token_id in turn.token_ids]
    logprobs = None
    if turn.logprobs is not None:
        logprobs = [round(value, 4) for value in turn.logprobs]
    return {
        "role": turn.role,
        "text": turn.text,
        "trained": turn.trained,
        "cut": turn.cut,
        "ids": list(turn.token_ids),
        "texts": texts,
        "special": special,
        "logprobs": logprobs,
    }
