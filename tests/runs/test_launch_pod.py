"""A configuration for pods, cut small, by the scripts of launch/: the index is built on one slice,
the run trains on another one, and both are deleted. The machines are folders here, as in
test_launch_rehearsal.py.
"""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import save_checkpoint
from tests.helpers.packed_rows import MODEL
from tests.helpers.tiny_embedder import WORDS, tiny_embedder
from tests.helpers.tiny_models import filled_decoder
from tests.helpers.whole_runs import SECONDS
from tests.launch.test_launch import LAUNCH, Cloud
from tests.runs.test_launch_rehearsal import machines

FILMS = 60
# What does not fit a machine without chips: everything else is as in configs/two_wiki_text_v5e.py.
CUT = """--engine.max-num-seqs 4 --engine.tensor-parallel-size 1 --engine.cache-gigabytes 0
--engine.prefill-tokens 512
    --trainer.fsdp 2 --trainer.batch-size 2 --trainer.dtype float32 --warmup.steps 0 --method.rounds
    1 --sampling.questions-per-round 4 --sampling.questions-per-shard 2 --method.max-attempts 1
    --method.keep-per-question 1 --agent.max-turn-tokens 16 --eval.questions 4""".split()
WORDS_OF_THE_RUN = """configs/two_wiki_text_v5e.py --init models/nano --task.data-dir data --task.embedder embedder
    --task.index indexes/two_wiki""".split()


def write_data(folder: Path) -> None:
    """Write a few questions as the official files have them, and the passages that all of them
    search.
    """
    folder.mkdir()
    passages = [
        {"title": f"film {number}", "text": f"A film of {WORDS[number]}."}
        for number in range(FILMS)
    ]
    (folder / "corpus.json").write_text(json.dumps(passages))
    records = [
        {
            "_id": f"q{number}",
            "type": "inference",
            "question": f"Who directed film {number}?",
            "answer": WORDS[number],
            "supporting_facts": [[f"film {number}", 0]],
            "evidences": [],
        }
        for number in range(FILMS)
    ]
    (folder / "train.json").write_text(json.dumps(records[: FILMS // 2]))
    (folder / "dev.json").write_text(json.dumps(records[FILMS // 2 :]))


def write_checkpoint(folder: Path) -> None:
    """Write a decoder of a few thousand parameters that reads conversations as long as the
    configuration's.
    """
    tokenizer = Tokenizer.train(
        [" ".join(WORDS), "Who directed film 1? <think> <search> <answer>"] * 50, 600
    )
    size = dataclasses.replace(
        MODEL,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tuple(tokenizer.stop_token_ids),
        max_position_embeddings=4096,
    )
    save_checkpoint(filled_decoder(size), folder, tokenizer=tokenizer)


@pytest.fixture
def cloud(tmp_path):
    with machines(tmp_path) as cloud_of_folders:
        yield cloud_of_folders


def long(cloud: Cloud, script: str, *words: str) -> str:
    """Run a script that may take minutes on a busy machine, and return what it printed."""
    command = [str(LAUNCH / script), "--env", str(cloud.folder / "env"), *words]
    ended = subprocess.run(
        command, env=cloud.environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_configuration_for_pods_from_create_to_delete(cloud, tmp_path):
    write_data(tmp_path / "data")
    write_checkpoint(tmp_path / "nano")
    tiny_embedder(tmp_path / "embedder")
    for folder, name in (("data", "data"), ("nano", "models/nano"), ("embedder", "embedder")):
        for file in (path for path in (tmp_path / folder).rglob("*") if path.is_file()):
            cloud.bucket.put(
                "my-bucket", f"{name}/{file.relative_to(tmp_path / folder)}", file.read_bytes()
            )
    fetched = [f"gs://my-bucket/{name}={name}" for name in ("data", "models/nano", "embedder")]

    # A slice of one host builds the index.
    cloud.set(
        PLATFORM="cpu", EXTRAS="", POLL_SECONDS="1", TPU_NAME="builder", FETCH=" ".join(fetched)
    )
    (cloud.folder / "workers").write_text("1")
    cloud.done("create.sh")
    long(cloud, "setup.sh")
    messages = long(
        cloud,
        "index.sh",
        "two_wiki",
        "--corpus",
        "data/corpus.json",
        "--kind",
        "scann",
        "--embedder",
        "embedder",
    )
    assert "recall" in messages, "ScaNN's recall beside exact search is printed"
    cloud.done("delete.sh", "--yes")
    manifest = [
        name
        for name in cloud.bucket.names("my-bucket", "indexes/two_wiki/")
        if name.endswith(".json")
    ]
    assert manifest

    # A slice of two hosts trains.
    fetched.append("gs://my-bucket/indexes/two_wiki=indexes/two_wiki")
    cloud.set(PLATFORM="cpu", EXTRAS="", POLL_SECONDS="1", FETCH=" ".join(fetched))
    (cloud.folder / "workers").write_text("2")
    cloud.done("create.sh")
    long(cloud, "train.sh", *WORDS_OF_THE_RUN, *CUT)
    config = json.loads(cloud.bucket.content("my-bucket", "runs/first/config.json"))["config"]
    assert config["name"] == "two_wiki_text_v5e"
    assert config["engine"]["kind"] == "jetstream"
    summary = json.loads(cloud.bucket.content("my-bucket", "runs/first/summary.json"))
    assert [phase["trajectories"] for phase in summary["phases"]] == [0, 4]
    assert "greedy" in long(cloud, "eval.sh", "--eval.questions", "4")
    cloud.done("delete.sh", "--yes")
    assert "there is no mujica" in cloud.done("delete.sh")
