"""Answer scores of the official scripts, one rule each, and a bootstrap interval for their means.

| rule | official script | what is particular |
|---|---|---|
| `hotpot` | HotpotQA `hotpot_evaluate_v1.py` | F1 is 0 if just one side is yes, no or noanswer; one gold answer |
| `two_wiki` | 2WikiMultihopQA `2wikimultihop_evaluate_v1.1.py` | as `hotpot`, over the answer and its aliases |
| `musique` | MuSiQue `metrics/answer.py` | plain token F1; two empty sides agree (F1 = 1) |
| `triviaqa` | TriviaQA `triviaqa_evaluation.py` | punctuation becomes a space instead of nothing |
| `cover_em` | open-domain QA papers | EM is 1 where a normalised gold answer is a substring; F1 as `musique` |

Over several gold answers every number is the best one over the golds, each by itself, as the
official scripts of 2WikiMultihopQA, MuSiQue and TriviaQA do it. The HotpotQA script reads one gold
answer; for several we apply the same maximum to its formula. `musique`, `triviaqa` and `cover_em`
print no precision or recall: ours are those behind their F1.

Two things are ours, and change no score of ordinary answers. Letters that Unicode can write in
several ways are composed first (NFC), so that "é" equals "e" with an accent. A gold answer of which
normalisation leaves nothing ("The The", "A", "!") is compared as it is written, up to case and
spaces: it would otherwise be part of every prediction.
"""

import dataclasses
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

Rule = Literal["hotpot", "two_wiki", "musique", "triviaqa", "cover_em"]

# A partial match of these earns nothing under hotpot and two_wiki.
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
TRIVIAQA_PUNCTUATION = string.punctuation + "‘’´`"

_articles = re.compile(r"\b(a|an|the)\b")
_delete_punctuation = str.maketrans("", "", string.punctuation)
_space_punctuation = str.maketrans({mark: " " for mark in TRIVIAQA_PUNCTUATION})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """All four lie between 0 and 1."""

    em: float
    f1: float
    precision: float
    recall: float


def score(prediction: str | None, golds: Sequence[str], rule: Rule) -> Score:
    """The score of a prediction against the gold answers, of which there is one at least. None
    scores zero."""
    if not golds:
        raise ValueError("score needs at least one gold answer and got none")
    if prediction is None:
        return Score(em=0.0, f1=0.0, precision=0.0, recall=0.0)
    normalise = normalise_triviaqa if rule == "triviaqa" else normalise_squad
    answer = normalise(prediction)
    singles: list[Score] = []
    for gold in golds:
        normalised_gold = normalise(gold)
        if (
            normalised_gold or not gold.strip()
        ):  # an empty gold answer is scored as the official scripts do
            singles.append(_score_one(answer, normalised_gold, rule))
        else:
            equal = float(_as_written(prediction) == _as_written(gold))
            singles.append(Score(em=equal, f1=equal, precision=equal, recall=equal))
    return Score(
        **{name: max(getattr(single, name) for single in singles) for name in vars(singles[0])}
    )


def score_set(prediction: str | None, answer_sets: Sequence[Sequence[Sequence[str]]]) -> Score:
    """Several answers against several that are asked for, as AmbigQA scores them
    (`ambigqa_evaluate_script.py`): each predicted answer counts for one of them, by exact match
    with one of its aliases; the best annotation counts. Several answers of one prediction are
    separated by semicolons, which is ours.
    """
    said = [normalise_squad(part) or _as_written(part) for part in (prediction or "").split(";")]
    predicted = [part for part in said if part]
    best = Score(em=0.0, f1=0.0, precision=0.0, recall=0.0)
    for annotation in answer_sets:
        left = list(predicted)
        matched = 0
        for aliases in annotation:
            asked = {normalise_squad(alias) or _as_written(alias) for alias in aliases}
            hit = next((part for part in left if part in asked), None)
            if hit is not None:
                left.remove(hit)
                matched += 1
        em = float(matched == len(predicted) == len(annotation))
        best = max(
            best, _overlap(em, matched, len(predicted), len(annotation)), key=lambda score: score.f1
        )
    return best


def gerbil_macro_f1(scores: Sequence[Score], answered: Sequence[bool]) -> float:
    """GERBIL's Macro F1 QALD (Usbeck et al., 2019): the harmonic mean of macro precision and macro
    recall, where a question without any answer has precision 1 and recall 0. The plain macro F1 is
    the mean of the questions' F1.
    """
    said = [
        score.precision if given else 1.0 for score, given in zip(scores, answered, strict=True)
    ]
    precision, recall = sum(said) / len(said), sum(score.recall for score in scores) / len(scores)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def supporting(found: Collection[str], gold: Collection[str]) -> Score:
    """HotpotQA's scores of supporting facts (`update_sp` of its script), of passages by their
    titles. `gold` has one at least.
    """
    said, asked = set(found), set(gold)
    return _overlap(float(said == asked), len(said & asked), len(said), len(asked))


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, resamples: int = 1000
) -> tuple[float, float]:
    """95% percentile-bootstrap interval of the mean of `values` (each 0 to 1), in percent."""
    if not len(values):
        raise ValueError("bootstrap_interval needs at least one value and got none")
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = np.array(
        [sample[generator.integers(len(sample), size=len(sample))].mean() for _ in range(resamples)]
    )
    low, high = np.percentile(100 * means, [2.5, 97.5])
    return float(low), float(high)


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], seed: int = 0, resamples: int = 1000
) -> tuple[float, tuple[float, float], float]:
    """How much better the second of two systems is on the same questions, in percent: the
    difference of the means, its 95% percentile-bootstrap interval over the questions, and the share
    of resamples in which it is not above zero.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(
            f"paired_bootstrap needs two scores a question and got {len(first)} and {len(second)}"
        )
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(differences), size=(resamples, len(differences)))
    means = 100 * differences[drawn].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(100 * differences.mean()), (float(low), float(high)), float((means <= 0).mean())


def normalise_squad(text: str) -> str:
    """SQuAD's normalisation, which most scripts share: lower case, no ASCII punctuation or
    articles, single spaces."""
    return " ".join(_articles.sub(" ", _lower(text).translate(_delete_punctuation)).split())


def normalise_triviaqa(text: str) -> str:
    return " ".join(_articles.sub(" ", _lower(text).translate(_space_punctuation)).split())


def _lower(text: str) -> str:
    """Return lower-case text with composed letters. Lower case can decompose a letter, so it comes
    first."""
    return unicodedata.normalize("NFC", text.lower())


def _as_written(text: str) -> str:
    """Return text up to case and spaces, for answers of which normalisation leaves nothing."""
    return " ".join(_lower(text).split())


def _score_one(prediction: str, gold: str, rule: Rule) -> Score:
    """Both sides normalised."""
    em = float(gold in prediction if rule == "cover_em" else gold == prediction)
    closed = prediction in CLOSED_ANSWERS or gold in CLOSED_ANSWERS
    if rule in ("hotpot", "two_wiki") and closed and prediction != gold:
        return Score(em=em, f1=0.0, precision=0.0, recall=0.0)
    prediction_tokens, gold_tokens = prediction.split(), gold.split()
    if rule in ("musique", "cover_em") and not (prediction_tokens and gold_tokens):
        agree = float(prediction_tokens == gold_tokens)
        return Score(em=em, f1=agree, precision=agree, recall=agree)
    shared = sum((Counter(prediction_tokens) & Counter(gold_tokens)).values())
    return _overlap(em, shared, len(prediction_tokens), len(gold_tokens))


def _overlap(em: float, shared: int, said: int, asked: int) -> Score:
    """`shared` of so many that were said and so many that are asked for."""
    if not shared:
        return Score(em=em, f1=0.0, precision=0.0, recall=0.0)
    precision, recall = shared / said, shared / asked
    return Score(
        em=em, f1=2 * precision * recall / (precision + recall), precision=precision, recall=recall
    )
