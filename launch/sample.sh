#!/usr/bin/env bash
# Sample trajectories for a training run, on every slice that the environment file names. The slices may be preempted at
# any time.
#
#     launch/sample.sh [--dry-run] [--env FILE] [flags of python -m mujica_jax.sample]
#
# The trainer must run with --sampling.workers external. The samplers need a separate environment file with the
# trainer's BUCKET and RUN, and with another TPU_NAME. PROVISIONING may be spot. Each host runs one process, so every
# slice must have a single host. SLICES may be any number.
. "$(dirname "$0")/common.sh"
common_flags "$@"
need_gcloud
need_active
words=$(shown ${REST[@]+"${REST[@]}"})
on_workers all "bash ~/mujica/src/launch/worker.sh start 'sample-$RUN' '$SECRETS' mujica_jax.sample --run '$RUN_DIRECTORY' $words" ||
    unreachable "the workers could not be started"
say "the workers sample for $RUN_DIRECTORY until the run is finished; launch/delete.sh ends them, and finished samples are kept"
