# shellcheck shell=bash
# Functions that the scripts share: they read the environment file and common flags, call gcloud, explain its errors,
# and name resources. Messages go to stderr. A mistake of the user ends the script with one sentence and status 2.
set -euo pipefail

LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck disable=SC2034 # read by setup.sh
ROOT=$(dirname "$LAUNCH")
ENV_FILE=${MUJICA_ENV:-$LAUNCH/env}
DRY_RUN='' YES=''
ERRORS=$(mktemp)
trap 'rm -f "$ERRORS"' EXIT

# A dry run prints its calls to this copy of stderr, also where the output of a call is captured or discarded.
exec 3>&2
say() { printf '%s\n' "$*" >&2; }
# Print a message about something that was done. A dry run does nothing, so it prints no such message.
achieved() { [ -n "$DRY_RUN" ] || say "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Print the comment at the top of the script.
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
    exit "${1:-2}"
}

# Parse the common flags at the beginning of the arguments, and put the other arguments into REST.
common_flags() {
    while [ $# -gt 0 ]; do
        case $1 in
            --dry-run) DRY_RUN=1 ;;
            --yes) YES=1 ;;
            --env)
                [ $# -gt 1 ] || die "--env needs a file"
                ENV_FILE=$2
                shift
                ;;
            -h | --help) usage 0 ;;
            *) break ;;
        esac
        shift
    done
    REST=("$@")
    local word
    # A --dry-run after the first other argument would be passed on to the program. The call would be real and billed.
    for word in "${REST[@]:1}"; do
        [[ ! $word =~ ^--(dry-run|yes|env|detach)(=|$) ]] || die "$word comes too late: give it before $1"
    done
    read_env
}

read_env() {
    [ -f "$ENV_FILE" ] || die "there is no file $ENV_FILE: run cp launch/env.example launch/env and fill it in, or name another file with --env"
    # Make the path absolute, because bash searches PATH for a file whose name has no slash.
    ENV_FILE=$(cd "$(dirname "$ENV_FILE")" && pwd)/${ENV_FILE##*/}
    bash -e "$ENV_FILE" >/dev/null 2>"$ERRORS" || die "$(<"$ERRORS"): a value with spaces needs quotes"
    # shellcheck source=env.example
    . "$ENV_FILE"
    local name
    for name in PROJECT ZONE TPU_NAME ACCELERATOR_TYPE RUNTIME_VERSION PROVISIONING BUCKET RUN; do
        [ -n "${!name:-}" ] || die "$name is not set in $ENV_FILE: launch/env.example explains it"
    done
    SLICES=${SLICES:-1} FETCH=${FETCH:-} SECRETS=${SECRETS:-} LABELS=${LABELS:-} SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-}
    for name in $FETCH $SECRETS; do
        [[ $name == ?*=?* ]] || die "$name in FETCH or SECRETS of $ENV_FILE has no =: launch/env.example shows the form of both"
    done
    NETWORK=${NETWORK:-} SUBNETWORK=${SUBNETWORK:-} POLL_SECONDS=${POLL_SECONDS:-60}
    MAX_PREEMPTIONS=${MAX_PREEMPTIONS:-50} MAX_FAILURES=${MAX_FAILURES:-2}
    EXTRAS=${EXTRAS-tpu,qwix} PLATFORM=${PLATFORM:-tpu}
    case $PROVISIONING in
        spot | on-demand | reserved) ;;
        *) die "PROVISIONING is $PROVISIONING and must be spot, on-demand or reserved: change it in $ENV_FILE" ;;
    esac
    for name in SLICES POLL_SECONDS MAX_PREEMPTIONS MAX_FAILURES; do
        [[ ${!name} =~ ^[0-9]+$ ]] || die "$name is ${!name} and must be a whole number: change it in $ENV_FILE"
    done
    [ "$SLICES" -ge 1 ] || die "SLICES is $SLICES and must be at least 1: change it in $ENV_FILE"
    [[ $BUCKET == gs://* ]] || die "BUCKET is $BUCKET and must begin with gs://: change it in $ENV_FILE"
    [[ $RUN =~ ^[A-Za-z0-9._-]+$ ]] || die "RUN is $RUN and may only contain letters, digits, '.', '_' and '-': change it in $ENV_FILE"
    BUCKET=${BUCKET%/}
    # shellcheck disable=SC2034 # read by the scripts that source this file
    RUN_DIRECTORY=$BUCKET/runs/$RUN
}

# Print a command with the quotes that it needs in a shell.
shown() {
    local word line=
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then line+=" $word"; else line+=" '${word//\'/\'\\\'\'}'"; fi
    done
    printf '%s\n' "${line# }"
}

# Call gcloud to read something. A dry run only prints the call, and prints the value of ASSUMED as its answer.
ask() {
    if [ -n "$DRY_RUN" ]; then
        shown gcloud "$@" >&3
        printf '%s\n' "${ASSUMED-}"
        return 0
    fi
    gcloud "$@" 2>"$ERRORS"
}

# Call gcloud to change something. A dry run only prints the call. The stderr of the call is shown when it has ended. If
# the call fails, the file ERRORS keeps it.
act() {
    if [ -n "$DRY_RUN" ]; then
        shown gcloud "$@" >&3
        return 0
    fi
    local said status=0
    said=$(mktemp)
    gcloud "$@" 2>"$said" || status=$?
    cat "$said" >&2
    if [ "$status" -ne 0 ]; then cp "$said" "$ERRORS"; fi
    rm -f "$said"
    return "$status"
}

gcloud_error() { grep -m 1 -E '^error: |ERROR' "$ERRORS" || tail -n 1 "$ERRORS"; }

# End the script after a failed call of gcloud, with a sentence that says what the user can do.
explained() {
    local said
    said=$(gcloud_error)
    case $said in
        *"API has not been used"* | *SERVICE_DISABLED* | *"is not enabled"*)
            die "the Cloud TPU API is not enabled in project $PROJECT: run gcloud services enable tpu.googleapis.com --project $PROJECT" ;;
        *[Qq]uota* | *QUOTA* | *RESOURCE_EXHAUSTED*)
            die "project $PROJECT has no quota for $SLICES x $ACCELERATOR_TYPE ($PROVISIONING) in $ZONE: request it at https://console.cloud.google.com/iam-admin/quotas?project=$PROJECT, or change ZONE, ACCELERATOR_TYPE or PROVISIONING ($said)" ;;
        *PERMISSION_DENIED* | *"does not have permission"* | *403*)
            die "you have no permission for this in project $PROJECT: get the role TPU Admin, or check PROJECT in $ENV_FILE ($said)" ;;
        *)
            die "$1: $said" ;;
    esac
}

need_gcloud() {
    [ -n "$DRY_RUN" ] || command -v gcloud >/dev/null || die "gcloud is not installed: see https://cloud.google.com/sdk/docs/install"
    local account
    account=$(ASSUMED=you@example.com ask auth list --filter=status:ACTIVE --format='value(account)') || true
    [ -n "$account" ] || die "you are not logged in to gcloud: run gcloud auth login"
}

zonal() { printf '%s\n' --project="$PROJECT" --zone="$ZONE"; }

# Print the state of the queued resource: ABSENT if it does not exist, else for example ACTIVE, WAITING_FOR_RESOURCES or
# SUSPENDED.
resource_state() {
    local state
    if state=$(ASSUMED=${ASSUMED_STATE:-ACTIVE} ask compute tpus queued-resources describe "$TPU_NAME" \
        --project="$PROJECT" --zone="$ZONE" --format='value(state.state)'); then
        printf '%s\n' "${state:-ABSENT}"
    elif grep -qiE 'NOT_FOUND|not found|does not exist' "$ERRORS"; then
        printf 'ABSENT\n'
    else
        explained "the state of $TPU_NAME cannot be read"
    fi
}

need_active() {
    local state
    state=$(resource_state)
    [ "$state" = ACTIVE ] || die "$TPU_NAME in $ZONE is $state: launch/create.sh requests it and waits until it is ready"
}

# Print the names of the slices, one on each line.
nodes() {
    local number
    if [ "$SLICES" -eq 1 ]; then
        printf '%s\n' "$TPU_NAME"
    else
        for ((number = 0; number < SLICES; number++)); do printf '%s\n' "$TPU_NAME-$number"; done
    fi
}

# on_workers all|NUMBER COMMAND: run a command on all machines of all slices at the same time, or on one machine of the
# first slice.
on_workers() {
    local worker=$1 command=$2 node status=0 pids=() pid
    if [ "$worker" != all ]; then
        remote "$TPU_NAME$([ "$SLICES" -eq 1 ] || printf -- -0)" "$worker" "$command"
        return
    fi
    while read -r node; do
        remote "$node" all "$command" </dev/null &
        pids+=($!)
    done < <(nodes)
    for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
    return "$status"
}

remote() {
    act compute tpus tpu-vm ssh "$1" --project="$PROJECT" --zone="$ZONE" --worker="$2" --quiet --command="$3"
}

# End the script after a failed call on the workers.
unreachable() {
    die "$1 on $TPU_NAME: $(gcloud_error)"
}

# Print the number of chips of all slices. It follows from the accelerator type: v5litepod-32 has 32 chips, v4-32 has 32
# cores.
chips() {
    local prefix=${ACCELERATOR_TYPE%-*} count=${ACCELERATOR_TYPE##*-} per_chip
    per_chip=$(awk -v prefix="$prefix" '$1 == prefix { print $2 }' "$LAUNCH/prices.tsv")
    [[ $count =~ ^[0-9]+$ && $per_chip =~ ^[0-9]+$ ]] || return 1
    printf '%s\n' $((count * SLICES / per_chip))
}

# Print the price of one chip for one hour, in US dollars.
price() {
    local column=3
    [ "$PROVISIONING" != spot ] || column=4
    awk -v prefix="${ACCELERATOR_TYPE%-*}" -v column=$column '$1 == prefix { print $column }' "$LAUNCH/prices.tsv"
}

# Ask the user a question. Succeed if the answer is yes, with --yes, and in a dry run.
confirm() {
    [ -z "$YES$DRY_RUN" ] || return 0
    local answer=
    printf '%s [y/N] ' "$1" >&2
    read -r answer || true
    [[ $answer == [yY]* ]]
}
