"""Find the entities that a question names, so that a search of a graph can start from them.

A name is a label or an alias of an entity. Every run of words in the question that could be a name
is looked up, and the longest names win. A name in the question may be written in another case than
in the graph, and several entities may have the same name.

Some graphs call common words by their name, such as "film" or "father". So words in lower case
count only if the question names nothing else.
"""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from mujica_jax.records import Entity
from mujica_jax.retrieval.graph.knowledge_graph import GraphStore, KnowledgeGraph
from mujica_jax.retrieval.graph.triples import TripleGraph, normalise_label, without_parenthesis
from mujica_jax.tasks.ranking import stop_words

# The largest number of words in a name that is looked up.
MAX_NAME_WORDS = 14
# Punctuation that may belong to the end of a name, as in "Taxi!", up to this number of characters.
MAX_END_CHARACTERS = 3
# The largest number of entities with the same name that become candidates.
MAX_NAMESAKES = 3
# Number of labels that an error message about an unknown name suggests.
NEAREST_LABELS = 3
# The smallest similarity of a suggested label, from 0 to 1 (`difflib`).
MIN_SIMILARITY = 0.6
# A graph with more labels than this is only searched for labels that share a word with the question.
MAX_COMPARED_LABELS = 50_000

# Scripts that are written without spaces: Thai, Lao, Burmese, Khmer, Japanese and Chinese. Each of
# their characters counts as a word.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
_words = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mention:
    """A part of a question that is the name of one or several entities."""

    # The name as the question writes it.
    text: str
    # Its first character, and the first character after it, counted from 0.
    start: int
    end: int
    # The entities with this name, the likeliest first.
    entities: tuple[Entity, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a question that could be a name, before it is looked up."""

    text: str
    start: int
    end: int
    # Number of words.
    words: int
    # Whether it looks like a name, and not like common words.
    is_proper: bool


class Names(Protocol):
    """The interface of everything that knows the names of a graph's entities."""

    async def find_all(self, names: Collection[str]) -> Mapping[str, Sequence[Entity]]:
        """Return the entities with each of these names, the likeliest first.

        Names without an entity are left out. Raises RetrievalError.
        """
        ...

    async def labels_near(self, text: str) -> Collection[str]:
        """Return labels among which a misspelt name in the text is searched.

        Raises RetrievalError.
        """
        ...


class NameTable:
    """The names of a graph in memory. It implements `Names`.

    Two names match if they differ only in case and spacing. A name also matches labels that
    continue with a parenthesis, as in "Norman Foster (director)". Exact names come first.
    """

    def __init__(self) -> None:
        # Entities by normalised name. The inner dictionaries serve as ordered sets.
        self._entities: dict[str, dict[str, Entity]] = {}
        self._entities_of_bare_name: dict[str, dict[str, Entity]] = {}
        self._labels: dict[str, None] = {}

    def add(self, name: str, entity: Entity) -> None:
        """Add a label or an alias of an entity."""
        normal_name = normalise_label(name)
        self._entities.setdefault(normal_name, {}).setdefault(entity.id, entity)
        self._labels[entity.label] = None
        bare_name = without_parenthesis(normal_name)
        if bare_name and bare_name != normal_name:
            self._entities_of_bare_name.setdefault(bare_name, {}).setdefault(entity.id, entity)

    async def find_all(self, names: Collection[str]) -> dict[str, list[Entity]]:
        """Return the entities with each of these names, in the order in which they were added."""
        entities: dict[str, list[Entity]] = {}
        for name in names:
            normal_name = normalise_label(name)
            same_name = self._entities.get(normal_name, {}) | self._entities_of_bare_name.get(
                normal_name, {}
            )
            if same_name:
                entities[name] = list(same_name.values())
        return entities

    async def labels_near(self, text: str) -> Collection[str]:
        """Return all labels."""
        return self._labels


class GraphNames:
    """The names of a knowledge graph on disk or behind an endpoint. It implements `Names`."""

    def __init__(self, graph: KnowledgeGraph) -> None:
        self._graph = graph

    async def find_all(self, names: Collection[str]) -> dict[str, list[Entity]]:
        """Return the entities with each of these names, the likeliest first.

        Labels are compared as they are written, and with capital letters. Tables are also searched
        without case.
        """
        spellings = {name: (name, name[:1].upper() + name[1:], name.title()) for name in names}
        all_spellings = {spelling for group in spellings.values() for spelling in group}
        keys = await self._graph.find_all(sorted(all_spellings))

        entities: dict[str, list[Entity]] = {}
        for name, group in spellings.items():
            # The spelling of the question comes first.
            keys_of_name = next((keys[spelling] for spelling in group if spelling in keys), [])
            same_name = [await self._entity(key) for key in keys_of_name[:MAX_NAMESAKES]]
            # Entities without a label in the graph's languages cannot be shown to a model.
            labelled = [entity for entity in same_name if entity is not None]
            if labelled:
                entities[name] = labelled
        return entities

    async def labels_near(self, text: str) -> Collection[str]:
        """Return the labels that have a word in common with a name in the text.

        The result is empty for an endpoint, which cannot search its labels in reasonable time.
        """
        if not isinstance(self._graph, GraphStore):
            return []
        labels: dict[str, None] = {}
        for phrase in _phrases(text):
            for word in phrase.split():
                labels |= dict.fromkeys(await self._graph.labels_with(word))
        return labels

    async def _entity(self, key: str) -> Entity | None:
        """Return the entity with this key and its label, or None if it has no label."""
        label = await self._graph.label_of(key)
        return None if label is None else Entity(id=key, label=label)


def names_of(graph: TripleGraph | KnowledgeGraph) -> Names:
    """Return the names of a graph's entities."""
    if isinstance(graph, KnowledgeGraph):
        return GraphNames(graph)
    table = NameTable()
    for entity in graph.entities():
        table.add(entity.label, entity)
        # A question may also name an entity by its Q-id.
        table.add(entity.id, entity)
    return table


async def find_mentions(text: str, names: Names, language: str = "en") -> list[Mention]:
    """Return the names in a question, in the order of the question.

    Proper names are looked up first. Only if there are none, names of several words in lower case
    are, and then single words. `language` is the language of the question. Raises RetrievalError.
    """
    spans = possible_names(text, language)
    groups = (
        [span for span in spans if span.is_proper],
        [span for span in spans if not span.is_proper and span.words > 1],
        [span for span in spans if not span.is_proper and span.words == 1],
    )
    for group in groups:
        if not group:
            continue
        entities = await names.find_all({span.text for span in group})
        mentions = [
            Mention(
                text=span.text,
                start=span.start,
                end=span.end,
                entities=tuple(entities[span.text]),
            )
            for span in group
            if span.text in entities
        ]
        if mentions:
            return longest(mentions)
    return []


def longest(mentions: Iterable[Mention]) -> list[Mention]:
    """Return the mentions that overlap with no longer one, in the order of the question.

    Of two overlapping mentions with the same length, the first one is returned.
    """
    chosen: list[Mention] = []
    for mention in sorted(
        mentions, key=lambda mention: (mention.start - mention.end, mention.start)
    ):
        overlaps = any(mention.start < other.end and other.start < mention.end for other in chosen)
        if not overlaps:
            chosen.append(mention)
    return sorted(chosen, key=lambda mention: mention.start)


def possible_names(text: str, language: str = "en") -> list[Span]:
    """Return every part of a question that could be a name.

    Parts that consist of function words only, such as "who is the", are left out.
    """
    function_words = stop_words(language) | stop_words("en")
    words = list(_words.finditer(text))
    spans: list[Span] = []
    for first, first_word in enumerate(words):
        for last in range(first, min(len(words), first + MAX_NAME_WORDS)):
            words_of_span = [word.group() for word in words[first : last + 1]]
            if _is_function_text(words_of_span, function_words):
                continue
            is_first_word = first == last == 0
            for end in _ends(text, words[last].end()):
                span_text = text[first_word.start() : end]
                spans.append(
                    Span(
                        text=span_text,
                        start=first_word.start(),
                        end=end,
                        words=last + 1 - first,
                        is_proper=_looks_proper(span_text) and not is_first_word,
                    )
                )
    return spans


def nearest_labels(
    text: str,
    labels: Iterable[str],
    *,
    limit: int = NEAREST_LABELS,
    min_similarity: float = MIN_SIMILARITY,
) -> list[str]:
    """Return at most `limit` labels that are similar to a name in the text, the nearest first.

    Similarity is from 0 to 1 (`difflib`). Labels below `min_similarity` are left out.
    """
    # Labels that differ only in case are one.
    label_of_name: dict[str, str] = {}
    for label in labels:
        label_of_name.setdefault(normalise_label(label), label)
    phrases = [normalise_label(phrase) for phrase in _phrases(text)]

    compared = list(label_of_name)
    if len(compared) > MAX_COMPARED_LABELS:
        words = {word for phrase in phrases for word in phrase.split()}
        compared = [name for name in compared if words & set(name.split())]

    similarities: dict[str, float] = {}
    for phrase in phrases:
        matches = difflib.get_close_matches(phrase, compared, n=limit, cutoff=min_similarity)
        for name in matches:
            similarity = difflib.SequenceMatcher(None, name, phrase).ratio()
            similarities[name] = max(similarity, similarities.get(name, 0.0))
    nearest = sorted(similarities, key=lambda name: -similarities[name])
    return [label_of_name[name] for name in nearest[:limit]]


def _phrases(text: str) -> list[str]:
    """Return the parts of a question that are probably names.

    They are the longest runs of words with a capital letter. Without one, they are the runs of
    words that are no function words.
    """
    function_words = stop_words("en")
    capitalised: list[list[str]] = [[]]
    meaningful: list[list[str]] = [[]]
    for number, match in enumerate(_words.finditer(text)):
        word = match.group()
        is_function_word = word.casefold() in function_words
        # The first word of a question has a capital letter whatever it is.
        starts_question = number == 0 and is_function_word
        _extend(capitalised, word, _looks_proper(word) and not starts_question)
        _extend(meaningful, word, not is_function_word)
    runs = capitalised if any(capitalised) else meaningful
    return [" ".join(run) for run in runs if run]


def _extend(runs: list[list[str]], word: str, belongs: bool) -> None:
    """Add a word to the last run, or begin a new run if the word does not belong to one."""
    if belongs:
        runs[-1].append(word)
    elif runs[-1]:
        runs.append([])


def _ends(text: str, end: int) -> list[int]:
    """Return where a name that ends with a word may end: after the word or its punctuation."""
    ends = [end]
    while len(ends) <= MAX_END_CHARACTERS and end < len(text):
        character = text[end]
        if character.isspace() or _words.match(character):
            break
        end += 1
        ends.append(end)
    return ends


def _is_function_text(words: Sequence[str], function_words: Collection[str]) -> bool:
    """Return whether words say nothing about the topic of a question.

    The name of a band may consist of such words, as "The Who" does, but of several and with capital
    letters.
    """
    if not all(word.casefold() in function_words for word in words):
        return False
    return len(words) == 1 or not all(_looks_proper(word) for word in words)


def _looks_proper(text: str) -> bool:
    """Return whether a text has a capital letter, or is of a script without capital letters.

    Numbers and single characters are too common in questions.
    """
    letters = [character for character in text if character.isalpha()]
    if len(text) < 2 or not letters:
        return False
    return any(not letter.islower() for letter in letters)
