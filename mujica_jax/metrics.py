"""Answer scores with the rules of the official scripts, and bootstrap intervals for their means.

| rule | official script | special behaviour |
|---|---|---|
| `hotpot` | `hotpot_evaluate_v1.py` | F1 is 0 if only one of the two is yes, no or noanswer |
| `two_wiki` | `2wikimultihop_evaluate_v1.1.py` | as `hotpot`, with aliases of the gold answer |
| `musique` | MuSiQue `metrics/answer.py` | token F1; F1 is 1 if both answers are empty |
| `triviaqa` | `triviaqa_evaluation.py` | punctuation becomes a space instead of being removed |
| `cover_em` | open-domain QA papers | EM is 1 if the prediction contains a gold; F1 as `musique` |

With several gold answers, EM, F1, precision and recall are each the maximum over the gold answers.
The official scripts of 2WikiMultihopQA, MuSiQue and TriviaQA do the same. The HotpotQA script reads
only one gold answer; here the maximum is taken over its formula too. The scripts of `musique`,
`triviaqa` and `cover_em` print no precision or recall. Here both are the values that enter F1.

Two steps go beyond the official scripts. They do not change the scores of ordinary answers.

- Letters that Unicode can write in several ways are composed first (NFC). A single "é" then equals
  an "e" followed by a combining accent.
- Normalisation removes everything from some gold answers, for example "The The", "A" or "!". They
  are compared as written, without regard to case and spaces. Otherwise every prediction would
  contain them.
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

# The rules hotpot and two_wiki give no partial credit if one of the answers is in this set.
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
TRIVIAQA_PUNCTUATION = string.punctuation + "‘’´`"

_articles = re.compile(r"\b(a|an|the)\b")
_delete_punctuation = str.maketrans("", "", string.punctuation)
_space_punctuation = str.maketrans({mark: " " for mark in TRIVIAQA_PUNCTUATION})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The four scores of an answer, each between 0 and 1. `em` is the exact match."""

    em: float
    f1: float
    precision: float
    recall: float


def score(prediction: str | None, golds: Sequence[str], rule: Rule) -> Score:
    """Return the score of a prediction against one or more gold answers.

    A prediction of None, which means no answer, scores zero.
    """
    if not golds:
        raise ValueError("score needs at least one gold answer and got none")
    if prediction is None:
        return Score(em=0.0, f1=0.0, precision=0.0, recall=0.0)
    normalise = normalise_triviaqa if rule == "triviaqa" else normalise_squad
    answer = normalise(prediction)
    scores: list[Score] = []
    for gold in golds:
        normalised_gold = normalise(gold)
        # Official scripts also score a gold answer that is empty from the start.
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
    """Return the AmbigQA score of a prediction for a question with several gold answers.

    The prediction lists its answers with semicolons between them. This separator is a convention of
    this package. A predicted answer matches at most one gold answer, by exact match with an alias
    of it. The result is the score of the annotation with the highest F1, as in
    `ambigqa_evaluate_script.py`. `answer_sets` is nested: annotations, answers, aliases.
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

    It is the harmonic mean of the mean precision and the mean recall over the questions. A question
    without a predicted answer has precision 1 and recall 0. The ordinary macro F1 differs: it is
    the mean of the F1 of each question.
    """
    precisions = [
        score.precision if is_answered else 1.0
        for score, is_answered in zip(scores, answered, strict=True)
    ]
    precision = sum(precisions) / len(precisions)
    recall = sum(score.recall for score in scores) / len(scores)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def supporting(titles: Collection[str], gold_titles: Collection[str]) -> Score:
    """Return HotpotQA's score for supporting facts (`update_sp` in its script).

    Passages are compared by title. `gold_titles` must contain at least one title.
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

    Each value must be between 0 and 1. Raises ValueError if there are no values.
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

    `first` and `second` hold one score between 0 and 1 for each question, in the same order. The
    three results are:

    - the mean of `second` minus the mean of `first`, in percentage points;
    - the 95% percentile-bootstrap interval of this difference over the questions;
    - the share of resamples in which the difference is zero or negative, between 0 and 1.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(
            "paired_bootstrap needs the same number of scores, at least one, from both systems and "
            f"got {len(first)} and {len(second)}"
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
    """Return the text after SQuAD's normalisation, which most scripts share.

    It makes the text lower case, removes ASCII punctuation and articles, and leaves single spaces.
    """
    return " ".join(_articles.sub(" ", _lower(text).translate(_delete_punctuation)).split())


def normalise_triviaqa(text: str) -> str:
    """Return the text after TriviaQA's normalisation, which turns punctuation into spaces."""
    return " ".join(_articles.sub(" ", _lower(text).translate(_space_punctuation)).split())


def _lower(text: str) -> str:
    """Return the text in lower case and in Unicode form NFC.

    NFC comes second because making a letter lower case can decompose it.
    """
    return unicodedata.normalize("NFC", text.lower())


def _as_written(text: str) -> str:
    """Return the text in lower case with single spaces.

    It replaces the full normalisation where that would leave nothing of an answer.
    """
    return " ".join(_lower(text).split())


def _score_normalised(prediction: str, gold: str, rule: Rule) -> Score:
    """Return the score of a normalised prediction against one normalised gold answer."""
    em = float(gold in prediction if rule == "cover_em" else gold == prediction)

    # There is no partial credit for yes, no or noanswer.
    is_closed = prediction in CLOSED_ANSWERS or gold in CLOSED_ANSWERS
    if rule in ("hotpot", "two_wiki") and is_closed and prediction != gold:
        return Score(em=em, f1=0.0, precision=0.0, recall=0.0)

    # Two empty answers agree.
    prediction_tokens = prediction.split()
    gold_tokens = gold.split()
    if rule in ("musique", "cover_em") and not (prediction_tokens and gold_tokens):
        agreement = float(prediction_tokens == gold_tokens)
        return Score(em=em, f1=agreement, precision=agreement, recall=agreement)

    shared = sum((Counter(prediction_tokens) & Counter(gold_tokens)).values())
    return _overlap(em, shared, len(prediction_tokens), len(gold_tokens))


def _overlap(em: float, shared: int, predicted: int, gold: int) -> Score:
    """Return the score for exact match `em` and the sizes of two sets of items.

    `predicted` and `gold` count the items of each set, and `shared` the items in both.
    """
    if not shared:
        return Score(em=em, f1=0.0, precision=0.0, recall=0.0)
    precision = shared / predicted
    recall = shared / gold
    f1 = 2 * precision * recall / (precision + recall)
    return Score(em=em, f1=f1, precision=precision, recall=recall)
