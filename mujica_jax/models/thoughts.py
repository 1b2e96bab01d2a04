"""Separate what a model thinks from what it says: only text outside of its thoughts counts.

A thought begins at `<think>` and ends at the next `</think>`, in capital or small letters. Nothing
in it is read: no tag, no stop string, no action. Three more rules:

- A chat template may open the thought at the end of the prompt (Qwen3-Thinking, R1 distils). The
  model's turn then begins inside it, and has no `<think>` of its own.
- A `</think>` before the turn's first `<think>` closes a thought whose beginning is not in the
  turn. Everything before it is thought. A later `</think>` that closes nothing is removed.
- A thought without an end hides everything behind it.

Engines look for stop strings while a text grows, so they can follow the first rule and not the
second: `inference/requests.py` uses the same tags and is told whether the prompt left a thought
open.
"""

import re

OPEN_THOUGHT = "<think>"
CLOSE_THOUGHT = "</think>"
_TAG = r"<(\s?/)?\s?think\s?>"
# ASCII: a character that merely looks like one of these letters in another case makes no tag, as in
# bytes.
THOUGHT_TAG = re.compile(_TAG, re.IGNORECASE | re.ASCII)
THOUGHT_TAG_BYTES = re.compile(_TAG.encode(), re.IGNORECASE)
LONGEST_TAG_BYTES = len("< / think >")


def outside_thoughts(text: str) -> str:
    """Return what a turn says, without its thoughts and their tags."""
    parts: list[str] = []
    is_open = False
    position = end_of_unopened_thought(text)
    for tag in THOUGHT_TAG.finditer(text, position):
        closes = tag[1] is not None
        if not is_open:
            parts.append(text[position : tag.start()])
        if closes or not is_open:
            position = tag.end()
        is_open = not closes
    if not is_open:
        parts.append(text[position:])
    return "".join(parts)


def end_of_unopened_thought(text: str) -> int:
    """Return where a thought ends that was opened before the turn's beginning.

    The result is 0 if there is no such thought.
    """
    end = 0
    for tag in THOUGHT_TAG.finditer(text):
        closes = tag[1] is not None
        if not closes:
            break
        end = tag.end()
    return end


def is_open_after(text: str, *, was_open: bool = False) -> bool:
    """Return whether a thought is open behind a text; `was_open` says so of its beginning."""
    tags = list(THOUGHT_TAG.finditer(text))
    return was_open if not tags else tags[-1][1] is None


def first_thought(text: str) -> str:
    """Return what stands in the first thought of a turn, empty where no thought is closed."""
    tags = list(THOUGHT_TAG.finditer(text))
    closing = next((tag for tag in tags if tag[1] is not None), None)
    if closing is None:
        return ""
    start = 0 if closing is tags[0] else tags[0].end()
    return text[start : closing.start()].strip()


def opened_thought(generation_prompt: str) -> str:
    """Return the end of a generation prompt that opens a thought, from its tag on.

    The result is empty if the prompt opens none.
    """
    if not is_open_after(generation_prompt):
        return ""
    *_, opening = THOUGHT_TAG.finditer(generation_prompt)
    return generation_prompt[opening.start() :]


def within_opened_thought(text: str) -> str:
    """Write a whole turn as it goes on after a prompt that opened its thought."""
    if end_of_unopened_thought(text):
        return text
    tag = THOUGHT_TAG.search(text)
    if tag is not None and not text[: tag.start()].strip():
        return text[tag.end() :]
    return f"{CLOSE_THOUGHT}\n\n{text}"
