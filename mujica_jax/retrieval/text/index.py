"""Indexes on disk: built of a corpus, opened again as what they are.

build(folder, kind="exact", corpus=[...], embedder=...)    a killed build goes on where it was
open_index(folder)
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

Kind = Literal["auto", "exact", "bm25", "scann"]  # auto: exact or scann, by the number of passages

# A dense index of kind auto is exact up to this many passages and ScaNN above it.
MAX_EXACT_PASSAGES = 100_000
# Memory that loading a ScaNN index may take, as a multiple of its files: they are read and then
# laid out anew.
LOADING_FACTOR = 2

COUNTS = "corpus.json"
BM25_FOLDER = "bm25"
SCANN_FOLDER = "scann"
# What embeddings depend on. A manifest without prefixes means those that follow from the embedder's
# name.
DENSE_PLAN = ("corpus", "skip", "embedder", "prefixes", "embedder_version", "dimension", "storage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """The sources and the settings of an index."""

    kind: Kind
    corpus: tuple[str, ...] = ()
    # an index whose passages and embeddings are taken, instead of a corpus and an embedder
    source: str | None = None
    skip: bool = False  # leave out bad passages and count them, instead of refusing the corpus
    tokeniser: Tokeniser = "default"  # bm25 only
    embedder: EmbedderFolder | None = None  # all others
    storage: Storage = "bfloat16"
    recall_target: float | None = None  # exact only: search approximately

    def plan(self) -> dict[str, Any]:
        """Return everything that the content of the index depends on."""
        plan = self.plan_of_kind(self.kind)

        # Another index decides how its passages were embedded.
        if self.source is not None:
            source_manifest = read_manifest(self.source)
            if "embedder" not in source_manifest:
                raise UserError(
                    f"the index {self.source} is of kind {source_manifest['kind']} and has no "
                    "embeddings: give a dense one"
                )
            plan["prefixes"] = None
            for name in DENSE_PLAN:
                if name in source_manifest:
                    plan[name] = source_manifest[name]
            return plan

        plan["corpus"] = describe_files(self.corpus)
        plan["skip"] = self.skip
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
        """Return the part of the plan that the kind decides."""
        plan: dict[str, Any] = {"kind": kind}
        if kind == "exact":
            plan["recall_target"] = self.recall_target
        return plan


def choose_kind(passages: int) -> tuple[Kind, str]:
    """Return the kind of a dense index of this many passages, and the sentence that says why."""
    if passages <= MAX_EXACT_PASSAGES:
        reason = f"ScaNN above {MAX_EXACT_PASSAGES:,}; --kind scann builds the other"
        return "exact", f"{passages:,} passages: an exact index ({reason})"
    try:
        package()
    except ScannMissingError as missing:
        return "exact", f"{passages:,} passages: an exact index, because {missing.reason}"
    reason = f"exact up to {MAX_EXACT_PASSAGES:,}; --kind exact builds the other"
    return "scann", f"{passages:,} passages: a ScaNN index ({reason})"


def build(folder: Path, spec: IndexSpec, reporter: Reporter) -> tuple[dict[str, Any], bool]:
    """Return the manifest, and whether the index was there already."""
    plan = spec.plan()
    with building(folder, plan) as finished:
        manifest = read_manifest(folder) if finished else _build(folder, spec, plan, reporter)
        if manifest["kind"] == "scann" and not is_measured(manifest.get(RECALL)):
            manifest = _measure(folder, manifest, reporter)
        return manifest, finished


def _build(
    folder: Path, spec: IndexSpec, plan: dict[str, Any], reporter: Reporter
) -> dict[str, Any]:
    """Build what an earlier start left undone, and return the manifest."""
    start_time = time.monotonic()
    kind = read_json(folder / PLAN)["kind"]
    if kind == "scann":
        # A missing ScaNN is reported before hours of embedding.
        package()

    # Get passages, and maybe embeddings, from another index or from the corpus.
    if spec.source is not None:
        _copy_source(Path(spec.source), folder)
    counts = _write_corpus(folder, spec, reporter)
    passages = PassageFile(folder / FILE)

    # The kind is chosen once: from here on plan.json has it, whatever a later start would choose.
    if kind == AUTO:
        kind, why = choose_kind(len(passages))
        reporter.line(why)
        plan = {**plan, **spec.plan_of_kind(kind)}
        write_json(folder / PLAN, plan)
    elif spec.kind == AUTO:
        reporter.line(f"{folder} was begun as an index of kind {kind} and continues as one")
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
    description["seconds"] = round(time.monotonic() - start_time, 1)  # of the last start
    return commit(folder, description)


def open_index(
    folder: str | Path,
    embedder: str | None = None,
    prefixes: str | None = None,
    recall_target: float | None = None,
) -> Index:
    """Open an index after every file of it was compared with its checksum.

    `embedder` and `prefixes` replace those that the index was built with; the embedder must be the
    same one. `recall_target` below 1 lets the accelerator search approximately. Rows of kind exact
    lie on the devices of this process.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if "passages" not in manifest:
        raise UserError(
            f"the index {folder} is of kind {manifest['kind']} and holds no passages: give one "
            "that does"
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
                f"a recall target is given and the index {folder} is of kind scann, which has its "
                "own: leave it out"
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
    """Return the embedder of an index's queries.

    Raises UserError if the index's passages were embedded with another one.
    """
    embedder_name = manifest["embedder"] if name is None else name
    embedder_prefixes = manifest.get("prefixes") if prefixes is None else prefixes
    try:
        embedder = find_embedder(embedder_name, embedder_prefixes)
    except UserError as error:
        raise UserError(
            f"the index {folder} was built with {manifest['embedder']}, and {error}"
        ) from error
    check_embedder(folder, manifest, embedder)
    return embedder


def _load_scann(folder: Path, manifest: Mapping[str, Any], rows: int) -> ScannSearch:
    """Load ScaNN's files of an index. Say what to do instead where ScaNN is missing."""
    try:
        return ScannSearch.load(folder / SCANN_FOLDER, rows, ScannParameters(**manifest["scann"]))
    except ScannMissingError as missing:
        raise UserError(
            f"the index {folder} is of kind scann and {missing.reason}: build an exact one of "
            f"its embeddings (`python -m mujica_jax.index build --embeddings {folder} --kind "
            "exact --out DIR`), or open it on Linux x86-64"
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
            f"the index {folder} of kind exact takes {needed_bytes / 1e9:.1f} GB on each of "
            f"{devices} devices and {free_bytes / 1e9:.1f} are free: let `python -m "
            "mujica_jax.index serve` search it on a machine that holds it and give the address as "
            f"the index, or build one of kind scann (`build --embeddings {folder} --kind scann`)"
        )
    return exact.ExactSearch(embeddings, recall_target=recall_target)


def read_kind(folder: str | Path) -> str:
    """Return the kind of the index in a directory. Its files are not checked."""
    return read_manifest(folder, check=False)["kind"]


def check_embedder(folder: Path, manifest: Mapping[str, Any], embedder: EmbedderFolder) -> None:
    """Check that queries are embedded as the passages were."""
    current = {"dimension": embedder.dimension, "embedder_version": embedder.version}
    for name, current_value in current.items():
        if manifest[name] != current_value:
            property_name = name.removeprefix("embedder_")
            raise UserError(
                f"the index {folder} was built with the embedder {manifest['embedder']} "
                f"({property_name} {manifest[name]}) and the embedder {embedder.name} has "
                f"{property_name} {current_value}: name the one it was built with, its prefixes "
                "as well, or build it again"
            )


def _write_corpus(folder: Path, spec: IndexSpec, reporter: Reporter) -> dict[str, Any]:
    """Write the corpus as an Arrow file, and return its counts.

    The counts are written before the file takes its name.
    """
    if (folder / FILE).exists():
        return read_json(folder / COUNTS)

    unfinished = folder / f".{FILE}.new"
    skipped = Skipped()
    with reporter.stage("reading the corpus", unit="passages") as stage:
        passages = stream_corpus(spec.corpus, skipped if spec.skip else None)
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
    """Embed the passages that an earlier start left, and return all embeddings."""
    if encoded_rows(folder) == len(passages):
        # The embedder need not be loaded.
        return open_embeddings(folder, len(passages), plan["dimension"], plan["storage"])
    assert spec.embedder is not None, "what is taken from another index is whole"
    with reporter.stage("embedding", total=len(passages), unit="passages") as stage:
        embedder = spec.embedder.load(_data_mesh())
        return encode(passages, embedder, folder, storage=spec.storage, on_rows=stage.update)


def _partition(folder: Path, embeddings: Embeddings, reporter: Reporter) -> dict[str, Any]:
    """Build ScaNN's files, and return their parameters.

    The folder takes its name when all files are written. Until then a killed build continues them.
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
    """Measure the recall of a finished ScaNN index beside exact search.

    Return the manifest with the recall, which is also written to disk. This comes last, when the
    index is already whole, so a host that cannot hold the index in memory has built it too. If it
    cannot be measured, the reason is returned in place of the recall and not written, so that the
    next start of the build tries again.
    """
    file_bytes = sum(path.stat().st_size for path in (folder / SCANN_FOLDER).iterdir())
    needed_bytes = LOADING_FACTOR * file_bytes
    free_bytes = available_bytes()
    if needed_bytes > free_bytes:
        reason = (
            f"loading the index may take {needed_bytes / 1e9:.1f} GB of memory and "
            f"{free_bytes / 1e9:.1f} are free"
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

    They are linked, not copied, where the file system can. Counts come before passages.
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
    """Return a mesh on which each device of this process embeds its share of a batch.

    It is None for a single device.
    """
    import jax

    from mujica_jax.models.sharding import make_mesh

    devices = jax.local_devices()
    if len(devices) == 1:
        return None
    return make_mesh(data=len(devices), fsdp=1, tensor=1, devices=devices)
