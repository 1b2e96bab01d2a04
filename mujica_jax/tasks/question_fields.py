"""Read the fields of question records: ids, answers, paragraphs, supporting facts.

A value is accepted if it has only one possible meaning. A number is read as its text, and `true`
and `false` as the answers "yes" and "no". HTML entities are replaced by their characters (HotpotQA
often writes `&amp;`). Every other value raises TypeError or ValueError. Callers turn these errors
into one sentence with file and line.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.records import GoldPassage
from mujica_jax.retrieval.text.corpus_records import check_text, in_one_form, open_text

# Above this number a float does not represent every whole number.
MAX_WHOLE_NUMBER = 2**53
# Number of characters that are read from a file at once.
READ_CHARACTERS = 2**16

# The title of a gold passage, and the number of a sentence in it if the record names one.
Fact = tuple[str, int | None]
# A passage, and the number of its sentences.
Paragraph = tuple[GoldPassage, int]


def read_id(value: object) -> str:
    """Return an id as a text. The value is a text that is not blank, or a finite number.

    Raises TypeError or ValueError for other values.
    """
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    raise TypeError(f"the id is {value!r} and must be a string or a number")


def read_question(value: object) -> str:
    """Return the text of a question. Raises TypeError if the value is not a text."""
    if not isinstance(value, str):
        raise TypeError(f"the question is {value!r} and must be a string")
    return in_one_form(value).strip()


def read_label(value: object) -> str:
    """Return the kind of a question, or another short field. A missing field is read as ""."""
    if value is None:
        return ""
    return in_one_form(value) if isinstance(value, str) else _number(value)


def read_answers(values: object) -> tuple[str, ...]:
    """Return the distinct answers of a list, the gold answer first.

    An answer with HTML entities is returned in both forms, so that no score is lower than with the
    official script. Blank answers are left out. Raises TypeError if the value is not a list, and
    ValueError if no answer is left.
    """
    if not isinstance(values, list | tuple):
        raise TypeError(f"answer is {_kind(values)} and must be a list")
    written_answers = [_answer(value) for value in values]
    plain_answers = [in_one_form(answer) for answer in written_answers]
    answers = [answer for answer in (*plain_answers, *written_answers) if answer.strip()]
    if not answers:
        raise ValueError("there is no answer")
    return tuple(dict.fromkeys(answers))


def read_aliases(values: object) -> list[object]:
    """Return the aliases of an answer. Missing aliases are read as an empty list.

    Raises TypeError for other values than lists. A single text is also refused, because each of its
    letters would be an alias.
    """
    if values is None:
        return []
    if not isinstance(values, list | tuple):
        raise TypeError(f"the aliases are {_kind(values)} and must be a list")
    return [*values]


def is_missing(answer: object) -> bool:
    """Return whether a record has no answer, as in official test files. 0 and false are answers."""
    return answer is None or (isinstance(answer, str) and not answer.strip())


def read_context(value: object) -> list[Paragraph]:
    """Return the paragraphs that are given with a question, without repetitions.

    The value is `[[title, sentences], ...]`, or `{"title": [...], "sentences": [...]}` as in
    Hugging Face's copies. Raises TypeError for other values.
    """
    if isinstance(value, Mapping):
        sentence_lists = value.get("sentences", value.get("content"))
        value = list(zip(value["title"], sentence_lists, strict=True))
    if not isinstance(value, list):
        raise TypeError(f"context is {_kind(value)} and must be a list")
    paragraphs: dict[tuple[str, str], Paragraph] = {}
    for title, sentences in value:
        passage = GoldPassage(title=read_title(title), text=read_passage_text(sentences))
        sentence_count = 1 if isinstance(sentences, str) else len(sentences)
        paragraphs.setdefault(passage_key(passage), (passage, sentence_count))
    return list(paragraphs.values())


def read_facts(value: object) -> list[Fact]:
    """Return the supporting facts of a question.

    The value is a list of titles or of `[title, sentence number]`, or `{"title": [...], "sent_id":
    [...]}` as in Hugging Face's copies. Raises TypeError for other values.
    """
    if isinstance(value, Mapping):
        value = [list(fact) for fact in zip(value["title"], value["sent_id"], strict=True)]
    if not isinstance(value, list | tuple):
        raise TypeError(f"supporting_facts is {_kind(value)} and must be a list")
    facts: list[Fact] = []
    for fact in value:
        if isinstance(fact, list):
            has_sentence = len(fact) > 1 and isinstance(fact[1], int)
            facts.append((read_title(fact[0]), fact[1] if has_sentence else None))
        elif isinstance(fact, str):
            facts.append((read_title(fact), None))
        else:
            raise TypeError(
                f"a supporting fact is {_kind(fact)} and must be a title, or a list of a title and "
                "a sentence number"
            )
    return facts


def read_title(value: object) -> str:
    """Return a title. A missing title is read as ""."""
    if value is None:
        return ""
    if isinstance(value, str):
        return in_one_form(value)
    return _number(value)


def read_passage_text(value: object) -> str:
    """Return the text of a paragraph. The value is one text or a list of sentences.

    Raises TypeError for other values.
    """
    if isinstance(value, str):
        return in_one_form(value).strip()
    if isinstance(value, list) and all(isinstance(sentence, str) for sentence in value):
        return in_one_form(" ".join(sentence.strip() for sentence in value))
    raise TypeError(f"a paragraph is {_kind(value)} and must be a string or a list of sentences")


def gold_passages(facts: Sequence[Fact], context: Sequence[Paragraph]) -> tuple[GoldPassage, ...]:
    """Return the paragraphs that the supporting facts name.

    If several paragraphs have the same title, those with enough sentences for all named sentence
    numbers are gold. A title that no paragraph has is returned without a text.
    """
    # The largest sentence number that the facts name, by title.
    last_sentences: dict[str, int] = {}
    for title, sentence in facts:
        last_sentences[title] = max(last_sentences.get(title, 0), sentence or 0)

    gold: list[GoldPassage] = []
    for title, last_sentence in last_sentences.items():
        same_title: list[GoldPassage] = []
        long_enough: list[GoldPassage] = []
        for passage, sentence_count in context:
            if title_key(passage.title) == title_key(title):
                same_title.append(passage)
                if sentence_count > last_sentence:
                    long_enough.append(passage)
        gold += long_enough or same_title or [GoldPassage(title=title)]
    return tuple(dict.fromkeys(gold))


def with_texts(
    gold: Iterable[GoldPassage], context: Sequence[GoldPassage]
) -> tuple[GoldPassage, ...]:
    """Merge the gold passages of one question from several records.

    A gold passage without a text is replaced by the other gold passages with its title. If there
    are none, it is replaced by the passages of the context with its title.
    """
    distinct_gold = list(dict.fromkeys(gold))

    # Find the passages that can replace a title without a text.
    passages_by_title: dict[str, list[GoldPassage]] = {}
    for passage in distinct_gold:
        if passage.text:
            passages_by_title.setdefault(title_key(passage.title), []).append(passage)
    titles_of_gold = set(passages_by_title)
    for passage in context:
        key = title_key(passage.title)
        if key not in titles_of_gold:
            passages_by_title.setdefault(key, []).append(passage)

    # Replace the titles without a text.
    complete_gold: list[GoldPassage] = []
    for passage in distinct_gold:
        if passage.text:
            complete_gold.append(passage)
        else:
            complete_gold += passages_by_title.get(title_key(passage.title), [passage])
    distinct_passages: dict[tuple[str, str], GoldPassage] = {}
    for passage in complete_gold:
        distinct_passages.setdefault(passage_key(passage), passage)
    return tuple(distinct_passages.values())


def title_key(title: str) -> str:
    """Return a title in one form of spaces, accents and HTML entities, to compare titles."""
    return " ".join(in_one_form(title).split())


def passage_key(passage: GoldPassage) -> tuple[str, str]:
    """Return a key that identifies a passage: its title, and its text without spaces.

    Spaces are left out because splitting a text into sentences changes them.
    """
    return title_key(passage.title), "".join(in_one_form(passage.text).split())


def check_characters(record: object, place: str) -> None:
    """Check that no text of a record contains half of a surrogate pair.

    Such a text cannot be encoded. `place` names the record in messages. Raises UserError.
    """
    record_text = json.dumps(record, ensure_ascii=False)
    try:
        check_text(record_text)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def check_not_blank(file: Path, *, holds: str = "question") -> None:
    """Check that a file is not blank. A blank file is most likely a failed download.

    `holds` names what the file should contain. Raises UserError.
    """
    with open_text(file) as text:
        while chunk := text.read(READ_CHARACTERS):
            if chunk.strip().strip("\ufeff"):
                return
    raise UserError(f"{file} is blank and contains no {holds}: download it again, or remove it")


def _answer(value: object) -> str:
    """Return an answer as a text. true and false are "yes" and "no"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else _number(value)


def _number(value: Any) -> str:
    """Return a number as a text, a whole number without a decimal point.

    Raises TypeError for other values, and ValueError for a number that is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} must be a string or a number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not finite and must be a finite number")
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE_NUMBER:
        return str(int(value))
    return str(value)


def _kind(value: object) -> str:
    """Return the type of a value in words, for messages."""
    names = {
        str: "a string",
        dict: "an object",
        list: "a list",
        type(None): "missing",
        bool: "true or false",
    }
    return names.get(type(value), f"a {type(value).__name__}")
