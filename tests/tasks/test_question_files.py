"""Files of questions as people have them: read in the one way that they can mean, or refused with
file and line.
"""

import csv
import dataclasses
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.config.checks import check
from mujica_jax.config.files import load_config
from mujica_jax.config.tasks import HotpotConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import score
from mujica_jax.records import Question
from mujica_jax.tasks import checks
from mujica_jax.tasks.open_domain import task as open_domain
from mujica_jax.tasks.open_domain.records import OpenRecord, read_open_records, read_question_files
from mujica_jax.tasks.two_wiki.records import read_questions
from tests.helpers.local_endpoint import Answer, Request, serving

HALF = "Ann \\ud83d Ode"  # half of a surrogate pair, as JSON writes it
BOM = "\ufeff"


def hotpot(**changes: Any) -> dict[str, Any]:
    fields = {"_id": "h1", "question": "Who built the mill?", "answer": "Ann Ode", "type": "bridge"}
    context = [["Lisma", ["The mill of Lisma was built by Ann Ode."]]]
    return fields | {"supporting_facts": [["Lisma", 0]], "context": context} | changes


def musique(**changes: Any) -> dict[str, Any]:
    paragraph = {
        "idx": 0,
        "title": "Lisma",
        "paragraph_text": "The mill is old.",
        "is_supporting": True,
    }
    fields = {
        "id": "2hop__1_2",
        "question": "Who built the mill?",
        "answer": "Ann Ode",
        "answer_aliases": [],
    }
    return fields | {"answerable": True, "paragraphs": [paragraph]} | changes


def trivia(**changes: Any) -> dict[str, Any]:
    return {
        "QuestionId": "tc_1",
        "Question": "Who?",
        "Answer": {"Value": "Ann Ode", "Aliases": ["A. Ode"]},
    } | changes


def ambig(**changes: Any) -> dict[str, Any]:
    single = [{"type": "singleAnswer", "answer": ["Ann Ode"]}]
    return {"id": "a1", "question": "Who?", "annotations": single} | changes


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def only_record(tmp_path: Path, kind: str, text: str, name: str = "dev.jsonl") -> OpenRecord:
    """Return the only question of a file with this content."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    (record,) = read_open_records(tmp_path / name, kind)
    return record


def own(tmp_path: Path, *records: dict[str, Any]) -> list[Any]:
    (tmp_path / "questions.jsonl").write_text(lines(*records))
    return read_questions([tmp_path / "questions.jsonl"])


# One id twice


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("hotpotqa", hotpot(), hotpot(question="Who owns the pier?")),
        ("musique", musique(), musique(question="Who owns the pier?")),
        ("ambigqa", ambig(), ambig(question="Where?")),
        ("hotpotqa", hotpot(_id=7), hotpot(_id="7", question="Who owns the pier?")),
    ],
)
def test_one_id_for_two_questions_is_refused_with_both_places(tmp_path, kind, first, second):
    (tmp_path / "dev_1.jsonl").write_text(lines(first))
    (tmp_path / "dev_2.jsonl").write_text("\n" + lines(second))
    complaint = (
        r"dev_2\.jsonl, line 2: the question .* is 'W.*' here and 'Who.*' in .*dev_1\.jsonl, "
        r"line 1; give each question"
    )
    with pytest.raises(UserError, match=complaint):
        read_question_files([tmp_path / "dev_1.jsonl", tmp_path / "dev_2.jsonl"], kind)


def test_one_id_for_a_training_question_and_another_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(hotpot()))
    (tmp_path / "dev.jsonl").write_text(lines(hotpot(question="Who owns the pier?")))
    with pytest.raises(
        UserError, match=r"train\.jsonl, line 1: the question h1 .* in .*dev\.jsonl, line 1"
    ):
        open_domain.build(HotpotConfig(data_dir=str(tmp_path), top_k=1))


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        (
            "nq",
            {"question": "who built it", "answer": ["Ann Ode"]},
            {"question": "who built it", "answer": ["A. Ode"]},
        ),
        ("hotpotqa", hotpot(), hotpot(answer="A. Ode")),
        ("musique", musique(), musique(answer="A. Ode", question="who  built the mill?")),
    ],
)
def test_the_same_question_twice_is_one_with_all_of_its_answers(tmp_path, kind, first, second):
    (tmp_path / "dev.jsonl").write_text(lines(first, second))
    ((training, record),) = read_question_files([tmp_path / "dev.jsonl"], kind)
    assert not training
    assert record.answers == ("Ann Ode", "A. Ode")


def test_of_two_files_with_a_question_the_one_with_its_gold_passages_counts(tmp_path):
    """HotpotQA's fullwiki file stands beside the distractor file, in either order."""
    without = hotpot(context=[["Kolm", ["Kolm is a hill."]]])
    for names in (("a.json", "b.json"), ("b.json", "a.json")):
        (tmp_path / names[0]).write_text(json.dumps([hotpot()]))
        (tmp_path / names[1]).write_text(json.dumps([without]))
        ((_, record),) = read_question_files([tmp_path / "a.json", tmp_path / "b.json"], "hotpotqa")
        assert record.has_gold_in_context


# Ids


@pytest.mark.parametrize(
    ("id", "read"), [(7, "7"), (7.5, "7.5"), (7.0, "7"), (0, "0"), ("x 7", "x 7")]
)
def test_numbers_are_ids(tmp_path, id, read):
    assert only_record(tmp_path, "hotpotqa", lines(hotpot(_id=id))).id == read
    assert only_record(tmp_path, "musique", lines(musique(id=id))).id == read
    assert (
        only_record(
            tmp_path, "triviaqa", json.dumps({"Data": [trivia(QuestionId=id)]}), "dev.json"
        ).id
        == read
    )
    (record,) = own(tmp_path, hotpot(_id=id))
    assert record.id == read


@pytest.mark.parametrize(
    "id", [None, float("nan"), float("inf"), True, "", "  ", [1], {"$oid": "1"}]
)
def test_what_is_no_id_is_refused_with_its_line(tmp_path, id):
    for kind, record in (
        ("hotpotqa", hotpot(_id=id)),
        ("musique", musique(id=id)),
        ("ambigqa", ambig(id=id)),
    ):
        with pytest.raises(UserError, match=r"dev\.jsonl, line 1: this is not a record of"):
            only_record(tmp_path, kind, lines(record))
    with pytest.raises(UserError, match=r"questions\.jsonl, line 2: _id is .* and question "):
        own(tmp_path, hotpot(), hotpot(_id=id))


# Answers


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (0, "0"),
        (False, "no"),
        (True, "yes"),
        (1911, "1911"),
        (1911.0, "1911"),
        (3.5, "3.5"),
        (-2, "-2"),
    ],
)
def test_numbers_and_booleans_are_answers(tmp_path, answer, read):
    assert only_record(tmp_path, "hotpotqa", lines(hotpot(answer=answer))).answers == (read,)
    assert only_record(tmp_path, "musique", lines(musique(answer_aliases=[answer]))).answers == (
        "Ann Ode",
        read,
    )
    assert only_record(tmp_path, "nq", lines({"question": "who", "answer": [answer]})).answers == (
        read,
    )
    assert only_record(
        tmp_path,
        "popqa",
        f'id\tquestion\tpossible_answers\n1\tWho?\t"[{json.dumps(answer)}]"\n',
        "a.tsv",
    ).answers == (read,)
    (record,) = own(tmp_path, hotpot(answer=answer))
    assert record.answers == (read,)


@pytest.mark.parametrize("answer", [float("nan"), ["x"], {"value": "x"}])
def test_what_is_no_answer_is_refused_with_its_line(tmp_path, answer):
    for kind, record in (
        ("hotpotqa", hotpot(answer=answer)),
        ("musique", musique(answer=answer)),
        ("nq", {"question": "who", "answer": [answer]}),
    ):
        with pytest.raises(UserError, match=r"dev\.jsonl, line 1: this is not a record of"):
            only_record(tmp_path, kind, lines(record))
    with pytest.raises(UserError, match=r"questions\.jsonl, line 1: answer is "):
        own(tmp_path, hotpot(answer=answer))


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_question_without_an_answer_is_passed_over(tmp_path, answer):
    (tmp_path / "dev.jsonl").write_text(lines(hotpot(answer=answer)))
    assert not list(read_open_records(tmp_path / "dev.jsonl", "hotpotqa"))
    assert not own(tmp_path, hotpot(answer=answer))


@pytest.mark.parametrize("answers", [[], [""], [None], "Ann", None])
def test_a_list_without_an_answer_is_refused(tmp_path, answers):
    with pytest.raises(UserError, match=r"dev\.jsonl, line 1: this is not a record of nq"):
        only_record(tmp_path, "nq", lines({"question": "who", "answer": answers}))


def test_entities_in_answers_score_as_what_they_stand_for(tmp_path):
    record = only_record(
        tmp_path,
        "nq",
        lines({"question": "who&#39;s it", "answer": ["Rock &amp; Roll", "Q&A", "R&B; soul"]}),
    )
    assert record.text == "who's it"
    assert record.answers == ("Rock & Roll", "Q&A", "R&B; soul")
    assert score("Rock & Roll", record.answers, "musique").em == 1.0


# Characters


@pytest.mark.parametrize("field", ["_id", "question", "answer", "type"])
def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path, field):
    text = lines(hotpot(_id="other"), hotpot(**{field: "HALF"})).replace("HALF", HALF)
    for name, read in (
        ("dev.jsonl", lambda file: list(read_open_records(file, "hotpotqa"))),
        ("questions.jsonl", lambda file: read_questions([file])),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(
            UserError, match=rf"{name}, line 2: .*ud83d.* cannot be written as UTF-8"
        ):
            read(tmp_path / name)


@pytest.mark.parametrize("field", ["supporting_facts", "context", "evidences", "answer_aliases"])
def test_half_a_surrogate_pair_in_a_list_is_refused_too(tmp_path, field):
    values = {
        "supporting_facts": [["HALF", 0]],
        "context": [["Lisma", ["HALF"]]],
        "evidences": [["HALF", "is", "b"]],
        "answer_aliases": ["HALF"],
    }
    (tmp_path / "questions.jsonl").write_text(
        lines(hotpot(**{field: values[field]})).replace("HALF", HALF)
    )
    with pytest.raises(UserError, match=r"questions\.jsonl, line 1: .* cannot be written as UTF-8"):
        read_questions([tmp_path / "questions.jsonl"])


def test_half_a_surrogate_pair_of_a_task_of_ones_own_is_refused_before_anything_is_played():
    class Broken:
        name = "broken"
        rule = "musique"
        environment_kind = "text"

        def questions(self, split: str) -> list[Question]:
            return [Question(id="q", text="Who?", answers=("Ann \ud83d",))]

        def environment(self, question: Question) -> None:
            return None

    broken: Any = Broken()
    with pytest.raises(
        UserError, match=r"task broken, question 'q': .* cannot be written as UTF-8"
    ):
        checks.check_task(broken, "broken", ("test",))


# Tables


def table(*rows: list[str], delimiter: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue()


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_table_of_a_spreadsheet_is_read(tmp_path, quoted, packed):
    text = "Question,Answer\r\nWhere?,Ghent\r\n"
    if quoted:
        text = '"Question","Answer"\r\n"Where, then?","Ghent"\r\n'
    content = (BOM + text).encode()
    file = tmp_path / ("Bamboogle Prerelease.csv" + ".gz" * packed)
    file.write_bytes(gzip.compress(content) if packed else content)
    (record,) = read_open_records(file, "bamboogle")
    assert record.answers == ("Ghent",)
    assert record.text.startswith("Where")


def test_columns_stand_in_any_order(tmp_path):
    swapped = table(["Answer", "More", "Question"], ["Ghent", "", "Where?"])
    assert only_record(tmp_path, "bamboogle", swapped, "a.csv").answers == ("Ghent",)
    rows = (["possible_answers", "question", "prop", "id"], ['["Ghent"]', "Where?", "capital", "7"])
    record = only_record(tmp_path, "popqa", BOM + table(*rows, delimiter="\t"), "popQA.tsv")
    assert record.id == "7"
    assert record.text == "Where?"
    assert record.answers == ("Ghent",)
    assert record.kind == "capital"


def test_a_row_with_more_cells_than_columns_is_refused(tmp_path):
    """An answer with an unquoted comma would lose its end."""
    with pytest.raises(
        UserError,
        match=r"a\.csv, line 3: there are more cells than columns \(\[' Belgium'\] is left over\)",
    ):
        (tmp_path / "a.csv").write_text(
            "Question,Answer\nWhere?,Ghent\nWhere then?,Ghent, Belgium\n"
        )
        list(read_open_records(tmp_path / "a.csv", "bamboogle"))


# JSON


@pytest.mark.parametrize("bom", ["", BOM])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("first", ["Data", "Version"])
def test_triviaqa_is_read_in_any_order_of_its_fields(tmp_path, bom, indent, first):
    fields = {"Data": [trivia()], "Version": 1.0}
    ordered = {name: fields[name] for name in sorted(fields, key=lambda name: name != first)}
    assert only_record(
        tmp_path, "triviaqa", bom + json.dumps(ordered, indent=indent), "dev.json"
    ).answers == ("Ann Ode", "A. Ode")


@pytest.mark.parametrize("bom", ["", BOM])
@pytest.mark.parametrize("name", ["dev.json", "dev.jsonl"])
def test_arrays_and_lines_are_read_whatever_the_file_is_called(tmp_path, bom, name):
    records = [hotpot(), hotpot(_id="h2", question="Who owns the pier?")]
    for text in (json.dumps(records), json.dumps(records, indent=1), lines(*records)):
        (tmp_path / name).write_text(bom + text, encoding="utf-8")
        assert [record.id for record in read_open_records(tmp_path / name, "hotpotqa")] == [
            "h1",
            "h2",
        ]
    (tmp_path / name).write_text(bom + lines(hotpot()), encoding="utf-8")
    assert [record.id for record in read_open_records(tmp_path / name, "hotpotqa")] == ["h1"]
    (tmp_path / f"questions_{name}").write_text(bom + lines(*records), encoding="utf-8")
    assert [record.id for record in read_questions([tmp_path / f"questions_{name}"])] == [
        "h1",
        "h2",
    ]


def test_an_object_that_is_no_record_is_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=r"dev\.json is neither a list of records nor an object whose field Data is a list",
    ):
        only_record(
            tmp_path, "triviaqa", json.dumps({"version": 1, "data": [trivia()]}), "dev.json"
        )


@pytest.mark.parametrize("blank", ["", "\n", " \n\n \t\n", BOM, f"{BOM}\n"])
@pytest.mark.parametrize("name", ["dev.json", "dev.jsonl", "dev.csv", "dev.jsonl.gz"])
def test_a_blank_file_is_refused_at_once(tmp_path, blank, name):
    content = blank.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(UserError, match=rf"{name} is blank and contains no question"):
        list(read_open_records(tmp_path / name, "hotpotqa"))
    if not name.endswith(".csv"):
        with pytest.raises(UserError, match=rf"{name} is blank and contains no question"):
            read_questions([tmp_path / name])


# Passages


@pytest.mark.parametrize(
    ("context", "text"),
    [
        ([["Lisma", ["The mill.", " It is old. "]]], "The mill. It is old."),
        ([["Lisma", "The mill. It is old."]], "The mill. It is old."),
        ({"title": ["Lisma"], "sentences": [["The mill.", "It is old."]]}, "The mill. It is old."),
    ],
)
def test_a_paragraph_is_a_list_of_sentences_or_one_text(tmp_path, context, text):
    facts = {"title": ["Lisma"], "sent_id": [0]} if isinstance(context, dict) else [["Lisma", 0]]
    record = only_record(
        tmp_path, "hotpotqa", lines(hotpot(context=context, supporting_facts=facts))
    )
    assert [passage.text for passage in record.context] == [text]
    assert record.gold == record.context
    (mine,) = own(tmp_path, hotpot(context=context, supporting_facts=facts))
    assert mine.gold == record.gold
    paragraph = {
        "idx": 0,
        "title": "Lisma",
        "paragraph_text": ["The mill.", "It is old."],
        "is_supporting": True,
    }
    assert (
        only_record(tmp_path, "musique", lines(musique(paragraphs=[paragraph]))).gold[0].text
        == "The mill. It is old."
    )


@pytest.mark.parametrize(
    "changes", [{"context": [["Lisma", 3]]}, {"context": "Lisma"}, {"supporting_facts": "Lisma"}]
)
def test_what_is_no_paragraph_or_fact_is_refused_with_its_line(tmp_path, changes):
    with pytest.raises(
        UserError, match=r"dev\.jsonl, line 1: this is not a record of hotpotqa \(TypeError"
    ):
        only_record(tmp_path, "hotpotqa", lines(hotpot(**changes)))
    with pytest.raises(UserError, match=r"questions\.jsonl, line 1: .* not in the official format"):
        own(tmp_path, hotpot(**changes))


def test_titles_may_be_numbers_or_missing_and_a_paragraph_given_twice_counts_once(tmp_path):
    context = [
        [1984, ["A novel."]],
        [None, ["No title."]],
        ["", ["No title either."]],
        [1984, ["A  novel."]],
    ]
    record = only_record(
        tmp_path, "hotpotqa", lines(hotpot(context=context, supporting_facts=[[1984, 0]]))
    )
    assert [(passage.title, passage.text) for passage in record.context] == [
        ("1984", "A novel."),
        ("", "No title."),
        ("", "No title either."),
    ]
    assert record.gold == record.context[:1]


def test_a_paragraph_says_by_true_or_false_whether_it_supports(tmp_path):
    paragraph = {
        "idx": 0,
        "title": "Lisma",
        "paragraph_text": "The mill.",
        "is_supporting": "false",
    }
    with pytest.raises(
        UserError, match=r"line 1: .* is_supporting is 'false' and must be true or false"
    ):
        only_record(tmp_path, "musique", lines(musique(paragraphs=[paragraph])))


# Folders, on the command line


def test_what_macos_puts_beside_a_file_is_no_file_of_questions(tmp_path):
    (tmp_path / "dev.json").write_text(json.dumps([hotpot()]))
    (tmp_path / "._dev.json").write_bytes(b"\x00\x05\x16\x07\x00\xff")
    task = open_domain.build(HotpotConfig(data_dir=str(tmp_path), top_k=1, dev_percent=0))
    assert [question.id for question in task.questions("test")] == ["h1"]


@pytest.mark.parametrize(
    ("kind", "name", "content", "expected_complaint"),
    [
        (
            "two_wiki",
            "questions.jsonl",
            "\n",
            "questions.jsonl is blank and contains no question",
        ),
        ("hotpotqa", "dev.json", " ", "dev.json is blank and contains no question"),
        (
            "hotpotqa",
            "dev.jsonl",
            lines(hotpot(_id=None)),
            "dev.jsonl, line 1: this is not a record of hotpotqa",
        ),
        (
            "hotpotqa",
            "hotpot_dev_fullwiki_v1.json",
            json.dumps([hotpot(context=[["Kolm", ["A hill."]]])]),
            "none of the 1 questions in data has all of its gold passages among its own passages",
        ),
    ],
)
def test_a_mistake_in_a_folder_is_one_sentence_and_status_2(
    tmp_path, tokenizer, capsys, monkeypatch, kind, name, content, expected_complaint
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(content)
    (tmp_path / "data" / "corpus.jsonl").write_text('{"title": "Lisma", "text": "A town."}\n')
    words = [
        "two_wiki_text_smollm2",
        *"--remote.base-url http://127.0.0.1:9/v1 --remote.model m".split(),
    ]
    words += ["--remote.mode", "chat", "--remote.tokenizer", str(tokenizer)]
    words += ["--task.kind", kind, "--task.data-dir", "data", "--agent.prompt", "zero_shot"]
    words += ["--task.setting", "distractor"] if kind == "hotpotqa" else []
    assert evaluation.main(words) == 2
    complaint = capsys.readouterr().err.strip()
    assert expected_complaint in complaint
    assert "Traceback" not in complaint
    assert len(complaint.splitlines()) == 1


@pytest.mark.parametrize("bare", [True, False])
def test_the_distractor_row_says_how_many_passages_are_shown_and_how_many_questions_are_kept(
    tmp_path, tokenizer, capsys, monkeypatch, bare
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    context = [
        ["Lisma", ["The mill of Lisma was built by Ann Ode."]],
        ["Kolm", ["A hill."]],
        ["Ulmby", ["A town."]],
    ]
    records = [
        hotpot(context=context),
        hotpot(_id="h2", question="Who owns it?", context=context[1:]),
    ]
    (tmp_path / "hotpot_dev_fullwiki_v1.json").write_text(json.dumps(records))

    def answer(request: Request, before: int) -> Answer:
        message = {"role": "assistant", "content": "<answer>Ann Ode</answer>"}
        return Answer(content={"choices": [{"message": message, "finish_reason": "stop"}]})

    words = [
        "hotpotqa_distractor_v5e",
        "--remote.model",
        "m",
        "--remote.mode",
        "chat",
        "--remote.tokenizer",
        str(tokenizer),
    ]
    words += "--agent.kind rag --eval.split test --no-sampled --task.dev-percent 0 --task.top-k 2 --out out".split()
    words += ["--task.data-dir", str(tmp_path)]
    flags_to_keep = ["--task.keep-incomplete"] if bare else ["--task.keep_incomplete", "True"]
    with serving(answer) as endpoint:
        assert evaluation.main([*words, "--remote.base-url", endpoint.base_url]) == 0
        without = " ".join(capsys.readouterr().out.split())
        result = json.loads(
            (tmp_path / "out" / "hotpotqa-text-distractor-rag-test.json").read_text()
        )
        assert (
            evaluation.main([*words, "--remote.base-url", endpoint.base_url, *flags_to_keep]) == 0
        )
        with_all = " ".join(capsys.readouterr().out.split())
    left_out = "1 of 2 questions lack a gold passage among their own passages; they are left out"
    assert left_out in without
    assert "a search shows 2 of 3 passages that belong to the question" in without
    assert result["greedy"]["questions"] == 1
    assert result["left_out"] == 1
    assert result["shown"] == "2 of 3 passages"
    assert result["notes"][0].startswith(left_out)
    assert "; they are asked, because task.keep_incomplete is True" in with_all
    assert "a search shows 2 of 2 to 3 passages that belong to the question" in with_all
    result = json.loads((tmp_path / "out" / "hotpotqa-text-distractor-rag-test.json").read_text())
    assert result["greedy"]["questions"] == 2
    assert result["left_out"] == 0


def test_keeping_incomplete_questions_needs_the_distractor_setting():
    config = load_config("hotpotqa_distractor_v5e")
    task = dataclasses.replace(config.task, keep_incomplete=True)
    check(dataclasses.replace(config, task=task))
    with pytest.raises(
        UserError, match=r"task\.keep_incomplete is True, but task\.setting is open"
    ):
        check(dataclasses.replace(config, task=dataclasses.replace(task, setting="open")))
