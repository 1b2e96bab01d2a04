"""The scripts of launch/ against a gcloud that answers as it is told and writes every call down:
`helpers/launch/gcloud.py`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import HELPERS, ROOT
from tests.helpers.patience import HANG_SECONDS

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(
    path.name for path in LAUNCH.glob("*.sh") if path.name not in ("common.sh", "worker.sh")
)
STUBS = HELPERS / "launch" / "bin"
ENV = {
    "PROJECT": "my-project",
    "ZONE": "us-central1-a",
    "TPU_NAME": "mujica",
    "ACCELERATOR_TYPE": "v5litepod-4",
    "RUNTIME_VERSION": "v2-alpha-tpuv5-lite",
    "PROVISIONING": "spot",
    "BUCKET": "gs://my-bucket",
    "RUN": "first",
    "POLL_SECONDS": "0",
    "LABELS": "application=mujica",
}


class Cloud:
    """A project with its environment file, and the stub of gcloud that stands for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.environment = {
            **os.environ,
            "PATH": f"{STUBS}:{os.environ['PATH']}",
            "STUB_CLOUD": str(folder),
            "STUB_PYTHON": sys.executable,
        }
        self.set()

    def set(self, **changed: str) -> None:
        lines = [f"{name}='{value}'" for name, value in (ENV | changed).items()]
        (self.folder / "env").write_text("\n".join(lines) + "\n")

    def run(self, script: str, *words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(LAUNCH / script), "--env", str(self.folder / "env"), *words],
            env=self.environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )

    def done(self, script: str, *words: str) -> str:
        """Run a script that must succeed. Return what it printed."""
        ended = self.run(script, *words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout + ended.stderr

    def refused(self, script: str, *words: str, answer: str = "") -> str:
        """Run a script that must refuse with status 2. Return its last sentence."""
        ended = self.run(script, *words, answer=answer)
        assert ended.returncode == 2, (ended.returncode, ended.stderr)
        return ended.stderr.strip().splitlines()[-1]

    def answers(self, *answers: tuple[str, int, str, str]) -> None:
        """Set the answers of calls, each used once: a part of the call, status, output, error."""
        (self.folder / "answers.json").write_text(json.dumps(answers))

    def states(self, *states: str) -> None:
        (self.folder / "states").write_text("\n".join(states) + "\n")

    def calls(self, *beginning: str) -> list[list[str]]:
        file = self.folder / "calls"
        if not file.exists():
            return []
        calls = [json.loads(line) for line in file.read_text().splitlines()]
        return [words for words in calls if words[: len(beginning)] == list(beginning)]

    @property
    def created(self) -> list[list[str]]:
        return self.calls("compute", "tpus", "queued-resources", "create")


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path / "cloud")


def test_shellcheck_finds_nothing():
    scripts = [
        *map(str, LAUNCH.glob("*.sh")),
        *map(str, STUBS.iterdir()),
        str(ROOT / "benchmarks" / "gpu.sh"),
    ]
    finished = subprocess.run(
        [str(Path(sys.prefix) / "bin/shellcheck"), "-x", *scripts],
        cwd=LAUNCH,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout


def test_the_slices_are_asked_for_as_configured_and_waited_for(cloud):
    cloud.states("ACCEPTED", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE")
    output = cloud.done("create.sh")
    assert cloud.created == [
        [
            *(
                "compute tpus queued-resources create mujica --project=my-project "
                "--zone=us-central1-a".split()
            ),
            *(
                "--accelerator-type=v5litepod-4 --runtime-version=v2-alpha-tpuv5-lite "
                "--node-id=mujica --spot".split()
            ),
            "--labels=application=mujica",
        ]
    ]
    assert "4 chips, about 2.20 dollars an hour" in output  # 4 x 0.55
    rule = json.loads(output.partition("echo '")[2].partition("'")[0])["rule"][0]
    assert rule == {
        "action": {"type": "Delete"},
        "condition": {"age": 30, "matchesPrefix": ["runs/first/learning/"]},
    }
    assert "WAITING_FOR_RESOURCES" in output
    assert output.count("WAITING") == 1
    assert output.endswith("mujica: ACTIVE\n")
    second_output = cloud.done("create.sh")
    assert "mujica exists already: ACTIVE" in second_output
    assert len(cloud.created) == 1


def test_several_slices_and_the_other_ways_of_provisioning(cloud):
    cloud.set(
        SLICES="2",
        PROVISIONING="reserved",
        SERVICE_ACCOUNT="me@my-project",
        NETWORK="net",
        SUBNETWORK="sub",
    )
    assert "8 chips, about 9.60 dollars" in cloud.done("create.sh", "--no-wait")
    words = cloud.created[0][5:]
    assert {
        "--node-count=2",
        "--node-prefix=mujica",
        "--reserved",
        "--network=net",
        "--subnetwork=sub",
    } < set(words)
    assert {"--service-account=me@my-project", "--scopes=cloud-platform"} < set(words)
    assert "--spot" not in words
    cloud.done("setup.sh")
    copied = [words[5] for words in cloud.calls("compute", "tpus", "tpu-vm", "scp")]
    assert sorted(copied) == ["mujica-0:mujica.tar.gz", "mujica-1:mujica.tar.gz"]


@pytest.mark.parametrize(
    ("changed", "answer", "sentence"),
    [
        ({"PROJECT": "other"}, None, "project other does not exist, or you have no access to it: list"),
        ({"ACCELERATOR_TYPE": "v9-1"}, None, "has no ACCELERATOR_TYPE v9-1: choose from v5litepod-4 v5litepod-32"),
        ({"BUCKET": "gs://none"}, None, "bucket gs://none does not exist, or you have no access to it: run gcloud"),
        ({"PROVISIONING": "free"}, None, "PROVISIONING is free and must be spot, on-demand or reserved"),
        ({"SLICES": "0"}, None, "SLICES is 0 and must be at least 1"),
        ({"RUN": "a b"}, None, "RUN is a b and may only contain letters"),
        ({"BUCKET": "bucket"}, None, "BUCKET is bucket and must begin with gs://"),
        ({"ZONE": ""}, None, "ZONE is not set in"),
        ({}, ("auth list", 0, "", ""), "you are not logged in to gcloud: run gcloud auth login"),
        ({}, ("services list", 0, "", ""), "Cloud TPU API is not enabled in project my-project: run gcloud services"),
        (
            {"ZONE": "mars-1-a"},
            ("accelerator-types", 1, "", "ERROR: Location mars-1-a is not found"),
            "ZONE mars-1-a has no TPUs: choose one of us-central1-a us-east5-b",
        ),
        (
            {},
            ("queued-resources create", 1, "", "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPerProject' exceeded"),
            "project my-project has no quota for 1 x v5litepod-4 (spot) in us-central1-a: request "
            "it at",
        ),
        (
            {},
            ("queued-resources create", 1, "", "ERROR: PERMISSION_DENIED: tpu.nodes.create"),
            "you have no permission for this in project my-project: get the role TPU Admin",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_sentence_and_nothing_is_created(
    cloud, changed, answer, sentence
):
    cloud.set(**changed)
    if answer:
        cloud.answers(answer)
    message = cloud.refused("create.sh")
    assert message.startswith("error: ")
    assert sentence in message
    assert not (cloud.folder / "resource.json").exists()


def test_without_an_environment_file_it_says_how_to_make_one(cloud):
    (cloud.folder / "env").unlink()
    assert "cp launch/env.example launch/env" in cloud.refused("create.sh")


def test_a_value_with_spaces_needs_quotes(cloud):
    with open(cloud.folder / "env", "a") as file:
        file.write("LABELS=a b\nPOLL_SECONDS=1\n")
    assert "a value with spaces needs quotes" in cloud.refused("create.sh")


@pytest.mark.parametrize(
    ("name", "value"), [("FETCH", "gs://my-bucket/2wiki"), ("SECRETS", "WANDB_API_KEY")]
)
def test_what_is_fetched_and_what_is_secret_needs_both_of_its_names(cloud, name, value):
    cloud.set(**{name: value})
    assert f"{value} in FETCH or SECRETS" in cloud.refused("create.sh")


def test_without_gcloud_it_says_where_to_get_it(cloud, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "env", "dirname", "mktemp", "rm", "sed", "tr"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    cloud.environment["PATH"] = str(tmp_path / "bin")
    message = cloud.refused("create.sh")
    assert "gcloud is not installed: see https://cloud.google.com/sdk/docs/install" in message


def test_a_bucket_elsewhere_is_asked_about_with_its_price(cloud):
    elsewhere = ("buckets describe", 0, "EUROPE-WEST4", "")
    cloud.answers(elsewhere)
    message = cloud.refused("create.sh", answer="n\n")
    assert "gcloud storage buckets create gs://NEW --location=us-central1" in message
    assert not cloud.created
    cloud.answers(elsewhere)
    ended = cloud.run("create.sh", answer="y\n")
    assert ended.returncode == 0
    assert "costs about 0.08 dollars" in ended.stderr
    cloud.answers(("buckets describe", 0, "US-EAST1", ""))
    assert "costs about 0.02 dollars" in cloud.run("create.sh", answer="n\n").stderr
    cloud.answers(("buckets describe", 0, "US", ""))
    assert "dollars" not in cloud.done("create.sh")


def test_what_was_preempted_is_made_anew_when_asked(cloud):
    cloud.done("create.sh")
    cloud.states("SUSPENDED")
    message = cloud.refused("create.sh", answer="n\n")
    assert "mujica is SUSPENDED: launch/delete.sh deletes it" in message
    assert len(cloud.created) == 1
    cloud.states("SUSPENDED")
    cloud.done("create.sh", "--replace")
    assert len(cloud.created) == 2
    assert len(cloud.calls("compute", "tpus", "queued-resources", "delete")) == 1


def test_preempted_while_it_is_created_it_says_so(cloud):
    cloud.states("ACCEPTED", "PROVISIONING", "FAILED")
    assert "mujica became FAILED before it was ready" in cloud.refused("create.sh")


def test_a_worker_that_cannot_be_reached_is_said(cloud):
    cloud.done("create.sh")
    no_answer = (
        "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) connect to host 10.0.0.2 port 22: Connection "
        "timed out"
    )
    cloud.answers(("tpu-vm scp", 255, "", no_answer))
    message = cloud.refused("setup.sh")
    assert "the checkout could not be copied on mujica" in message
    assert "Connection timed out" in message


def test_before_the_slices_are_there_the_other_scripts_name_create(cloud):
    for words in (
        ["setup.sh"],
        ["eval.sh"],
        ["logs.sh"],
        ["index.sh", "wiki", "--corpus", "data/corpus.jsonl"],
    ):
        assert "mujica in us-central1-a is ABSENT: launch/create.sh requests it" in cloud.refused(
            *words
        )
    assert "there is no mujica in us-central1-a: only gs://" in cloud.done("delete.sh")


def test_a_dry_run_prints_the_calls_and_does_nothing(cloud):
    for script in SCRIPTS:
        words = {
            "train.sh": ["configs/tiny_world.py"],
            "index.sh": ["wiki", "--corpus", "a b.jsonl"],
        }.get(script, [])
        output = cloud.done(script, "--dry-run", *words)
        assert re.search(r"^gcloud compute tpus ", output, re.MULTILINE), script
        assert not re.search("is deleted|is set up|first runs on", output), "nothing was done"
        expected = {
            "delete.sh": "worker.sh stop",
            "status.sh": "worker.sh state",
            "train.sh": "storage cat gs://",
        }
        assert expected.get(script, "") in output
    message = cloud.refused("train.sh", "configs/tiny_world.py", "--seed", "1", "--dry-run")
    assert "--dry-run comes too late: give it before configs/tiny_world.py" in message
    assert cloud.calls() == [], "gcloud was never called"
    output = cloud.done("index.sh", "--dry-run", "wiki", "--corpus", "a b.jsonl")
    assert "mujica_jax.index build --corpus '\\''a b.jsonl'\\'' --out" in output


def test_the_documented_lines_are_taken(cloud):
    pages = [ROOT / "docs" / "guides" / "tpu_pods.md"]
    lines = [
        line
        for page in pages
        for line in re.findall(r"^launch/(.*?)(?:  +#.*)?$", page.read_text(), re.MULTILINE)
    ]
    assert {line.split()[0] for line in lines} == {"create.sh", "train.sh", "delete.sh"}
    for script, *words in map(str.split, lines):
        cloud.done(script, "--dry-run", *words)


def test_deleting_asks_first(cloud):
    cloud.done("create.sh")
    assert "mujica was not deleted and costs money" in cloud.refused("delete.sh", answer="\n")
    assert not cloud.calls("compute", "tpus", "queued-resources", "delete")
    assert "mujica is deleted" in cloud.done("delete.sh", "--yes")
    (deleted,) = cloud.calls("compute", "tpus", "queued-resources", "delete")
    assert {"--force", "--quiet", "--zone=us-central1-a", "--project=my-project"} < set(deleted)


def ended(status: int) -> tuple[str, int, str, str]:
    return ("worker.sh state", 0, f"ended {status}", "")


RUNNING = ("worker.sh state", 0, "running", "")
DONE = ("summary.json", 0, "gs://my-bucket/runs/first/summary.json", "")
NOT_DONE = ("summary.json", 1, "", "ERROR: One or more URLs matched no objects.")
CLAIM = (("storage cat", 1, "", "ERROR: matched no objects or files"), ("storage cp", 0, "", ""))


def test_a_run_is_started_and_looked_after_until_it_ends(cloud):
    cloud.answers(*CLAIM, RUNNING, RUNNING, ended(0), DONE)
    output = cloud.done("train.sh", "configs/tiny_world.py", "--seed", "1")
    assert "first has finished: launch/eval.sh scores it" in output
    starts = [
        words[-1]
        for words in cloud.calls("compute", "tpus", "tpu-vm", "ssh")
        if "worker.sh start" in words[-1]
    ]
    assert starts == [
        "--command=bash ~/mujica/src/launch/worker.sh start 'train-first' '' mujica_jax.train "
        "configs/tiny_world.py --seed 1 --run 'gs://my-bucket/runs/first'"
    ]
    assert len(cloud.created) == 1


def test_a_preempted_slice_is_made_again_and_counted_apart_from_failures(cloud):
    cloud.set(MAX_FAILURES="0", MAX_PREEMPTIONS="1")
    cloud.states(*["ACTIVE"] * 3, "SUSPENDED", "SUSPENDED")
    cloud.answers(*CLAIM, RUNNING, ended(0), DONE)
    output = cloud.done("train.sh", "configs/tiny_world.py")
    assert "mujica was preempted (preemption 1 of at most 1)" in output
    assert "failed" not in output
    assert len(cloud.created) == 2
    cloud.states(*["ACTIVE"] * 3, "SUSPENDED")
    cloud.set(MAX_PREEMPTIONS="0")
    cloud.answers(*CLAIM, RUNNING)
    given_up = cloud.run("train.sh", "configs/tiny_world.py")
    assert given_up.returncode == 1
    assert "not started again after 0 failures and 1 preemptions" in given_up.stderr


def test_a_run_that_was_asked_to_end_has_not_ended(cloud):
    """A run obeys SIGTERM with status 0. Only its summary says that it is done."""
    cloud.answers(*CLAIM, ended(0), NOT_DONE, RUNNING, ended(0), DONE)
    output = cloud.done("train.sh", "configs/tiny_world.py")
    assert "first was asked to end and saved its state (preemption 1 of at most 50)" in output
    starts = [
        words
        for words in cloud.calls("compute", "tpus", "tpu-vm", "ssh")
        if "worker.sh start" in words[-1]
    ]
    assert len(starts) == 2
    assert len(cloud.created) == 1


def test_a_slice_that_cannot_be_made_again_is_not_set_up(cloud):
    cloud.set(MAX_PREEMPTIONS="1")
    cloud.states(*["ACTIVE"] * 3, "SUSPENDED")
    cloud.answers(*CLAIM, ("queued-resources delete", 1, "", "ERROR: deadline exceeded"))
    given_up = cloud.run("train.sh", "configs/tiny_world.py")
    assert given_up.returncode == 1
    assert "mujica could not be created again" in given_up.stderr
    assert len(cloud.calls("compute", "tpus", "tpu-vm", "scp")) == 1, "only the first time"


def test_a_run_that_fails_is_started_again_a_bounded_number_of_times(cloud):
    cloud.set(MAX_FAILURES="1")
    cloud.answers(*CLAIM, ended(1), ("worker.sh log", 0, "the last line", ""), ended(1))
    given_up = cloud.run("train.sh", "configs/tiny_world.py")
    assert given_up.returncode == 1
    assert "not started again after 2 failures and 0 preemptions" in given_up.stderr
    assert "the last line" in given_up.stderr
    starts = [
        words
        for words in cloud.calls("compute", "tpus", "tpu-vm", "ssh")
        if "worker.sh start" in words[-1]
    ]
    assert len(starts) == 2


def test_a_run_that_the_program_refuses_is_not_tried_again(cloud):
    cloud.answers(*CLAIM, ended(2), ("worker.sh log", 0, "error: there is no directory data", ""))
    refused = cloud.run("train.sh", "configs/tiny_world.py")
    assert refused.returncode == 2
    assert "error: there is no directory data" in refused.stderr
    assert "the program refused to run first" in refused.stderr


def test_a_name_that_another_command_has_is_refused_before_anything_is_made(cloud):
    cloud.answers(("storage cat", 0, "configs/tiny_world.py --seed 1", ""))
    message = cloud.refused("train.sh", "configs/tiny_world.py", "--seed", "2")
    assert (
        "run first was started with `configs/tiny_world.py --seed 1` and this command is" in message
    )
    assert not cloud.created
    message = cloud.refused("train.sh", "c.py", "--run")
    assert "--run is given and the run is gs://my-bucket/runs/first" in message
    assert "no configuration is given" in cloud.refused("train.sh")


def test_no_secret_stands_in_a_call(cloud):
    cloud.set(SECRETS="WANDB_API_KEY=wandb-key")
    cloud.answers(*CLAIM)
    cloud.done("train.sh", "--detach", "configs/tiny_world.py")
    assert "the secret" not in (cloud.folder / "calls").read_text()
    assert any(
        "'WANDB_API_KEY=wandb-key'" in words[-1]
        for words in cloud.calls("compute", "tpus", "tpu-vm", "ssh")
    )


def test_status_says_step_speed_checkpoint_and_cost(cloud):
    cloud.done("create.sh")
    line = {"phase": "warm-up/learn", "step": 40, "loss": 0.5, "tokens_per_second": 1234.5}
    cloud.answers(
        ("worker.sh state", 0, "running", ""),
        ("metrics.jsonl", 0, json.dumps(line), ""),
        ("learning", 0, "gs://my-bucket/runs/first/learning/warm-up/40/COMMITTED", ""),
        ("policies", 0, "gs://my-bucket/runs/first/policies/000001/COMMITTED", ""),
    )
    output = cloud.done("status.sh")
    assert "slices      1 x v5litepod-4 (spot) in us-central1-a: ACTIVE" in output
    assert "run         first: 1x running" in output
    assert "learning    warm-up/learn, step 40, loss 0.5, 1234.5 tokens/s" in output
    assert "checkpoint  learning/warm-up/40" in output
    assert "policy      policies/000001" in output
    assert "cost        4.40 dollars" in output  # two hours, four chips, 0.55


def test_the_example_names_every_variable_and_its_prices_every_type():
    example = (LAUNCH / "env.example").read_text()
    assigned = set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))
    scripts = "".join(path.read_text() for path in LAUNCH.glob("*.sh"))
    read = set(re.findall(r"\$\{?!?([A-Z][A-Z_]+)", scripts))
    own = {
        "LAUNCH",
        "ROOT",
        "ENV_FILE",
        "DRY_RUN",
        "YES",
        "ERRORS",
        "REST",
        "RUN_DIRECTORY",
        "BASH_SOURCE",
        "HOME",
        "MUJICA_ENV",
        "ASSUMED",
        "ASSUMED_STATE",
        "WAIT",
        "REPLACE",
        "DETACH",
        "UNIT",
        "PYTHON",
        "BASE",
        "PATH",
    }
    assert read - own == assigned
