"""Build indexes of passages on disk, and open them.

    build(folder, IndexSpec(kind="exact", corpus=(...), embedder=...), reporter)
    open_index(folder)

A build that was killed continues where it stopped, when it is started again.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mujica_jax.errors import UserError
from mujica_jax.retrieval.embedding.find import EmbedderFolder, find_embedder
from mujica_jax.retrieval.files import Skipped, describe_files
from mujica_jax.retrieval.manifest import (
    AUTO,
    PLAN,
    RECALL,
    Reporter,
    add_recall,
    building,
    commit,
    read_json,
    read_manifest,
    write_json,
)
from mujica_jax.retrieval.text.bm25 import Bm25Index, Tokeniser
from mujica_jax.retrieval.text.corpus import FILE, Index, PassageFile, stream_corpus, write_passages
from mujica_jax.retrieval.text.dense import DenseIndex, VectorSearch
from mujica_jax.retrieval.text.documents import DEFAULT_CHUNKING, Chunking, is_document
from mujica_jax.retrieval.text.recall import is_measured, measure_beside_exact
from mujica_jax.retrieval.text.scann import (
    ScannParameters,
    ScannSearch,
    parameters_for,
    write_scann,
)
from mujica_jax.retrieval.text.scann_package import ScannMissingError, package
from mujica_jax.retrieval.text.vectors import (
    PROGRESS,
    Embeddings,
    Storage,
    encode,
    encoded_rows,
    open_embeddings,
)
from mujica_jax.runtime.host_memory import available_bytes

# "auto" becomes "exact" or "scann", depending on the number of passages.
Kind = Literal["auto", "exact", "bm25", "scann"]

# A dense index of kind auto is exact up to this number of passages, and ScaNN above it.
MAX_EXACT_PASSAGES = 100_000
# Loading a ScaNN index may take this multiple of the size of its files: the files are read, and
# then copied into another layout.
LOADING_FACTOR = 2

# File that holds the number of passages and of skipped records.
COUNTS = "corpus.json"
BM25_FOLDER = "bm25"
SCANN_FOLDER = "scann"
# Keys of a plan on which embeddings depend. If a manifest has no prefixes, they follow from the
# embedder's name.
DENSE_PLAN = (
    *("corpus", "skip", "chunking", "embedder", "prefixes", "embedder_version", "dimension"),
    "storage",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """The sources and the settings of an index."""

    kind: Kind
    # Files of the corpus, local or in a bucket.
    corpus: tuple[str, ...] = ()
    # Directory of another index, whose passages and embeddings are used instead of a corpus.
    source: str | None = None
    # Leave out and count bad passages, instead of raising an error.
    skip: bool = False
    # Size of the passages that documents (PDF, HTML, Markdown, text) are cut into.
    chunking: Chunking = DEFAULT_CHUNKING
    # How text is split into words (kind bm25 only).
    tokeniser: Tokeniser = "default"
    # The model that embeds passages and queries (all kinds except bm25).
    embedder: EmbedderFolder | None = None
    # Number format of stored embeddings.
    storage: Storage = "bfloat16"
    # Recall target of approximate search on accelerators. None searches exactly (kind exact only).
    recall_target: float | None = None

    def plan(self) -> dict[str, Any]:
        """Return everything on which the content of the index depends. Raises UserError."""
        plan = self.plan_of_kind(self.kind)

        # If embeddings are taken from another index, its manifest says how they were made.
        if self.source is not None:
            source_manifest = read_manifest(self.source)
            if "embedder" not in source_manifest:
                raise UserError(
                    f"the index {self.source} is of kind {source_manifest['kind']} and has no "
                    "embeddings: give an index of kind exact or scann"
                )
            plan["prefixes"] = None
            for name in DENSE_PLAN:
                if name in source_manifest:
                    plan[name] = source_manifest[name]
            return plan

        plan["corpus"] = describe_files(self.corpus)
        plan["skip"] = self.skip
        if any(is_document(file) for file in self.corpus):
            plan["chunking"] = dataclasses.asdict(self.chunking)
        if self.embedder is None:
            plan["tokeniser"] = self.tokeniser
        else:
            plan["embedder"] = self.embedder.name
            plan["prefixes"] = self.embedder.prefixes
            plan["embedder_version"] = self.embedder.version
            plan["dimension"] = self.embedder.dimension
            plan["storage"] = self.storage
        return plan

    def plan_of_kind(self, kind: str) -> dict[str, Any]:
        """Return the part of the plan that depends on the kind."""
        plan: dict[str, Any] = {"kind": kind}
        if kind == "exact":
            plan["recall_target"] = self.recall_target
        return plan


def choose_kind(passages: int) -> tuple[Kind, str]:
    """Return the kind of a dense index of this number of passages, and a sentence that says why."""
    if passages <= MAX_EXACT_PASSAGES:
        reason = f"ScaNN above {MAX_EXACT_PASSAGES:,}; --kind scann builds a ScaNN index anyway"
        return "exact", f"{passages:,} passages: an exact index ({reason})"
    try:
        package()
    except ScannMissingError as missing:
        return "exact", (
            f"{passages:,} passages: an exact index, because {missing.reason}; for a ScaNN index, "
            f"{missing.advice}"
        )
    reason = f"exact up to {MAX_EXACT_PASSAGES:,}; --kind exact builds an exact index anyway"
    return "scann", f"{passages:,} passages: a ScaNN index ({reason})"


def build(folder: Path, spec: IndexSpec, reporter: Reporter) -> tuple[dict[str, Any], bool]:
    """Build an index. Return its manifest, and whether it was finished already.

    `folder` is the directory of the index. `reporter` shows the progress. Raises UserError.
    """
    plan = spec.plan()
    with building(folder, plan) as finished:
        manifest = read_manifest(folder) if finished else _build(folder, spec, plan, reporter)
        if manifest["kind"] == "scann" and not is_measured(manifest.get(RECALL)):
            manifest = _measure(folder, manifest, reporter)
        return manifest, finished


def _build(
    folder: Path, spec: IndexSpec, plan: dict[str, Any], reporter: Reporter
) -> dict[str, Any]:
    """Build all parts that earlier starts have not finished, and return the manifest."""
    start_time = time.monotonic()
    kind = read_json(folder / PLAN)["kind"]
    if kind == "scann":
        # Report a missing ScaNN package now, before hours of embedding.
        package()

    # Take passages and embeddings from another index, or read passages from the corpus.
    if spec.source is not None:
        _copy_source(Path(spec.source), folder)
    counts = _write_corpus(folder, spec, reporter)
    passages = PassageFile(folder / FILE)

    # Choose the kind only once and store it in plan.json, so that later starts continue with it.
    if kind == AUTO:
        kind, why = choose_kind(len(passages))
        reporter.line(why)
        plan = {**plan, **spec.plan_of_kind(kind)}
        write_json(folder / PLAN, plan)
    elif spec.kind == AUTO:
        reporter.line(f"{folder} was started as an index of kind {kind}; continuing with it")
        plan = {**plan, **spec.plan_of_kind(kind)}

    description: dict[str, Any] = {**plan, **counts}
    if kind == "bm25":
        with reporter.stage("indexing words", total=len(passages), unit="passages") as stage:
            index = Bm25Index(passages, spec.tokeniser, on_passages=stage.update)
            index.save(folder / BM25_FOLDER)
    else:
        embeddings = _embed(folder, passages, plan, spec, reporter)
        if kind == "scann":
            description["scann"] = _partition(folder, embeddings, reporter)
    # Duration of the last start of the build.
    description["seconds"] = round(time.monotonic() - start_time, 1)
    return commit(folder, description)


def open_index(
    folder: str | Path,
    embedder: str | None = None,
    prefixes: str | None = None,
    recall_target: float | None = None,
) -> Index:
    """Check all files of an index against their checksums, and open it. Raises UserError.

    `embedder` and `prefixes` say where the embedder is now, if it has moved since the build. It
    must be the same embedder. With a `recall_target` below 1, accelerators may search an index of
    kind exact approximately. The embeddings of an index of kind exact are loaded onto the devices
    of this process.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if "passages" not in manifest:
        raise UserError(
            f"the index {folder} is of kind {manifest['kind']} and holds no passages: give an "
            "index of kind bm25, exact or scann"
        )
    passages = PassageFile(folder / FILE)
    version = manifest["version"]
    if manifest["kind"] == "bm25":
        return Bm25Index.load(
            folder / BM25_FOLDER, passages, manifest["tokeniser"], version=version
        )

    embedder_folder = _embedder_of(folder, manifest, embedder, prefixes)
    if manifest["kind"] == "scann":
        if recall_target is not None:
            raise UserError(
                f"a recall target of {recall_target} is set, but the index {folder} is of kind "
                "scann, which does not use it: leave the recall target out"
            )
        vectors = _load_scann(folder, manifest, rows=len(passages))
    else:
        vectors = _load_exact(folder, manifest, rows=len(passages), recall_target=recall_target)
        if recall_target is not None:
            version += f"-{recall_target}"
    return DenseIndex(passages, embedder_folder.load(), vectors, version=version)


def _embedder_of(
    folder: Path, manifest: Mapping[str, Any], name: str | None, prefixes: str | None
) -> EmbedderFolder:
    """Return the embedder for queries to an index.

    Raises UserError if the passages of the index were embedded with another embedder.
    """
    embedder_name = manifest["embedder"] if name is None else name
    embedder_prefixes = manifest.get("prefixes") if prefixes is None else prefixes
    try:
        embedder = find_embedder(embedder_name, embedder_prefixes)
    except UserError as error:
        raise UserError(
            f"the index {folder} was built with the embedder {manifest['embedder']}, but {error}"
        ) from error
    check_embedder(folder, manifest, embedder)
    return embedder


def _load_scann(folder: Path, manifest: Mapping[str, Any], rows: int) -> ScannSearch:
    """Load the ScaNN files of an index. Raises UserError with advice if ScaNN is missing."""
    try:
        return ScannSearch.load(folder / SCANN_FOLDER, rows, ScannParameters(**manifest["scann"]))
    except ScannMissingError as missing:
        raise UserError(
            f"the index {folder} is of kind scann, but {missing.reason}: build an exact index of "
            f"its embeddings (`python -m mujica_jax.index build --embeddings {folder} --kind "
            f"exact --out DIR`), or {missing.advice}"
        ) from missing


def _load_exact(
    folder: Path, manifest: Mapping[str, Any], rows: int, recall_target: float | None
) -> VectorSearch:
    """Put the embeddings of an index on the devices of this process.

    Raises UserError if they do not fit there.
    """
    from mujica_jax.retrieval.text import exact

    if recall_target is None:
        recall_target = manifest["recall_target"]
    embeddings = open_embeddings(folder, rows, manifest["dimension"], manifest["storage"])

    devices = exact.rows_mesh().size
    needed_bytes = exact.device_bytes(rows, embeddings.row_bytes, devices)
    free_bytes = exact.free_device_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        raise UserError(
            f"the index {folder} of kind exact needs {needed_bytes / 1e9:.1f} GB on each of "
            f"{devices} devices, but {free_bytes / 1e9:.1f} GB are free: run `python -m "
            "mujica_jax.index serve` on a machine with more memory and give its address as the "
            f"index, or build one of kind scann (`build --embeddings {folder} --kind scann`)"
        )
    return exact.ExactSearch(embeddings, recall_target=recall_target)


def read_kind(folder: str | Path) -> str:
    """Return the kind of the index in a directory, without a check of its files."""
    return read_manifest(folder, check=False)["kind"]


def check_embedder(folder: Path, manifest: Mapping[str, Any], embedder: EmbedderFolder) -> None:
    """Raise UserError unless `embedder` is the one that embedded the index's passages."""
    current = {"dimension": embedder.dimension, "embedder_version": embedder.version}
    for name, current_value in current.items():
        if manifest[name] != current_value:
            property_name = name.removeprefix("embedder_")
            raise UserError(
                f"the index {folder} was built with the embedder {manifest['embedder']} "
                f"({property_name} {manifest[name]}), but the embedder {embedder.name} has "
                f"{property_name} {current_value}: give the embedder of the build, with its "
                "prefixes, or build the index again"
            )


def _write_corpus(folder: Path, spec: IndexSpec, reporter: Reporter) -> dict[str, Any]:
    """Write the corpus as an Arrow file, and return the counts of passages and skipped records.

    The counts are written before the Arrow file gets its final name. If the file exists, so do they.
    """
    if (folder / FILE).exists():
        return read_json(folder / COUNTS)

    unfinished = folder / f".{FILE}.new"
    skipped = Skipped()
    with reporter.stage("reading the corpus", unit="passages") as stage:
        passages = stream_corpus(spec.corpus, skipped if spec.skip else None, spec.chunking)
        rows = write_passages(passages, unfinished, on_rows=stage.update)
    if rows == 0:
        raise UserError(
            f"{', '.join(spec.corpus)}: there is no passage in it; give a corpus with at least one"
        )
    counts = {"passages": rows, **dataclasses.asdict(skipped)}
    write_json(folder / COUNTS, counts)
    unfinished.replace(folder / FILE)
    return counts


def _embed(
    folder: Path,
    passages: PassageFile,
    plan: Mapping[str, Any],
    spec: IndexSpec,
    reporter: Reporter,
) -> Embeddings:
    """Embed all passages that earlier starts have not embedded, and return all embeddings."""
    if encoded_rows(folder) == len(passages):
        # Everything is embedded already, so the embedder need not be loaded.
        return open_embeddings(folder, len(passages), plan["dimension"], plan["storage"])
    assert spec.embedder is not None, "embeddings taken from another index are complete"
    with reporter.stage("embedding", total=len(passages), unit="passages") as stage:
        embedder = spec.embedder.load(_data_mesh())
        return encode(passages, embedder, folder, storage=spec.storage, on_rows=stage.update)


def _partition(folder: Path, embeddings: Embeddings, reporter: Reporter) -> dict[str, Any]:
    """Build the ScaNN files, and return their parameters.

    The files are written into a temporary folder, which gets its final name when all are complete.
    A killed build continues in the temporary folder.
    """
    parameters = parameters_for(len(embeddings), of_length_1=embeddings.of_length_1())
    unfinished = folder / f".{SCANN_FOLDER}.new"
    if not (folder / SCANN_FOLDER).exists():
        with reporter.stage(
            "building ScaNN's partitions", total=len(embeddings), unit="passages"
        ) as stage:
            index = write_scann(embeddings, parameters, unfinished, on_rows=stage.update)
            index.replace(folder / SCANN_FOLDER)
    shutil.rmtree(unfinished, ignore_errors=True)
    return dataclasses.asdict(parameters)


def _measure(folder: Path, manifest: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Measure the recall of a finished ScaNN index, compared with exact search.

    Return the manifest with the recall, and write it to disk. The index is already finished, so a
    host with too little memory for the measurement can still build it. If the recall cannot be
    measured, the returned manifest has the reason in its place. It is not written to disk, so that
    the next start of the build tries again.
    """
    file_bytes = sum(path.stat().st_size for path in (folder / SCANN_FOLDER).iterdir())
    needed_bytes = LOADING_FACTOR * file_bytes
    free_bytes = available_bytes()
    if needed_bytes > free_bytes:
        reason = (
            f"loading the index may take {needed_bytes / 1e9:.1f} GB of memory, but "
            f"{free_bytes / 1e9:.1f} GB are free"
        )
        return {**manifest, RECALL: {"unmeasured": reason}}
    embeddings = open_embeddings(
        folder, manifest["passages"], manifest["dimension"], manifest["storage"]
    )
    try:
        search = ScannSearch.load(
            folder / SCANN_FOLDER, len(embeddings), ScannParameters(**manifest["scann"])
        )
    except ScannMissingError as missing:
        return {**manifest, RECALL: {"unmeasured": missing.reason}}
    with reporter.stage("measuring recall", total=len(embeddings), unit="passages") as stage:
        recall = measure_beside_exact(search, embeddings, on_rows=stage.update)
    return add_recall(folder, manifest, recall)


def _copy_source(source: Path, folder: Path) -> None:
    """Put the passages and embeddings of another index into this one.

    Files are linked, or copied if the file system has no hard links. The counts come before the
    passages, because `_write_corpus` expects them if the passages exist.
    """
    paths = [*source.glob("embeddings.*"), source / PROGRESS, source / COUNTS, source / FILE]
    for path in paths:
        target = folder / path.name
        if target.exists():
            continue
        unfinished = folder / f".{path.name}.new"
        unfinished.unlink(missing_ok=True)
        try:
            os.link(path, unfinished)
        except OSError:
            shutil.copyfile(path, unfinished)
        unfinished.replace(target)


def _data_mesh() -> Any:
    """Return a mesh of all devices of this process, each of which embeds a part of a batch.

    Return None if there is only one device.
    """
    import jax

    from mujica_jax.models.sharding import make_mesh

    devices = jax.local_devices()
    if len(devices) == 1:
        return None
    return make_mesh(data=len(devices), fsdp=1, tensor=1, devices=devices)
