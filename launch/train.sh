#!/usr/bin/env bash
# Train on the TPU slices. The script creates the slices and sets them up if necessary, starts the run on every worker,
# and watches it. If a slice is preempted, the script creates it again, and the run continues from its directory in the
# bucket. Ctrl-C ends only the script, and the run continues. Then the same command watches it again.
#
#     launch/train.sh [--dry-run] [--yes] [--env FILE] [--detach] CONFIG [--section.field value ...]
#
# The directory of the run is BUCKET/runs/RUN. --detach starts the run without watching it.
#
# Exit status 0: the run has finished. 1: it failed more than MAX_FAILURES times or was preempted more than
# MAX_PREEMPTIONS times. 2: the user made a mistake.
. "$(dirname "$0")/common.sh"
common_flags "$@"
DETACH=''
if [ "${REST[0]:-}" = --detach ]; then
    DETACH=1
    REST=("${REST[@]:1}")
fi
[ ${#REST[@]} -gt 0 ] || die "no configuration is given: run for example launch/train.sh configs/two_wiki_text_v5e.py [--section.field value ...]"
for word in "${REST[@]}"; do
    [[ $word != --run* ]] || die "$word is given and the run is $RUN_DIRECTORY: leave it out, and change RUN and BUCKET in $ENV_FILE instead"
done
UNIT=train-$RUN
need_gcloud

# The first call with the name of a run stores its command. Later calls with another command are refused.
claim() {
    local words held
    words=$(shown "${REST[@]}")
    if held=$(ASSUMED=$words ask storage cat "$RUN_DIRECTORY/command"); then
        [ "$held" = "$words" ] ||
            die "run $RUN was started with \`$held\` and this command is \`$words\`: choose another RUN in $ENV_FILE, or give the same arguments"
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

# Print the state of the run:
#     running
#     ended          the run is finished
#     stopped        SIGTERM ended the program with status 0
#     refused        the program ended with status 2, because of a mistake of the user
#     failed         the program ended with another status
#     gone           the slice was preempted or deleted
#     unreachable    a worker does not answer
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
    elif ask storage ls "$RUN_DIRECTORY/summary.json" >/dev/null; then
        # A run writes this file last.
        echo ended
    else
        echo stopped
    fi
}

bring_up() {
    # The && is necessary: if this function is called in a condition, `set -e` does not end it at the first failure.
    MUJICA_ENV=$ENV_FILE "$LAUNCH/create.sh" ${DRY_RUN:+--dry-run} "$@" &&
        MUJICA_ENV=$ENV_FILE "$LAUNCH/setup.sh" ${DRY_RUN:+--dry-run}
}

claim
bring_up ${YES:+--yes} || exit 2
begin || unreachable "the run could not be started"
achieved "$RUN runs on $TPU_NAME, in $RUN_DIRECTORY: watch it with launch/status.sh or launch/logs.sh --follow; launch/delete.sh stops the costs"
if [ -n "$DETACH$DRY_RUN" ]; then exit 0; fi
trap 'say "$RUN continues without this script; run the same command again to watch it"; exit 130' INT
preemptions=0 failures=0 silent=0
while sleep "$POLL_SECONDS"; do
    became=$(look)
    [ "$became" = unreachable ] || silent=0
    case $became in
        ended)
            say "$RUN has finished: launch/eval.sh scores it, launch/delete.sh stops the costs"
            exit 0
            ;;
        unreachable)
            silent=$((silent + 1))
            say "a worker does not answer ($silent checks in a row)"
            [ "$silent" -lt 10 ] || failures=$((failures + 1)) silent=0
            ;;
        gone)
            preemptions=$((preemptions + 1))
            say "$TPU_NAME was preempted (preemption $preemptions of at most $MAX_PREEMPTIONS)"
            if [ "$preemptions" -le "$MAX_PREEMPTIONS" ]; then
                if ! { bring_up --yes --replace && begin; }; then
                    say "$TPU_NAME could not be created again: next attempt in $POLL_SECONDS s"
                fi
            fi
            ;;
        refused)
            on_workers 0 "bash ~/mujica/src/launch/worker.sh log '$UNIT' 2" >&2 || true
            die "the program refused to run $RUN, for the reason above; $TPU_NAME costs money until launch/delete.sh deletes it"
            ;;
        stopped)
            # At a preemption the workers end before the state of the slice changes, so check again later.
            sleep "$POLL_SECONDS"
            [ "$(resource_state)" = ACTIVE ] || continue
            preemptions=$((preemptions + 1))
            say "$RUN was asked to end and saved its state (preemption $preemptions of at most $MAX_PREEMPTIONS)"
            [ "$preemptions" -gt "$MAX_PREEMPTIONS" ] || begin || true
            ;;
        failed)
            sleep "$POLL_SECONDS"
            [ "$(resource_state)" = ACTIVE ] || continue
            failures=$((failures + 1))
            say "$RUN failed (failure $failures; more than $MAX_FAILURES end this script). The last lines of a worker:"
            on_workers 0 "bash ~/mujica/src/launch/worker.sh log '$UNIT' 5" >&2 || true
            [ "$failures" -gt "$MAX_FAILURES" ] || begin || true
            ;;
    esac
    if [ "$failures" -gt "$MAX_FAILURES" ] || [ "$preemptions" -gt "$MAX_PREEMPTIONS" ]; then
        say "error: $RUN is not started again after $failures failures and $preemptions preemptions: launch/logs.sh says why; its saved state is in $RUN_DIRECTORY"
        say "$TPU_NAME costs money until launch/delete.sh deletes it"
        exit 1
    fi
done
