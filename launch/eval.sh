#!/usr/bin/env bash
# Evaluate the run on all workers. The results are written to the folder eval-launch of the run, in the bucket.
#
#     launch/eval.sh [--dry-run] [--env FILE] [CONFIG] [--section.field value ...]
#
# Without CONFIG the run's own configuration is used. The script prints the output of python -m mujica_jax.eval.
. "$(dirname "$0")/common.sh"
common_flags "$@"
need_gcloud
need_active
words=$(shown ${REST[@]+"${REST[@]}"})
on_workers all "cd ~/mujica && venv/bin/python -m mujica_jax.eval $words --checkpoint '$RUN_DIRECTORY' --out '$RUN_DIRECTORY/eval-launch'" ||
    unreachable "the evaluation failed"
