#!/usr/bin/env bash
# Score a run on all workers; the result lies below the run in the bucket.
#
#     launch/eval.sh [--dry-run] [--env FILE] [CONFIG] [--section.field value ...]
#
# Without CONFIG the run's own configuration counts. The output is that of python -m mujica_jax.eval.
. "$(dirname "$0")/common.sh"
common_flags "$@"
need_gcloud
need_active
words=$(shown ${REST[@]+"${REST[@]}"})
on_workers all "cd ~/mujica && venv/bin/python -m mujica_jax.eval $words --checkpoint '$RUN_DIRECTORY' --out '$RUN_DIRECTORY/eval-launch'" ||
    unreachable "the evaluation failed"
