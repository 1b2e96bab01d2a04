"""Read passages from documents: text, Markdown, HTML and PDF files.

A document is cut into chunks of about `chunk_tokens` tokens. A chunk ends at the end of a sentence
where that is possible. Neighbouring chunks share about `overlap_tokens` tokens, so that a sentence at
the border is searched together with the text around it. Each chunk becomes one passage with the
title of its document.

A token is a word, a punctuation mark, or one character of a script that is written without spaces.
The tokenizer of an embedder makes about a third more tokens of the same English text.

| suffix | text | title |
|---|---|---|
| `.txt` | the file | name of the file |
| `.md`, `.markdown` | the file without link targets and marks of emphasis | first heading |
| `.html`, `.htm` | visible text, without navigation and scripts | `<title>`, or first heading |
| `.pdf` | text of all pages | title in the file's metadata |

Without a title in the document, the name of the file is the title. PDF files need the package
pypdf, and HTML files beautifulsoup4 (both in the extra `documents`).
"""

import dataclasses
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import open_file
from mujica_jax.runtime.extras import import_extra

TEXT_SUFFIXES = (".txt",)
MARKDOWN_SUFFIXES = (".md", ".markdown")
HTML_SUFFIXES = (".html", ".htm")
PDF_SUFFIXES = (".pdf",)
SUFFIXES = (*TEXT_SUFFIXES, *MARKDOWN_SUFFIXES, *HTML_SUFFIXES, *PDF_SUFFIXES)
# Elements of a page that hold no text of the document.
HIDDEN_ELEMENTS = ("script", "style", "noscript", "template", "nav", "header", "footer", "aside")
# The file of passages in the folder of a BEIR data set.
BEIR_CORPUS = "corpus.jsonl"
# How much of a file is read to see how it begins.
BEGINNING_BYTES = 1024
# What a user without the extra `documents` can also do.
SKIP = ", or leave the file out with --skip"

# Characters of scripts without spaces between words: Chinese, Japanese, Thai, Lao, Khmer, Burmese.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_token = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")
# The end of a sentence: its mark with the spaces behind it, or an empty line.
_sentence_end = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n\s*\n")
_heading = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
_markdown_link = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_markdown_marks = re.compile(r"(\*\*|__|`+|^#{1,6}\s+|^>\s?)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunking:
    """The size of the chunks that documents are cut into, in tokens."""

    chunk_tokens: int = 200
    overlap_tokens: int = 40

    def check(self) -> None:
        """Raise UserError unless chunks are longer than what they share."""
        if self.chunk_tokens < 1 or not 0 <= self.overlap_tokens < self.chunk_tokens:
            raise UserError(
                f"--chunk-tokens is {self.chunk_tokens} and --chunk-overlap is "
                f"{self.overlap_tokens}: give a positive number of tokens and a smaller overlap"
            )


DEFAULT_CHUNKING = Chunking()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """The text of a document, and its title."""

    title: str
    text: str


def is_document(path: str | PurePath) -> bool:
    """Return whether a file is a document, by its name.

    A local `.txt` file that begins like JSON is not. It holds records of passages, one in each line.
    """
    name = str(path).lower()
    if not name.endswith(SUFFIXES):
        return False
    return not (name.endswith(TEXT_SUFFIXES) and _begins_like_json(Path(path)))


def _begins_like_json(path: Path) -> bool:
    """Return whether the first character of a file opens an object or a list."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(BEGINNING_BYTES)
    return beginning.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def corpus_files(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the files of a corpus. A folder stands for the documents inside of it, at any depth.

    A folder with a file `corpus.jsonl`, as BEIR's data sets have it, stands for that file. Raises
    UserError for a folder without documents.
    """
    files: list[str] = []
    for path in paths:
        folder = Path(path)
        if "://" in path or not folder.is_dir():
            files.append(path)
        elif (folder / BEIR_CORPUS).is_file():
            files.append(str(folder / BEIR_CORPUS))
        else:
            files += _documents_of(folder)
    return tuple(files)


def _documents_of(folder: Path) -> list[str]:
    all_files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    visible_files = [
        path
        for path in all_files
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    documents = [str(path) for path in visible_files if is_document(path)]
    if not documents:
        content = "is empty"
        if visible_files:
            names = ", ".join(path.name for path in visible_files[:3])
            content = f"holds no document ({names}{', ...' if len(visible_files) > 3 else ''})"
        raise UserError(
            f"--corpus {folder} {content}: give a folder with files {', '.join(SUFFIXES)}, or name "
            "files of passages"
        )
    return documents


def document_records(path: str | Path, chunking: Chunking) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the fields (id, title, text) of each chunk of a document.

    Raises UserError if the document cannot be read or holds no text.
    """
    document = read_document(path)
    chunks = chunks_of(document.text, chunking)
    for number, chunk in enumerate(chunks, start=1):
        record = {"id": f"{path}#{number}", "title": document.title, "text": chunk}
        yield f"{path}, chunk {number}", record


def read_document(path: str | Path) -> Document:
    """Return the text and the title of a document. Raises UserError."""
    name = str(path).lower()
    try:
        with open_file(path) as file:
            data = file.read()
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}): check its permissions") from error

    if name.endswith(PDF_SUFFIXES):
        document = _read_pdf(path, data)
    elif name.endswith(HTML_SUFFIXES):
        document = _read_html(path, data)
    elif name.endswith(MARKDOWN_SUFFIXES):
        document = _read_markdown(path, data)
    else:
        document = Document(title="", text=_decoded(path, data))

    text = document.text.strip()
    if not text:
        raise UserError(f"{path} holds no text: remove it, or leave it out with --skip")
    title = " ".join(document.title.split()) or PurePath(str(path)).stem
    return Document(title=title, text=_without_title_line(text, title))


def _without_title_line(text: str, title: str) -> str:
    """Return the text without its first line if that is the title, unless nothing else is there.

    A passage is shown and searched together with its title, so the line would stand there twice.
    """
    first_line, _, rest = text.partition("\n")
    if " ".join(first_line.split()).casefold() == title.casefold() and rest.strip():
        return rest.strip()
    return text


def _decoded(path: str | Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error


def _read_markdown(path: str | Path, data: bytes) -> Document:
    text = _decoded(path, data)
    heading = _heading.search(text)
    plain = _markdown_marks.sub("", _markdown_link.sub(r"\1", text))
    return Document(title=heading[1] if heading else "", text=plain)


def _read_html(path: str | Path, data: bytes) -> Document:
    bs4 = import_extra("bs4", f"{path} is HTML and", extra="documents", otherwise=SKIP)
    page = bs4.BeautifulSoup(data, "html.parser")
    heading = page.title or page.find("h1")
    title = heading.get_text() if heading else ""
    for element in page(HIDDEN_ELEMENTS):
        element.decompose()
    if page.head:
        page.head.decompose()
    lines = (line.strip() for line in page.get_text("\n").splitlines())
    return Document(title=title, text="\n".join(line for line in lines if line))


def _read_pdf(path: str | Path, data: bytes) -> Document:
    pypdf = import_extra("pypdf", f"{path} is a PDF and", extra="documents", otherwise=SKIP)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        pages = [page.extract_text() for page in reader.pages]
        title = str((reader.metadata.title if reader.metadata else "") or "")
    # pypdf has no common class for its own errors and those that damaged files cause.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path} cannot be read as a PDF ({reason}): check that it opens without a password, or "
            "leave it out with --skip"
        ) from error
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise UserError(
            f"{path} has {len(pages)} pages and no text in them (a scan?): recognise its text first "
            "(OCR), or leave it out with --skip"
        )
    return Document(title=title, text=text)


def chunks_of(text: str, chunking: Chunking) -> list[str]:
    """Return the chunks of a text, in order.

    A chunk is a run of whole sentences of at most `chunk_tokens` tokens. A longer sentence is cut
    between tokens. The next chunk begins with the last whole sentences of the one before that have at
    most `overlap_tokens` tokens together.
    """
    sentences = [
        piece
        for sentence in _sentence_end.split(text)
        for piece in _pieces(" ".join(sentence.split()), chunking.chunk_tokens)
    ]
    sizes = [len(_token.findall(sentence)) for sentence in sentences]

    chunks: list[str] = []
    start = 0
    end = 0
    size = 0
    while end < len(sentences):
        if end > start and size + sizes[end] > chunking.chunk_tokens:
            chunks.append(" ".join(sentences[start:end]))
            # Go back over the sentences that the next chunk shares with this one. It must begin later
            # than this one, and have room for the sentence that did not fit.
            room = min(chunking.overlap_tokens, chunking.chunk_tokens - sizes[end])
            first_start = start + 1
            start = end
            size = 0
            while start > first_start and size + sizes[start - 1] <= room:
                start -= 1
                size += sizes[start]
        size += sizes[end]
        end += 1
    if start < end:
        chunks.append(" ".join(sentences[start:end]))
    return chunks


def _pieces(sentence: str, max_tokens: int) -> Iterator[str]:
    """Yield a sentence in pieces of at most `max_tokens` tokens. An empty sentence has none."""
    tokens = list(_token.finditer(sentence))
    for first in range(0, len(tokens), max_tokens):
        last = min(first + max_tokens, len(tokens)) - 1
        end = tokens[last + 1].start() if last + 1 < len(tokens) else len(sentence)
        yield sentence[tokens[first].start() : end].strip()
