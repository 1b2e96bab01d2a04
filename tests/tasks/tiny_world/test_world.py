import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime

import hypothesis
import hypothesis.strategies as st
import pytest

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import score
from mujica_jax.records import Entity, Question
from mujica_jax.tasks.task import FromScratchTask, Task
from mujica_jax.tasks.tiny_world.facts import WorldPart
from mujica_jax.tasks.tiny_world.names import LEARNING_SHARES, SHARES, Part
from mujica_jax.tasks.tiny_world.questions import KIND_SHARES, TEMPLATES
from mujica_jax.tasks.tiny_world.world import TinyWorld, build
from mujica_jax.tasks.two_wiki.chains import follows_from_evidence

CONFIG = TinyWorldConfig(
    train_questions=300,
    demonstrations=200,
    dev_questions=100,
    test_questions=150,
    facts_per_entity=8,
    distractor_names=0.3,
)
EARLIER_WORDS = {"first", "earlier", "older"}
LATER_WORDS = {"later", "younger", "last", "recently"}


@pytest.fixture(scope="module")
def world() -> TinyWorld:
    return build(CONFIG)


def all_questions(world: TinyWorld) -> list[Question]:
    held_out = [*world.questions("dev"), *world.questions("test")]
    return [
        *world.questions("train"),
        *(question for question, _ in world.demonstrations()),
        *held_out,
    ]


def labels(world: TinyWorld, part: Part) -> list[str]:
    counts = {"train": world.config.train_questions, "demonstration": world.config.demonstrations}
    counts |= {"dev": world.config.dev_questions, "test": world.config.test_questions}
    return WorldPart(part, world.config, counts[part]).labels


def answer_by_reading(question: Question) -> str:
    """Return the answer from the words of the question and the evidences alone.

    The world's templates are not used.
    """
    objects = [evidence.object for evidence in question.evidences]
    if len(question.candidates) == 1:
        return objects[-1]
    asked = question.text
    for candidate in question.candidates:
        asked = asked.replace(candidate.label, "")
    words = set(re.findall(r"[a-z]+", asked.lower()))
    if not words & (EARLIER_WORDS | LATER_WORDS):
        return "yes" if objects[-1] == objects[-2] else "no"
    assert bool(words & EARLIER_WORDS) != bool(words & LATER_WORDS), question.text
    dates = [datetime.strptime(text, "%d %B %Y") for text in objects[-2:]]
    first_is_earlier = dates[0] < dates[1]
    return question.candidates[0 if first_is_earlier == bool(words & EARLIER_WORDS) else 1].label


def pieces(world: TinyWorld) -> Iterator[object]:
    """Yield the parts of a world that can be seen, those that are made soonest first."""
    for split in ("test", "dev", "train"):
        questions = world.questions(split)
        yield len(questions)
        for question in questions:
            yield (
                question,
                [world.graph.materials(candidate.id) for candidate in question.candidates],
            )
    yield [question for question, _ in world.demonstrations()]


def fingerprint(world: TinyWorld) -> tuple:
    questions = all_questions(world)
    keys = {evidence.subject_id for question in questions[:150] for evidence in question.evidences}
    return questions, [world.graph.materials(key) for key in sorted(keys)]


def test_it_is_a_task_over_a_graph(world):
    # A type checker compares it with the protocol.
    task: Task = world
    assert task.name == "tiny_world"
    assert task.rule == "two_wiki"
    assert task.environment_kind == "graph"
    assert isinstance(task, FromScratchTask)
    environment = task.environment(task.questions("dev")[0])
    assert environment.kind == task.environment_kind
    assert all(shown_in is environment for _, shown_in in task.demonstrations())


def test_same_configuration_gives_the_same_world(world):
    assert fingerprint(world) == fingerprint(build(CONFIG))


@pytest.mark.parametrize(
    "change",
    [
        {"train_questions": 301},
        {"demonstrations": 201},
        {"dev_questions": 101},
        {"test_questions": 151},
        {"facts_per_entity": 7},
        {"distractor_names": 0.6},
        {"missing_facts": 0.2},
        {"common_knowledge": 0.5},
        {"augmented_copies": 1},
        {"paraphrases": 1},
        {"seed": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_changes_something(world, change):
    pairs = zip(pieces(build(dataclasses.replace(CONFIG, **change))), pieces(world), strict=False)
    assert any(changed != other for changed, other in pairs)


def test_every_field_is_perturbed_above():
    changed = {
        next(iter(case)) for case in test_every_field_changes_something.pytestmark[0].args[1]
    }
    # These are tested in demonstrations/test_mujica_text.py and tasks/test_passages.py.
    of_passages = {"environment", "top_k", "reranker", "rerank_candidates"}
    assert changed | {"kind"} | of_passages == {
        field.name for field in dataclasses.fields(TinyWorldConfig)
    }


def test_training_size_leaves_the_held_out_questions_alone(world):
    larger = build(dataclasses.replace(CONFIG, train_questions=3000, demonstrations=900))
    for split in ("dev", "test"):
        assert list(larger.questions(split)) == list(world.questions(split))


@pytest.mark.parametrize("common_knowledge", [0.0, 0.5])
def test_fewer_questions_are_a_beginning_of_more(common_knowledge):
    shorter, longer = (
        build(
            dataclasses.replace(CONFIG, common_knowledge=common_knowledge, test_questions=count)
        ).questions("test")
        for count in (150, 400)
    )
    assert longer[:150] == list(shorter)


def test_names_are_unique_and_no_part_shares_one(world):
    titles = [label for part in SHARES for label in labels(world, part)]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("distractor_names", [0.0, 1.0])
def test_every_word_of_a_name_occurs_in_training(distractor_names):
    world = build(dataclasses.replace(CONFIG, train_questions=1, distractor_names=distractor_names))
    train_words = {word for label in labels(world, "train") for word in label.split()}
    for part in ("demonstration", "dev", "test"):
        assert {word for label in labels(world, part) for word in label.split()} <= train_words


def test_parts_share_all_pairs_of_words():
    assert sorted(percent for owned in SHARES.values() for percent in owned) == list(range(100))
    assert set(LEARNING_SHARES) == set(SHARES["train"]) | set(SHARES["demonstration"])
    assert all(SHARES.values())


def test_copies_ask_the_same_of_other_names(world):
    copied = build(dataclasses.replace(CONFIG, augmented_copies=2))
    demonstrations = [question for question, _ in copied.demonstrations()]
    originals, first, second = (
        demonstrations[at : at + len(demonstrations) // 3]
        for at in range(0, len(demonstrations), len(demonstrations) // 3)
    )
    assert originals == [question for question, _ in world.demonstrations()]
    held_out = {*labels(world, "dev"), *labels(world, "test")}
    shared = 0
    for question, *others in zip(originals, first, second, strict=True):
        names = {candidate.label for candidate in question.candidates}
        for other in others:
            assert [e.relation for e in other.evidences] == [e.relation for e in question.evidences]
            assert other.kind == question.kind
            shared += not names.isdisjoint(candidate.label for candidate in other.candidates)
            assert held_out.isdisjoint(e.subject for e in other.evidences)
            assert all(copied.graph.materials(candidate.id) for candidate in other.candidates)
            if question.answers[0] in ("yes", "no"):
                assert other.answers == question.answers
    # both draw from all pairs of learning, so now and then the same one
    assert shared < 0.02 * len(originals)


def test_question_ids_are_unique_and_stable(world):
    ids = [question.id for question in all_questions(world)]
    assert len(ids) == len(set(ids))
    assert world.questions("train")[123].id == "tiny-train-000123"
    assert world.questions("test")[-1].id == "tiny-test-000149"


def test_no_question_is_asked_twice(world):
    texts = [question.text for question in all_questions(world)]
    assert len(texts) == len(set(texts))


def test_every_answer_follows_from_text_and_evidences(world):
    for question in all_questions(world):
        assert score(answer_by_reading(question), question.answers, world.rule).em == 1.0, question


def test_rules_for_the_real_questions_read_these_too():
    world = build(dataclasses.replace(CONFIG, train_questions=3000, paraphrases=4))
    assert [q.text for q in world.questions("train") if not follows_from_evidence(q)] == []


def test_text_names_all_candidates_in_their_order(world):
    for question in all_questions(world):
        places = [question.text.index(candidate.label) for candidate in question.candidates]
        assert places == sorted(places)
        assert question.answers[0] in question.text or question.answers[0] not in {
            c.label for c in question.candidates
        }


def test_every_evidence_is_found_by_searching_its_subject(world):
    for question in all_questions(world):
        for evidence in question.evidences:
            materials = world.graph.materials(evidence.subject_id)
            assert f"{evidence.subject}, {evidence.relation}, {evidence.object}" in {
                material.text for material in materials
            }


def test_the_next_hop_is_among_the_entities_of_the_triple(world):
    for question in world.questions("test"):
        for evidence in question.evidences:
            text = f"{evidence.subject}, {evidence.relation}, {evidence.object}"
            triple = next(m for m in world.graph.materials(evidence.subject_id) if m.text == text)
            expected = [Entity(id=evidence.subject_id, label=evidence.subject)]
            if evidence.object_id:
                expected.append(Entity(id=evidence.object_id, label=evidence.object))
            assert list(triple.entities) == expected


def test_search_returns_two_to_facts_per_entity_triples_gold_not_always_first(world):
    first_places = []
    sizes = set()
    for question in world.questions("train"):
        for evidence in question.evidences:
            materials = asyncio.run(
                world.graph.search(
                    "anything", Entity(id=evidence.subject_id, label=evidence.subject)
                )
            )
            sizes.add(len(materials))
            first_places.append(
                materials[0].text == f"{evidence.subject}, {evidence.relation}, {evidence.object}"
            )
    assert sizes == set(range(2, CONFIG.facts_per_entity + 1))
    # This is about one in the number of materials.
    assert 0.1 < sum(first_places) / len(first_places) < 0.4


def test_search_shows_triples_in_both_directions(world):
    question = next(q for q in world.questions("test") if q.evidences[0].relation == "director")
    director = question.evidences[0].object
    texts = [material.text for material in world.graph.materials(question.evidences[0].object_id)]
    assert any(text.startswith(f"{director}, ") for text in texts)
    reverse_triples = [
        material.text
        for q in world.questions("test")
        for evidence in q.evidences
        for material in world.graph.materials(evidence.object_id)
        if material.text.endswith(f", {evidence.object}")
    ]
    assert reverse_triples


def test_nobody_has_an_unknown_key(world):
    for key in ("", "Q", "Q1", "Q9999999", "Q1999999", "Barbara Bell"):
        assert world.graph.materials(key) == ()


def test_searching_without_an_entity_is_refused(world):
    with pytest.raises(ValueError, match="is searched by entity"):
        asyncio.run(world.graph.search("Who?", None))


def test_missing_facts_are_gone_from_both_ends_and_the_questions_stay(world):
    poorer = build(dataclasses.replace(CONFIG, missing_facts=0.3))
    pairs = zip(poorer.questions("test"), world.questions("test"), strict=True)
    for own, other in pairs:
        assert dataclasses.replace(own, gold_passages=other.gold_passages) == other, (
            "but for their passages, which say what the graph says"
        )
    lost_facts = 0
    kept_facts = 0
    for question in world.questions("test"):
        for evidence in question.evidences:
            text = f"{evidence.subject}, {evidence.relation}, {evidence.object}"
            ends = [evidence.subject_id, evidence.object_id]
            is_found = text in {
                material.text for end in ends for material in poorer.graph.materials(end)
            }
            found_from_subject = text in {
                material.text for material in poorer.graph.materials(evidence.subject_id)
            }
            assert is_found == found_from_subject
            lost_facts += not is_found
            kept_facts += is_found
    assert 0.2 < lost_facts / (lost_facts + kept_facts) < 0.4


def test_without_any_fact_every_search_is_empty():
    world = build(dataclasses.replace(CONFIG, missing_facts=1.0))
    assert all(
        world.graph.materials(c.id) == () for q in world.questions("test") for c in q.candidates
    )


def test_kinds_come_in_the_shares_of_2wiki():
    questions = build(dataclasses.replace(CONFIG, train_questions=4000)).questions("train")
    counts = Counter(question.kind for question in questions)
    for kind, share in KIND_SHARES.items():
        assert counts[kind] / len(questions) == pytest.approx(share, abs=0.03)
    closed = Counter(q.answers[0] for q in questions if q.answers[0] in ("yes", "no"))
    assert closed["yes"] / closed.total() == pytest.approx(0.5, abs=0.08)
    named = [q for q in questions if len(q.candidates) == 2 and q.answers[0] not in ("yes", "no")]
    assert sum(q.answers[0] == q.candidates[0].label for q in named) / len(named) == pytest.approx(
        0.5, abs=0.06
    )


def test_paraphrases_count_the_wordings_of_a_template():
    template_of = {
        wording.format(a="x", b="x"): template.id
        for template in TEMPLATES
        for wording in template.wordings
    }
    for paraphrases in (1, 3):
        world = build(dataclasses.replace(CONFIG, train_questions=3000, paraphrases=paraphrases))
        wordings: dict[str, set[str]] = {}
        for question in world.questions("train"):
            text = question.text
            # "Ashford" is a part of "New Ashford"
            for candidate in sorted(question.candidates, key=lambda c: -len(c.label)):
                text = text.replace(candidate.label, "x")
            wordings.setdefault(template_of[text], set()).add(text)
        assert max(map(len, wordings.values())) == paraphrases


def test_wordings_are_all_different():
    wordings = [wording for template in TEMPLATES for wording in template.wordings]
    assert len(wordings) == len(set(wordings))


def words_of(entity: Entity) -> set[str]:
    """Return the words of a label that could tell it from another one."""
    return set(entity.label.split()) - {"The", "Her", "Our"}


def test_distractor_names_make_pairs_share_words():
    shares = []
    for distractor_names in (0.0, 1.0):
        questions = build(dataclasses.replace(CONFIG, distractor_names=distractor_names)).questions(
            "train"
        )
        pairs = [question.candidates for question in questions if len(question.candidates) == 2]
        sharing = sum(bool(words_of(first) & words_of(second)) for first, second in pairs)
        shares.append(sharing / len(pairs))
    assert shares[0] < 0.1
    assert shares[1] > 0.6


def test_lives_are_possible(world):
    part = WorldPart("train", dataclasses.replace(CONFIG, facts_per_entity=13), questions=300)
    year: dict[tuple[object, str], int] = {
        (number, relation): int(str(facts[relation]).split()[-1])
        for number, facts in enumerate(part.facts)
        for relation in ("date of birth", "date of death", "publication date")
        if relation in facts
    }
    compared = Counter()
    for number, facts in enumerate(part.facts):
        born = year.get((number, "date of birth"))
        died = year.get((number, "date of death"))
        if born and died:
            compared["life"] += 1
            assert born < died
        for parent in ("father", "mother"):
            parent_born = year.get((facts.get(parent), "date of birth"))
            if born and parent_born:
                compared["parent"] += 1
                assert 18 <= born - parent_born <= 50
        father_died = year.get((facts.get("father"), "date of death"))
        if born and father_died:
            assert born <= father_died
        released = year.get((number, "publication date"))
        director_born, director_died = (
            year.get((facts.get("director"), f"date of {event}")) for event in ("birth", "death")
        )
        if released and director_born:
            compared["film"] += 1
            assert director_born + 20 <= released
        if released and director_died:
            assert released < director_died
    assert min(compared.values()) > 100
    assert len(compared) == 3


def test_tokenizer_text_is_bounded_and_free_of_test_names(world):
    lines = list(
        build(
            dataclasses.replace(CONFIG, train_questions=5000, demonstrations=2000)
        ).tokenizer_text()
    )
    assert 2000 < len(lines) < 10_000
    text = "\n".join(lines)
    people_and_films = [
        c
        for q in world.questions("test")
        for c in q.candidates
        if q.evidences[0].relation != "country"
    ]
    assert not any(candidate.label in text for candidate in people_and_films)
    assert all(word in text for word in ("Song", "Simon", "Shaw", "date of birth", "Who is older"))


def test_gold_passages_say_what_the_evidences_say(world):
    for question in world.questions("test"):
        passages = {passage.title: passage.text for passage in question.gold_passages}
        assert passages.keys() == {evidence.subject for evidence in question.evidences}
        for evidence in question.evidences:
            assert (
                f"The {evidence.relation} of {evidence.subject} is {evidence.object}."
                in passages[evidence.subject]
            )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train_questions": 0}, "train_questions"),
        ({"dev_questions": 0}, "dev_questions"),
        ({"facts_per_entity": 3}, "facts_per_entity"),
        ({"distractor_names": 1.5}, "distractor_names"),
        ({"missing_facts": -0.1}, "missing_facts"),
        ({"paraphrases": 5}, "paraphrases"),
    ],
)
def test_values_out_of_bounds_are_refused(change, named):
    with pytest.raises(
        UserError,
        match=rf"task\.{named} is {next(iter(change.values()))} and must be from .* to ",
    ):
        build(dataclasses.replace(CONFIG, **change))


def test_a_world_without_enough_questions_says_so():
    with pytest.raises(UserError, match=r"has too few inference questions: only .* of 60000"):
        build(dataclasses.replace(CONFIG, test_questions=60_000, facts_per_entity=4)).questions(
            "test"
        )


@hypothesis.settings(max_examples=3, deadline=None)
@hypothesis.given(
    facts_per_entity=st.integers(4, 13),
    distractor_names=st.floats(0, 1),
    paraphrases=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_any_world_is_answerable_and_disjoint(
    facts_per_entity, distractor_names, paraphrases, seed
):
    world = build(
        TinyWorldConfig(
            facts_per_entity=facts_per_entity,
            train_questions=60,
            demonstrations=60,
            dev_questions=60,
            test_questions=60,
            distractor_names=distractor_names,
            paraphrases=paraphrases,
            seed=seed,
        )
    )
    for question in all_questions(world):
        assert answer_by_reading(question) == question.answers[0]
        for evidence in question.evidences:
            materials = world.graph.materials(evidence.subject_id)
            assert 1 <= len(materials) <= facts_per_entity
            assert f"{evidence.subject}, {evidence.relation}, {evidence.object}" in {
                material.text for material in materials
            }
    titles = [label for part in SHARES for label in labels(world, part)]
    assert len(titles) == len(set(titles))


def test_common_knowledge_is_read_in_pretraining_and_asked_about_in_every_split(world):
    common = build(dataclasses.replace(CONFIG, common_knowledge=0.5, augmented_copies=1))
    demonstrations = [question for question, _ in common.demonstrations()]
    originals = demonstrations[: CONFIG.demonstrations]
    copies = demonstrations[CONFIG.demonstrations :]
    # No document states their facts.
    assert copies
    assert not any(question.is_known for question in copies)
    asked = {split: list(common.questions(split)) for split in ("train", "dev", "test")} | {
        "demonstration": originals
    }
    for part, questions in asked.items():
        assert labels(common, part) == labels(world, part), (
            "the same world is asked about otherwise"
        )
        share = sum(question.is_known for question in questions) / len(questions)
        assert 0.35 < share < 0.65, "one in two, as far as a kind has them"
    documents = [
        next(reading) for reading in [common.pretraining_documents(0)] for _ in range(20_000)
    ]
    read = [text for text in documents if ":" not in text]
    stated = [
        fact
        for text in read
        for fact in re.findall(r"The ([a-z ]+) of ([^.]+?) is ([^.]+)\.", text)
    ]
    unknown = [fact[:2] for fact in stated if fact[2] == "unknown"]
    assert 0.4 < len(unknown) / len(stated) < 0.5, (
        "half of the names are recombined, and some of those are known"
    )
    known = {
        (fact.relation, fact.subject, fact.object)
        for questions in asked.values()
        for question in questions
        if question.is_known
        for fact in question.evidences
    }
    assert {fact for fact in stated if fact[2] != "unknown"} == known
    assert not set(unknown) & {fact[:2] for fact in known}
    answers = re.compile(
        r"What is the (?:[a-z ]+ of )?the ([^?]+)\? The \1 is|What is the ([^?]+)\? The \2 is"
    )
    assert sum(bool(answers.search(text)) for text in read) > 0.8 * len(read)
    plain = [next(reading) for reading in [world.pretraining_documents(0)] for _ in range(50)]
    assert [text for text in documents if ":" in text][:50] == plain
    nothing = build(dataclasses.replace(CONFIG, common_knowledge=1e-9))
    with pytest.raises(UserError, match="no question is about common knowledge alone: raise"):
        next(nothing.pretraining_documents(0))
