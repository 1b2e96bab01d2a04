"""The official files of each question set: their names, origin, size and download addresses."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfficialFiles:
    """The official files of one question set."""

    # Names of the files.
    names: tuple[str, ...]
    # Where the files come from, in words.
    origin: str
    # Address of the page from which they can be downloaded.
    page: str
    # Approximate size of all files together.
    size: str
    # Names of further files that are also read if they are in the same folder.
    optional: str = ""

    @property
    def summary(self) -> str:
        """The names of the files and their origin, for messages."""
        return f"{' and '.join(self.names)} from {self.origin}"


OFFICIAL_FILES: Mapping[str, OfficialFiles] = {
    "two_wiki": OfficialFiles(
        names=("train.json", "dev.json"),
        origin="2WikiMultihopQA's repository (data_ids.zip)",
        page="https://github.com/Alab-NII/2wikimultihop",
        size="0.8 GB",
        optional="id_aliases.json of the same archive, triples*.tsv, corpus*.json[l]",
    ),
    "hotpotqa": OfficialFiles(
        names=("hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"),
        origin="HotpotQA's page",
        page="https://hotpotqa.github.io",
        size="0.6 GB",
    ),
    "musique": OfficialFiles(
        names=("musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl"),
        origin="MuSiQue's repository",
        page="https://github.com/StonyBrookNLP/musique",
        size="0.3 GB",
    ),
    "qald10": OfficialFiles(
        names=("qald_10.json",),
        origin="KGQA/QALD-10",
        page="https://github.com/KGQA/QALD-10",
        size="1 MB",
    ),
    "nq": OfficialFiles(
        names=("NQ-open.train.jsonl", "NQ-open.dev.jsonl"),
        origin="google-research-datasets/natural-questions",
        page="https://github.com/google-research-datasets/natural-questions",
        size="9 MB",
    ),
    "triviaqa": OfficialFiles(
        names=("unfiltered-web-train.json", "unfiltered-web-dev.json"),
        origin="TriviaQA's page",
        page="https://nlp.cs.washington.edu/triviaqa",
        size="0.6 GB as an archive",
    ),
    "popqa": OfficialFiles(
        names=("popQA.tsv",),
        origin="AlexTMallen/adaptive-retrieval",
        page="https://github.com/AlexTMallen/adaptive-retrieval",
        size="a few MB",
    ),
    "ambigqa": OfficialFiles(
        names=("train_light.json", "dev_light.json"),
        origin="AmbigQA's page",
        page="https://nlp.cs.washington.edu/ambigqa",
        size="1 MB as an archive",
    ),
    "bamboogle": OfficialFiles(
        names=("Bamboogle Prerelease.csv",),
        origin="ofirpress/self-ask",
        page="https://github.com/ofirpress/self-ask",
        size="10 kB",
    ),
}

_HOTPOT = "http://curtis.ml.cmu.edu/datasets/hotpot"
_NQ = (
    "https://raw.githubusercontent.com/google-research-datasets/natural-questions/"
    "a7a113c9fdc2d9986d624bd43b8a18d6d5779eaa/nq_open"
)
_TRIVIA = "http://nlp.cs.washington.edu/triviaqa/data/triviaqa-unfiltered.tar.gz"
_AMBIG = "https://nlp.cs.washington.edu/ambigqa/data/ambignq_light.zip"

# (address, member) by kind and split. If the address is an archive, `member` is the name of the file
# in it. Otherwise `member` is empty. Only files with a known checksum (open_domain/checksums.tsv) are
# downloaded.
DOWNLOADS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "hotpotqa": {
        "train": (f"{_HOTPOT}/hotpot_train_v1.1.json", ""),
        "validation": (f"{_HOTPOT}/hotpot_dev_distractor_v1.json", ""),
    },
    "nq": {
        "train": (f"{_NQ}/NQ-open.train.jsonl", ""),
        "validation": (f"{_NQ}/NQ-open.dev.jsonl", ""),
    },
    "triviaqa": {
        "train": (_TRIVIA, "unfiltered-web-train.json"),
        "validation": (_TRIVIA, "unfiltered-web-dev.json"),
    },
    "ambigqa": {
        "train": (_AMBIG, "train_light.json"),
        "validation": (_AMBIG, "dev_light.json"),
    },
}
