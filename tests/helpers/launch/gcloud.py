"""A `gcloud` for tests. It knows one project, answers as its folder says and records every call.

The folder (`STUB_CLOUD`) holds

    calls           one line a call, its words as JSON
    resource.json   of the queued resource, while there is one: the words it was asked for with
    states          what it says in turn, a word a line; the last one stays
    answers.json    what some calls answer instead, in this order: [part of the call, status, output, error]; each once
    workers         how many machines there are; each has its home in worker-N, where ssh runs its commands in a shell

Without `workers` ssh does nothing, and a `test` there fails. `gcloud storage` speaks to the server
that `STORAGE_EMULATOR_HOST` names.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ.get("STUB_CLOUD", "."))
BIN = Path(__file__).with_name("bin")


def flag(words: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), "")


def fail(message: str) -> int:
    print(f"ERROR: (gcloud) {message}", file=sys.stderr)
    return 1


def say(text: str) -> int:
    print(text)
    return 0


def queued_resource(action: str, words: list[str]) -> int:
    resource = CLOUD / "resource.json"
    states = CLOUD / "states"
    if action == "create":
        resource.write_text(json.dumps(words))
        if not states.exists():
            states.write_text("ACTIVE\n")
        return 0
    if not resource.exists():
        return fail("NOT_FOUND: Resource 'projects/p/queuedResources/q' was not found")
    if action == "delete":
        resource.unlink()
        states.unlink(missing_ok=True)
        for home in CLOUD.glob("worker-*"):
            end_units(home)
            shutil.rmtree(home)
        return 0
    now, *later = states.read_text().split()
    if later:
        states.write_text("\n".join(later) + "\n")
    return say(now)


def end_units(home: Path) -> None:
    for file in home.glob("units/*.pid"):
        subprocess.run(["pkill", "-KILL", "-g", file.read_text()], check=False)


def homes(worker: str) -> list[Path]:
    if not (CLOUD / "workers").exists():
        return []
    count = int((CLOUD / "workers").read_text())
    chosen = [
        CLOUD / f"worker-{number}" for number in range(count) if worker in ("all", str(number))
    ]
    for home in chosen:
        home.mkdir(exist_ok=True)
    return chosen


def ssh(words: list[str]) -> int:
    started = [
        subprocess.Popen(
            ["bash", "-c", flag(words, "command")],
            cwd=home,
            env=os.environ | {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"},
        )
        for home in homes(flag(words, "worker"))
    ]
    # Without a worker, only a test of something fails.
    status_without_workers = int(flag(words, "command").startswith("test "))
    return max((process.wait() for process in started), default=status_without_workers)


def scp(words: list[str]) -> int:
    source, target = (word for word in words if not word.startswith("--"))
    for home in homes(flag(words, "worker")):
        shutil.copy(source, home / target.partition(":")[2])
    return 0


def storage(words: list[str]) -> int:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage as library

    client = library.Client(project="p", credentials=AnonymousCredentials())
    places = [word for word in words if not word.startswith("--")]
    action, *places = places

    def blob(address: str):
        bucket, _, name = address.removeprefix("gs://").partition("/")
        return client.bucket(bucket).blob(name)

    if action == "cat":
        if not blob(places[0]).exists():
            return fail(f"The following URLs matched no objects or files: {places[0]}")
        return say(blob(places[0]).download_as_text())
    if action == "cp" and places[0] == "-":
        blob(places[1]).upload_from_string(sys.stdin.read(), if_generation_match=0)
        return 0
    if action == "cp":
        for file in places[:-1]:
            blob(f"{places[-1]}{Path(file).name}").upload_from_filename(file)
        return 0
    if action == "ls":
        bucket, _, pattern = places[0].removeprefix("gs://").partition("/")
        prefix = pattern.partition("*")[0]
        for stored in client.list_blobs(bucket, prefix=prefix):
            if Path(stored.name).match(pattern):
                print(f"gs://{bucket}/{stored.name}")
        return 0
    if action == "rsync":
        source, target = places
        if not source.startswith("gs://"):
            for file in sorted(path for path in Path(source).rglob("*") if path.is_file()):
                blob(f"{target}/{file.relative_to(source)}").upload_from_filename(str(file))
            return 0
        bucket, _, prefix = source.removeprefix("gs://").partition("/")
        for stored in client.list_blobs(bucket, prefix=f"{prefix}/"):
            file = Path(target) / stored.name.removeprefix(f"{prefix}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            stored.download_to_filename(str(file))
        return 0
    return fail(f"the stub has no storage {action}")


def answer(words: list[str]) -> int:
    told = CLOUD / "answers.json"
    answers = json.loads(told.read_text()) if told.exists() else []
    line = " ".join(words)
    for number, (part, status, output, error) in enumerate(answers):
        if part in line:
            told.write_text(json.dumps(answers[:number] + answers[number + 1 :]))
            if error:
                print(error, file=sys.stderr)
            if output:
                print(output)
            return status
    if words[:2] == ["auth", "list"]:
        return say("someone@example.com")
    if words[:2] == ["projects", "describe"]:
        return (
            say(words[2]) if words[2] == "my-project" else fail(f"project [{words[2]}] not found")
        )
    if words[:2] == ["services", "list"]:
        return say("tpu.googleapis.com")
    if words[:3] == ["compute", "tpus", "accelerator-types"]:
        return say("v5litepod-4\nv5litepod-32")
    if words[:3] == ["compute", "tpus", "locations"]:
        return say("us-central1-a\nus-east5-b")
    if words[:3] == ["storage", "buckets", "describe"]:
        if words[3] == "gs://my-bucket":
            return say("US-CENTRAL1")
        return fail(f"{words[3]} not found: 404.")
    if words[:3] == ["compute", "tpus", "queued-resources"]:
        return queued_resource(words[3], words[4:])
    if words[:4] == ["compute", "tpus", "tpu-vm", "ssh"]:
        return ssh(words[4:])
    if words[:4] == ["compute", "tpus", "tpu-vm", "scp"]:
        return scp(words[4:])
    if words[:4] == ["compute", "tpus", "tpu-vm", "describe"]:
        return say(str(int(time.time()) - 7200))
    if words[:2] == ["secrets", "versions"]:
        return say("the secret")
    if words[0] == "storage":
        return storage(words[1:])
    return fail(f"the stub does not know {line}")


if __name__ == "__main__":
    with (CLOUD / "calls").open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    raise SystemExit(answer(sys.argv[1:]))
