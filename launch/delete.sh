#!/usr/bin/env bash
# Stop the run, which saves its state, and delete the slices. After that only the bucket costs money. The script asks
# for confirmation, unless --yes is given.
#
#     launch/delete.sh [--dry-run] [--yes] [--env FILE]
. "$(dirname "$0")/common.sh"
common_flags "$@"
[ ${#REST[@]} -eq 0 ] || die "delete.sh has no argument ${REST[0]}: leave it out"
need_gcloud
state=$(resource_state)
if [ "$state" = ABSENT ]; then
    say "there is no $TPU_NAME in $ZONE: only $BUCKET costs money"
    exit 0
fi
confirm "delete $TPU_NAME ($SLICES x $ACCELERATOR_TYPE, $state) in $ZONE? The run in $RUN_DIRECTORY is kept." || die "$TPU_NAME was not deleted and costs money"
if [ "$state" = ACTIVE ]; then
    # Stop the run first, so that it saves its state.
    on_workers all "bash ~/mujica/src/launch/worker.sh stop 'train-$RUN'" >/dev/null 2>&1 || say "a worker does not answer; the last saved state of the run is in the bucket"
fi
act compute tpus queued-resources delete "$TPU_NAME" --project="$PROJECT" --zone="$ZONE" --force --quiet || explained "$TPU_NAME could not be deleted"
achieved "$TPU_NAME is deleted"
