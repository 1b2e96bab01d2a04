#!/usr/bin/env bash
# The commands that the other scripts run on every worker. The checkout is in ~/mujica/src there.
#
#     worker.sh install ID EXTRAS PLATFORM      install Python and the package, and check the chips
#     worker.sh fetch SOURCE=FOLDER ...         copy gs:// folders to ~/mujica/FOLDER
#     worker.sh start UNIT SECRETS MODULE ...   run python -m MODULE ... as a systemd unit that outlives the ssh session
#     worker.sh state UNIT                      print absent, running, lost, or "ended STATUS"
#     worker.sh log UNIT LINES [follow]         print the last lines of the log
#     worker.sh stop UNIT                       send SIGTERM, so that a run saves its state and ends
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
    "$PYTHON" -m pip install --quiet --requirement "$BASE/src/requirements.txt" "$BASE/src${extras:+[$extras]}" ||
        die "the package could not be installed"
    # All workers check at the same time, because JAX sees the chips of a slice only when all of its hosts have started.
    "$PYTHON" - "$platform" <<'PYTHON'
import socket, sys
import jax
devices = jax.local_devices()
print(f"{socket.gethostname()}: {len(devices)} x {devices[0].device_kind}")
if jax.default_backend() != sys.argv[1]:
    sys.exit(f"error: {socket.gethostname()}: JAX uses {jax.default_backend()} and finds no {sys.argv[1]}")
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
            [ "$(cat "$folder/command")" = "$*" ] || die "$unit is already running with other arguments: $(cat "$folder/command")"
            echo "$(hostname): $unit is already running"
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

# Run the program inside the systemd unit. This function reads the secrets, so that only the environment of the program
# contains them.
run() {
    local unit=$1 secrets=$2 folder=$BASE/units/$1 pair value status=0
    shift 2
    cd "$BASE"
    exec >>"$folder/log" 2>&1
    for pair in $secrets; do
        value=$(gcloud secrets versions access latest --secret="${pair#*=}" 2>/dev/null) || {
            echo "error: the secret ${pair#*=} cannot be read: give the service account the role Secret Manager Secret Accessor"
            echo 2 >"$folder/status"
            exit 2
        }
        export "${pair%%=*}=$value"
    done
    # systemd sends SIGTERM to the program too. The shell waits for the program and then writes its status to a file.
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
        # The machine was restarted, or the unit was killed.
        echo lost
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
