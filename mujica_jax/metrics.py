"""Answer scores of the official scripts, one rule each, and a bootstrap interval for their means.

| rule | official script | what is particular |
|---|---|---|
| `hotpot` | `hotpot_evaluate_v1.py` | F1 is 0 if just one side is yes, no or noanswer; one gold |
| `two_wiki` | `2wikimultihop_evaluate_v1.1.py` | as `hotpot`, over the answer and its aliases |
| `musique` | MuSiQue `metrics/answer.py` | plain token F1; two empty sides agree (F1 = 1) |
| `triviaqa` | `triviaqa_evaluation.py` | punctuation becomes a space instead of nothing |
| `cover_em` | open-domain QA papers | EM is 1 if a normalised gold is a part; F1 as `musique` |

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
    """Return the score of a prediction against one or more gold answers. None scores zero."""
    if not golds:
        raise ValueError("score needs at least one gold answer and got none")
    if prediction is None:
        return Score(em=0.0, f1=0.0, precision=0.0, recall=0.0)
    normalise = normalise_triviaqa if rule == "triviaqa" else normalise_squad
    answer = normalise(prediction)
    scores: list[Score] = []
    for gold in golds:
        normalised_gold = normalise(gold)
        # An empty gold answer is scored as the official scripts do.
        if normalised_gold or not gold.strip():
            scores.append(_score_normalised(answer, normalised_gold, rule))
        else:
            equal = float(_as_written(prediction) == _as_written(gold))
            scores.append(Score(em=equal, f1=equal, precision=equal, recall=equal))
    return Score(
        em=max(score.em for score in scores),
        f1=max(score.f1 for score in scores),
        precision=max(score.precision for score in scores),
        recall=max(score.recall for score in scores),
    )


def score_set(prediction: str | None, answer_sets: Sequence[Sequence[Sequence[str]]]) -> Score:
    """Return the score of several answers against several gold ones, as AmbigQA gives it.

    Each predicted answer counts for one gold answer, by exact match with one of its aliases. The
    best annotation counts (`ambigqa_evaluate_script.py`). Several answers of one prediction are
    separated by semicolons, which is ours.
    """
    predicted = []
    for part in (prediction or "").split(";"):
        answer = normalise_squad(part) or _as_written(part)
        if answer:
            predicted.append(answer)

    best = Score(em=0.0, f1=0.0, precision=0.0, recall=0.0)
    for annotation in answer_sets:
        unmatched = list(predicted)
        matches = 0
        for aliases in annotation:
            golds = {normalise_squad(alias) or _as_written(alias) for alias in aliases}
            match = next((answer for answer in unmatched if answer in golds), None)
            if match is not None:
                unmatched.remove(match)
                matches += 1
        em = float(matches == len(predicted) == len(annotation))
        score = _overlap(em, matches, len(predicted), len(annotation))
        if score.f1 > best.f1:
            best = score
    return best


def gerbil_macro_f1(scores: Sequence[Score], answered: Sequence[bool]) -> float:
    """Return GERBIL's Macro F1 QALD (Usbeck et al., 2019).

    It is the harmonic mean of macro precision and macro recall, where a question without any answer
    has precision 1 and recall 0. The plain macro F1 is the mean of the questions' F1.
    """
    precisions = [
        score.precision if is_answered else 1.0
        for score, is_answered in zip(scores, answered, strict=True)
    ]
    precision = sum(precisions) / len(precisions)
    recall = sum(score.recall for score in scores) / len(scores)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def supporting(titles: Collection[str], gold_titles: Collection[str]) -> Score:
    """Return HotpotQA's score of supporting facts (`update_sp` of its script).

    Passages are compared by their titles. `gold_titles` has at least one.
    """
    distinct_titles = set(titles)
    distinct_gold = set(gold_titles)
    em = float(distinct_titles == distinct_gold)
    shared = len(distinct_titles & distinct_gold)
    return _overlap(em, shared, len(distinct_titles), len(distinct_gold))


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, resamples: int = 1000
) -> tuple[float, float]:
    """Return the 95% percentile-bootstrap interval of the mean of `values`, in percent.

    Each value is between 0 and 1.
    """
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
    """Return how much better the second of two systems is on the same questions, in percent.

    The three results are the difference of the means, its 95% percentile-bootstrap interval over
    the questions, and the share of resamples in which the difference is not above zero.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(
            f"paired_bootstrap needs two scores a question and got {len(first)} and {len(second)}"
        )
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    generator = np.random.default_rng(seed)
    indices = generator.integers(len(differences), size=(resamples, len(differences)))
    means = 100 * differences[indices].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    mean_difference = float(100 * differences.mean())
    share_not_better = float((means <= 0).mean())
    return mean_difference, (float(low), float(high)), share_not_better


def normalise_squad(text: str) -> str:
    """Return text under SQuAD's normalisation, which most scripts share.

    It has lower case, no ASCII punctuation, no articles and single spaces.
    """
    return " ".join(_articles.sub(" ", _lower(text).translate(_delete_punctuation)).split())


def normalise_triviaqa(text: str) -> str:
    """Return text under TriviaQA's normalisation: punctuation becomes a space."""
    return " ".join(_articles.sub(" ", _lower(text).translate(_space_punctuation)).split())


def _lower(text: str) -> str:
    """Return lower-case text with composed letters.

    Lower case can decompose a letter, so it comes first.
    """
    return unicodedata.normalize("NFC", text.lower())


def _as_written(text: str) -> str:
    """Return text up to case and spaces, for answers of which normalisation leaves nothing."""
    return " ".join(_lower(text).split())


def _score_normalised(prediction: str, gold: str, rule: Rule) -> Score:
    """Return the score of one answer against one gold answer, both normalised."""
    em = float(gold in prediction if rule == "cover_em" else gold == prediction)

    # A partial match of yes, no or noanswer earns nothing.
    is_closed = prediction in CLOSED_ANSWERS or gold in CLOSED_ANSWERS
    if rule in ("hotpot", "two_wiki") and is_closed and prediction != gold:
        return Score(em=em, f1=0.0, precision=0.0, recall=0.0)

    # Two empty sides agree.
    prediction_tokens = prediction.split()
    gold_tokens = gold.split()
    if rule in ("musique", "cover_em") and not (prediction_tokens and gold_tokens):
        agreement = float(prediction_tokens == gold_tokens)
        return Score(em=em, f1=agreement, precision=agreement, recall=agreement)

    shared = sum((Counter(prediction_tokens) & Counter(gold_tokens)).values())
    return _overlap(em, shared, len(prediction_tokens), len(gold_tokens))


def _overlap(em: float, shared: int, predicted: int, gold: int) -> Score:
    """Return the score if `shared` of the predicted items are among the gold ones."""
    if not shared:
        return Score(em=em, f1=0.0, precision=0.0, recall=0.0)
    precision = shared / predicted
    recall = shared / gold
    f1 = 2 * precision * recall / (precision + recall)
    return Score(em=em, f1=f1, precision=precision, recall=recall)
