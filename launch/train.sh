#!/usr/bin/env bash
# Train on the slices: makes and sets them up where they are missing, starts the run on every worker and looks after it.
# A preempted slice is made again and the run goes on from its directory in the bucket; Ctrl-C leaves it running, and the
# same command looks after it again.
#
#     launch/train.sh [--dry-run] [--yes] [--env FILE] [--detach] CONFIG [--section.field value ...]
#
# The run lies in BUCKET/runs/RUN. --detach starts it and looks no further. Status 0: it has ended; 1: it failed more
# often than MAX_FAILURES or was preempted more often than MAX_PREEMPTIONS; 2: a mistake.
. "$(dirname "$0")/common.sh"
common_flags "$@"
DETACH=''
if [ "${REST[0]:-}" = --detach ]; then
    DETACH=1
    REST=("${REST[@]:1}")
fi
[ ${#REST[@]} -gt 0 ] || die "which configuration? launch/train.sh configs/two_wiki_text_v5e.py [--section.field value ...]"
for word in "${REST[@]}"; do
    [[ $word != --run* ]] || die "$word is given and the run is $RUN_DIRECTORY: change RUN and BUCKET in $ENV_FILE"
done
UNIT=train-$RUN
need_gcloud

# The name of a run belongs to its command: the first one writes it down, others are told.
claim() {
    local words held
    words=$(shown "${REST[@]}")
    if held=$(ASSUMED=$words ask storage cat "$RUN_DIRECTORY/command"); then
        [ "$held" = "$words" ] ||
            die "run $RUN was begun with \`$held\` and this is \`$words\`: choose another RUN in $ENV_FILE, or give the same words"
    elif grep -qiE 'matched no objects|not found|404' "$ERRORS"; then
        printf '%s\n' "$words" | gcloud storage cp --if-generation-match=0 - "$RUN_DIRECTORY/command" 2>"$ERRORS" ||
            die "$RUN_DIRECTORY cannot be written: $(gcloud_error)"
    else
        die "$RUN_DIRECTORY cannot be read: $(gcloud_error)"
    fi
}

begin() {
    on_workers all "bash ~/mujica/src/launch/worker.sh start '$UNIT' '$SECRETS' mujica_jax.train $(shown "${REST[@]}") --run '$RUN_DIRECTORY'"
}

# What became of the run: running, ended, stopped (SIGTERM, which it obeys with status 0), refused (status 2), failed,
# gone (the slice), unreachable
look() {
    local states state
    state=$(resource_state)
    if [ "$state" != ACTIVE ]; then
        echo gone
        return
    fi
    if ! states=$(on_workers all "bash ~/mujica/src/launch/worker.sh state '$UNIT'" 2>/dev/null); then
        echo unreachable
    elif grep -q running <<<"$states"; then
        echo running
    elif grep -qx 'ended 2' <<<"$states"; then
        echo refused
    elif grep -qvx 'ended 0' <<<"$states"; then
        echo failed
    elif ask storage ls "$RUN_DIRECTORY/summary.json" >/dev/null; then # written when all is done
        echo ended
    else
        echo stopped
    fi
}

bring_up() {
    # With &&: where this is a condition, bash does not end at the first failure.
    MUJICA_ENV=$ENV_FILE "$LAUNCH/create.sh" ${DRY_RUN:+--dry-run} "$@" &&
        MUJICA_ENV=$ENV_FILE "$LAUNCH/setup.sh" ${DRY_RUN:+--dry-run}
}

claim
bring_up ${YES:+--yes} || exit 2
begin || unreachable "the run could not be started"
achieved "$RUN runs on $TPU_NAME, in $RUN_DIRECTORY: launch/status.sh, launch/logs.sh --follow; launch/delete.sh ends the bill"
if [ -n "$DETACH$DRY_RUN" ]; then exit 0; fi
trap 'say "$RUN goes on without this program; the same command looks after it again"; exit 130' INT
preemptions=0 failures=0 silent=0
while sleep "$POLL_SECONDS"; do
    became=$(look)
    [ "$became" = unreachable ] || silent=0
    case $became in
        ended)
            say "$RUN has ended: launch/eval.sh scores it, launch/delete.sh ends the bill"
            exit 0
            ;;
        unreachable)
            silent=$((silent + 1))
            say "a worker does not answer ($silent times in a row)"
            [ "$silent" -lt 10 ] || failures=$((failures + 1)) silent=0
            ;;
        gone)
            preemptions=$((preemptions + 1))
            say "$TPU_NAME is preempted: $preemptions of at most $MAX_PREEMPTIONS times"
            if [ "$preemptions" -le "$MAX_PREEMPTIONS" ]; then
                if ! { bring_up --yes --replace && begin; }; then
                    say "$TPU_NAME could not be brought up again: another try in $POLL_SECONDS s"
                fi
            fi
            ;;
        refused)
            on_workers 0 "bash ~/mujica/src/launch/worker.sh log '$UNIT' 2" >&2 || true
            die "$RUN was refused by the program, for the reason above; $TPU_NAME is billed until launch/delete.sh"
            ;;
        stopped)
            sleep "$POLL_SECONDS" # workers end before the state says that their slice is being preempted
            [ "$(resource_state)" = ACTIVE ] || continue
            preemptions=$((preemptions + 1))
            say "$RUN was asked to end and saved where it was: $preemptions of at most $MAX_PREEMPTIONS times"
            [ "$preemptions" -gt "$MAX_PREEMPTIONS" ] || begin || true
            ;;
        failed)
            sleep "$POLL_SECONDS"
            [ "$(resource_state)" = ACTIVE ] || continue
            failures=$((failures + 1))
            say "$RUN failed: $failures of at most $MAX_FAILURES times before it is given up. The last lines of a worker:"
            on_workers 0 "bash ~/mujica/src/launch/worker.sh log '$UNIT' 5" >&2 || true
            [ "$failures" -gt "$MAX_FAILURES" ] || begin || true
            ;;
    esac
    if [ "$failures" -gt "$MAX_FAILURES" ] || [ "$preemptions" -gt "$MAX_PREEMPTIONS" ]; then
        say "error: $RUN is given up after $failures failures and $preemptions preemptions: launch/logs.sh says why; what it saved is in $RUN_DIRECTORY"
        say "$TPU_NAME is billed until launch/delete.sh"
        exit 1
    fi
done
