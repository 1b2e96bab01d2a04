#!/usr/bin/env bash
# What the other scripts run on every worker, where the checkout lies in ~/mujica/src.
#
#     worker.sh install ID EXTRAS PLATFORM      Python, virtual environment, package, and a look at the chips
#     worker.sh fetch SOURCE=FOLDER ...         gs:// folders to ~/mujica/FOLDER
#     worker.sh start UNIT SECRETS MODULE ...   python -m MODULE ..., as a systemd unit that outlives the ssh session
#     worker.sh state UNIT                      absent, running, lost, or "ended STATUS"
#     worker.sh log UNIT LINES [follow]
#     worker.sh stop UNIT                       SIGTERM: a run saves where it is and ends
set -euo pipefail
BASE=$HOME/mujica
PYTHON=$BASE/venv/bin/python

die() {
    printf 'error: %s: %s\n' "$(hostname)" "$*" >&2
    exit 2
}

install() {
    local id=$1 extras=$2 platform=$3 found=
    if [ ! -x "$PYTHON" ]; then
        for python in python3.13 python3.12 python3.11; do
            if [ -z "$found" ] && command -v $python >/dev/null && $python -c 'import ensurepip' 2>/dev/null; then found=$python; fi
        done
        if [ -z "$found" ]; then
            found=python3.11
            { sudo apt-get -qq update && sudo apt-get -qq install -y python3.11 python3.11-venv; } >/dev/null ||
                die "Python 3.11 could not be installed: choose a RUNTIME_VERSION that has it"
        fi
        $found -m venv "$BASE/venv"
    fi
    "$PYTHON" -m pip install --quiet "$BASE/src${extras:+[$extras]}" || die "the package could not be installed"
    # All workers ask at once: the chips of a slice answer when every host of it has come.
    "$PYTHON" - "$platform" <<'PYTHON'
import socket, sys
import jax
devices = jax.local_devices()
print(f"{socket.gethostname()}: {len(devices)} x {devices[0].device_kind}")
if jax.default_backend() != sys.argv[1]:
    sys.exit(f"error: {socket.gethostname()}: JAX sees {jax.default_backend()} and no {sys.argv[1]}")
PYTHON
    printf '%s\n' "$id" >"$BASE/installed"
}

fetch() {
    local pair
    for pair in "$@"; do
        mkdir -p "$BASE/${pair#*=}"
        gcloud storage rsync --recursive "${pair%%=*}" "$BASE/${pair#*=}" >/dev/null 2>"$BASE/fetch.err" ||
            die "${pair%%=*} could not be fetched: $(tail -n 1 "$BASE/fetch.err")"
    done
}

start() {
    local unit=$1 secrets=$2 folder=$BASE/units/$1
    shift 2
    mkdir -p "$folder"
    case $(state "$unit") in
        running)
            [ "$(cat "$folder/command")" = "$*" ] || die "$unit runs already with other words: $(cat "$folder/command")"
            echo "$(hostname): $unit runs already"
            return
            ;;
    esac
    printf '%s' "$*" >"$folder/command"
    rm -f "$folder/status"
    sudo systemd-run --quiet --collect --unit="mujica-$unit" --uid="$(id -u)" --gid="$(id -g)" \
        --setenv=HOME="$HOME" --setenv=PATH="$PATH" --property=TimeoutStopSec=180 \
        bash "$BASE/src/launch/worker.sh" run "$unit" "$secrets" "$@"
    echo "$(hostname): $unit started"
}

# Inside the unit. Secrets are read here and live in the environment of the program alone.
run() {
    local unit=$1 secrets=$2 folder=$BASE/units/$1 pair value status=0
    shift 2
    cd "$BASE"
    exec >>"$folder/log" 2>&1
    for pair in $secrets; do
        value=$(gcloud secrets versions access latest --secret="${pair#*=}" 2>/dev/null) || {
            echo "error: the secret ${pair#*=} cannot be read: the service account needs Secret Manager Secret Accessor"
            echo 2 >"$folder/status"
            exit 2
        }
        export "${pair%%=*}=$value"
    done
    # systemd sends SIGTERM to the program too; the shell waits for it and writes its status down.
    trap ':' TERM
    "$PYTHON" -m "$@" &
    local child=$!
    while kill -0 $child 2>/dev/null; do
        status=0
        wait $child || status=$?
    done
    echo "$status" >"$folder/status"
    exit "$status"
}

state() {
    local folder=$BASE/units/$1
    if sudo systemctl is-active --quiet "mujica-$1"; then
        echo running
    elif [ -f "$folder/status" ]; then
        echo "ended $(cat "$folder/status")"
    elif [ -f "$folder/command" ]; then
        echo lost # the machine started again, or the unit was killed
    else
        echo absent
    fi
}

log() {
    local file=$BASE/units/$1/log
    [ -f "$file" ] || die "$1 has written nothing yet"
    if [ "${3:-}" = follow ]; then exec tail -n "$2" -F "$file"; fi
    tail -n "$2" "$file"
}

stop() {
    if sudo systemctl is-active --quiet "mujica-$1"; then sudo systemctl stop "mujica-$1"; fi
    state "$1"
}

"$@"
