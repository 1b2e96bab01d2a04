"""Separate the thoughts of a model from what it says. Only text outside of thoughts counts.

A thought begins at `<think>` and ends at the next `</think>`, in upper or lower case. Nothing in a
thought is read: no tag, no stop string, no action. Three more rules:

1. A chat template may open the thought at the end of the prompt (Qwen3-Thinking, R1 distils). The
   model's turn then begins inside the thought and has no `<think>` of its own.
2. A `</think>` before the first `<think>` of a turn closes a thought that began before the turn.
   Everything before this `</think>` is thought. A later `</think>` that closes nothing is removed.
3. A thought without an end hides everything after its beginning.

Engines look for stop strings while a text is still being generated. So they cannot follow rule 2,
which needs the whole turn. For rule 1, `SamplingParams.thought_open` in `inference/requests.py`
says whether the prompt leaves a thought open.
"""

import re

OPEN_THOUGHT = "<think>"
CLOSE_THOUGHT = "</think>"
_TAG = r"<(\s?/)?\s?think\s?>"
# re.ASCII: without it, re.IGNORECASE would also match non-ASCII letters such as U+212A, the Kelvin
# sign, in place of "k". The pattern for bytes matches ASCII letters only.
THOUGHT_TAG = re.compile(_TAG, re.IGNORECASE | re.ASCII)
THOUGHT_TAG_BYTES = re.compile(_TAG.encode(), re.IGNORECASE)
LONGEST_TAG_BYTES = len("< / think >")


def outside_thoughts(text: str) -> str:
    """Return the text of a turn without its thoughts and their tags."""
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
    """Return the position behind the `</think>` of a thought that began before the turn.

    The result is 0 if the turn does not close such a thought.
    """
    end = 0
    for tag in THOUGHT_TAG.finditer(text):
        closes = tag[1] is not None
        if not closes:
            break
        end = tag.end()
    return end


def is_open_after(text: str, *, was_open: bool = False) -> bool:
    """Return whether a thought is open at the end of a text.

    `was_open` says whether a thought was open at the beginning of the text.
    """
    tags = list(THOUGHT_TAG.finditer(text))
    return was_open if not tags else tags[-1][1] is None


def first_thought(text: str) -> str:
    """Return the text of the first thought of a turn, or "" if the turn closes no thought."""
    tags = list(THOUGHT_TAG.finditer(text))
    closing = next((tag for tag in tags if tag[1] is not None), None)
    if closing is None:
        return ""
    start = 0 if closing is tags[0] else tags[0].end()
    return text[start : closing.start()].strip()


def opened_thought(generation_prompt: str) -> str:
    """Return the end of a generation prompt, from the `<think>` that opens a thought.

    The result is empty if the prompt leaves no thought open.
    """
    if not is_open_after(generation_prompt):
        return ""
    *_, opening = THOUGHT_TAG.finditer(generation_prompt)
    return generation_prompt[opening.start() :]


def within_opened_thought(text: str) -> str:
    """Return a whole turn as a model would write it after a prompt that opened the thought.

    A `<think>` at the beginning is removed, because the prompt has it already. A turn without a
    thought begins with `</think>`, which closes an empty thought.
    """
    if end_of_unopened_thought(text):
        return text
    tag = THOUGHT_TAG.search(text)
    if tag is not None and not text[: tag.start()].strip():
        return text[tag.end() :]
    return f"{CLOSE_THOUGHT}\n\n{text}"
