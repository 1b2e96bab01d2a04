"""A folder of one's own, as docs/guides/own_questions.md shows it, and questions asked over it."""

import asyncio
import dataclasses
import json
import re
from pathlib import Path

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import serve
from mujica_jax.config.files import load_config
from mujica_jax.errors import UserError
from mujica_jax.runs.setup import left_out
from mujica_jax.tasks.two_wiki import task as two_wiki
from tests.helpers.local_endpoint import Answer, Request, serving
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "guides" / "own_questions.md"
CONFIG = "two_wiki_text_smollm2"


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, content in re.findall(
        r"^```\n# DIR/(\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(content)
    return tmp_path


def build(folder: Path, **changes) -> two_wiki.TwoWiki:
    return two_wiki.build(
        dataclasses.replace(load_config(CONFIG).task, data_dir=str(folder), **changes)
    )


def changed(folder: Path, **changes) -> None:
    """Return the second question with these fields; None takes one out."""
    lines = (folder / "questions.jsonl").read_text().splitlines()
    fields = {
        name: value for name, value in (json.loads(lines[1]) | changes).items() if value is not None
    }
    (folder / "questions.jsonl").write_text("\n".join([lines[0], json.dumps(fields), *lines[2:]]))


def test_the_example_is_read_searched_and_demonstrated(folder):
    task = build(folder)
    born, older = sorted(task.questions("train"), key=lambda question: question.id)
    assert born.answers == ("Corham", "Corham Town")
    assert [asked.id for asked in task.questions("dev")] == ["q1"]
    assert [passage.title for passage in born.gold_passages] == ["Tisby", "Nils Lomund"]
    materials = asyncio.run(task.environment(born).search("Who is the mayor of Tisby?", None))
    assert materials[0].title == "Tisby"
    assert left_out(task) == ""
    assert {question.id for question, _ in task.demonstrations()} == {born.id, older.id}
    graph = build(folder, environment="graph")
    over_graph = {question.id: question for question in graph.questions("train")}
    assert over_graph.keys() == {"q3", "q5"}
    assert [candidate.label for candidate in over_graph["q3"].candidates] == ["Tisby"]
    assert [candidate.label for candidate in over_graph["q5"].candidates] == [
        "Nils Lomund",
        "Clara Ibsted",
    ]
    assert left_out(graph).startswith("1 questions cannot be asked"), (
        "the third one has no evidences"
    )


def test_without_ids_topics_are_what_nothing_finds_and_ids_of_a_graph_stay(folder):
    films = [
        ["Alpha", "director", "Ann"],
        ["Ann", "date of birth", "1901"],
        ["Beta", "director", "Ann"],
    ]
    changed(
        folder,
        type="bridge_comparison",
        question="Whose director is older, Alpha or Beta?",
        evidences=films,
    )
    (folder / "triples.tsv").write_text(
        "subject\trelation\tobject\tsubject_qid\tobject_qid\n"
        "Tisby\tmayor\tNils Lomund\tQ1\tQ2\n"
        "Tisby\tcountry\tQuinland\tQ1\tQ3\n"
        "Alpha\tdirector\tAnn\tQ4\tQ5\n"
        "Beta\tdirector\tAnn\tQ6\tQ5\n"
    )
    task = build(folder, environment="graph")
    asked = {question.id: question for question in task.questions("train")}
    assert [candidate.label for candidate in asked["q5"].candidates] == ["Alpha", "Beta"]
    (tisby,) = asked["q3"].candidates
    materials = asyncio.run(task.environment(asked["q3"]).search("Which country is it in?", tisby))
    assert {material.text for material in materials} >= {
        "Tisby, mayor, Nils Lomund",
        "Tisby, country, Quinland",
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"answer_aliases": "Nils"},
            "answer_aliases is 'Nils'; give a string and a list of strings",
        ),
        ({"answer_aliases": [["Nils"]]}, r"answer_aliases is \[\['Nils'\]\]; give a string"),
        ({"answer_aliases": [None]}, r"answer_aliases is \[None\]; give a string"),
        (
            {"supporting_facts": [{"title": "Tisby"}]},
            "not in the official format .* docs/guides/own_questions.md has",
        ),
        ({"supporting_facts": "Tisby"}, "not in the official format .*must be a list"),
        (
            {"split": "validation"},
            "split is 'validation' and must be train, dev or test; correct it or leave it out",
        ),
        ({"entity_ids": ["a", "b"]}, "evidences, entity_ids, .* not in the official format"),
        (
            {"_id": "q3"},
            r"question q3 is 'Who was .* here and 'Where was .* elsewhere \(.*line 1\); give each question",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(folder, changes, sentence):
    changed(folder, **changes)
    with pytest.raises(UserError, match=rf"questions\.jsonl, line 2: .*{sentence}"):
        build(folder)


@pytest.mark.parametrize("environment", ["text", "graph"])
def test_a_split_of_ones_own_is_kept_and_a_hash_decides_without(folder, environment):
    changed(folder, split="test")
    task = build(folder, environment=environment)
    assert [question.id for question in task.questions("test")] == ["q5"]
    assert [question.id for question in task.questions("train")] == ["q3"]
    assert {question.id for question, _ in task.demonstrations()} == {"q3"}
    once = (folder / "questions.jsonl").read_text().splitlines()[1]
    (folder / "dev.jsonl").write_text(once.replace('"split": "test"', '"split": "dev"'))
    with pytest.raises(
        UserError,
        match=r"split of question q5 is test here and dev elsewhere \(.*dev\.jsonl, line 1\)",
    ):
        build(folder, environment=environment)


def test_how_many_questions_are_left_out_is_said(folder):
    changed(folder, supporting_facts=[["Ulmby", 0]])
    task = build(folder)
    assert len(task.questions("train")) == 1
    assert left_out(task).startswith("1 questions cannot be asked")
    (folder / "corpus.jsonl").write_text('{"title": "Elsewhere", "text": "Nothing."}\n')
    with pytest.raises(
        UserError,
        match=r"all 3 questions .* name no supporting_facts, or a title that no passage has",
    ):
        build(folder)


def answer(request: Request, before: int) -> Answer:
    """Answer as a model that finds the mayor of Venford."""
    messages = request.body["messages"]
    if "<select>" in messages[0]["content"]:
        reply = (
            "<think>The first.</think>\n"
            "<select>[0]</select>\n"
            "<sentence>It is Clara Ibsted.</sentence>"
        )
    elif "It is Clara Ibsted." in messages[-1]["content"]:
        reply = "<think>Done.</think>\n<answer>Clara Ibsted</answer>"
    else:
        reply = "<think>I search.</think>\n<search>Who is the mayor of Venford?</search>"
    return Answer(
        content={
            "choices": [
                {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
            ]
        }
    )


def test_a_question_is_asked_over_the_passages_and_shown(
    folder, tmp_path, tokenizer, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    words = [
        CONFIG,
        "--task.data-dir",
        str(folder),
        *"--agent.prompt few_shot --agent.max-trajectory-tokens 9000".split(),
    ]
    asked = ["--ask", "Who is the mayor of Venford?"]
    with serving(answer) as endpoint:
        remote = [
            "--remote.base-url",
            endpoint.base_url,
            "--remote.model",
            "m",
            "--remote.mode",
            "chat",
        ]
        words += [*remote, "--remote.tokenizer", str(tokenizer)]
        assert evaluation.main([*words, *asked]) == 0
        shown = capsys.readouterr().out
        assert "evidence: Venford: Venford is a village" in shown
        assert shown.rstrip().endswith("answer: Clara Ibsted")
        assert evaluation.main([*words, "--ask", " "]) == 2
        unknown = ["--task.environment", "graph", "--ask", "Who is the mayor of Tisbi?"]
        assert evaluation.main([*words, *unknown]) == 2
        message = "names no entity of the graph: did you mean Tisby?"
        assert message in capsys.readouterr().err
        assert evaluation.main([*words, *asked, "--agents", "rag"]) == 2
    assert "--agents is given too: --ask lets one agent answer" in capsys.readouterr().err
    assert not (tmp_path / "eval").exists()


def test_the_agent_of_an_endpoint_is_served(folder, tokenizer, capsys):
    with serving(answer) as endpoint:
        flags = f"--config {CONFIG} --task.data-dir {folder} --agent.prompt few_shot "
        flags += f"--agent.max-trajectory-tokens 9000 --remote.base-url {endpoint.base_url} "
        flags += f"--remote.model m --remote.mode chat --remote.tokenizer {tokenizer}"
        options, config = serve.parse(flags.split())
        served = serve.open_models(options, config)
        assert (served.name, served.policy) == ("m", None)
        served.background.start()
        try:
            events = asyncio.run(all_of(served.agent.answer("Who is the mayor of Venford?")))
        finally:
            served.background.stop()
    assert events[-1].answer == "Clara Ibsted"
    refused = [*flags.split(), "--policy", "1", "--port", "0"]
    assert serve.main(refused) == 2
    assert "but the endpoint has the model" in capsys.readouterr().err


async def all_of(events):
    return [event async for event in events]


def test_questions_without_answers_or_gold_passages_are_told_about_another_task(folder):
    lines = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    without_gold = [{"_id": q["_id"], "question": q["question"], "answer": "x"} for q in lines]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, without_gold)))
    with pytest.raises(
        UserError, match=r"ask them without gold passages with --task\.kind questions"
    ):
        build(folder)
    without_answer = [{"_id": q["_id"], "question": q["question"]} for q in lines]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, without_answer)))
    with pytest.raises(UserError, match="has an answer: give each one the field answer, or use"):
        build(folder)
