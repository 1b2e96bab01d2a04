#!/usr/bin/env bash
# Sample for a run that a trainer leads, on every slice of this environment file: workers that may be preempted.
#
#     launch/sample.sh [--dry-run] [--env FILE] [flags of python -m mujica_jax.sample]
#
# Give the samplers an environment file of their own: the trainer's BUCKET and RUN, another TPU_NAME, spot. The trainer
# runs with --sampling.workers external. One process a host: slices of a single host each, of which SLICES may be many.
. "$(dirname "$0")/common.sh"
common_flags "$@"
need_gcloud
need_active
words=$(shown ${REST[@]+"${REST[@]}"})
on_workers all "bash ~/mujica/src/launch/worker.sh start 'sample-$RUN' '$SECRETS' mujica_jax.sample --run '$RUN_DIRECTORY' $words" ||
    unreachable "the workers could not be started"
say "they sample for $RUN_DIRECTORY until it is finished; launch/delete.sh ends them, and what they played is kept"
