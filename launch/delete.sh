#!/usr/bin/env bash
# End the run where it is and delete the slices: nothing is billed any more but the bucket. Asks first, unless --yes.
#
#     launch/delete.sh [--dry-run] [--yes] [--env FILE]
. "$(dirname "$0")/common.sh"
common_flags "$@"
[ ${#REST[@]} -eq 0 ] || die "delete.sh knows no ${REST[0]}"
need_gcloud
state=$(resource_state)
if [ "$state" = ABSENT ]; then
    say "there is no $TPU_NAME in $ZONE: nothing is billed but $BUCKET"
    exit 0
fi
confirm "delete $TPU_NAME ($SLICES x $ACCELERATOR_TYPE, $state) in $ZONE? The run in $RUN_DIRECTORY stays." || die "$TPU_NAME stays, and is billed"
if [ "$state" = ACTIVE ]; then # so that the step under way is saved
    on_workers all "bash ~/mujica/src/launch/worker.sh stop 'train-$RUN'" >/dev/null 2>&1 || say "a worker does not answer; what the run saved last is in the bucket"
fi
act compute tpus queued-resources delete "$TPU_NAME" --project="$PROJECT" --zone="$ZONE" --force --quiet || explained "$TPU_NAME could not be deleted"
achieved "$TPU_NAME is deleted"
