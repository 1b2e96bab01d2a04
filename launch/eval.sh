#!/usr/bin/env bash
# Score a run on the first worker and bring its result to the bucket, below the run.
#
#     launch/eval.sh [--dry-run] [--env FILE] [CONFIG] [--section.field value ...]
#
# Without CONFIG the run's own configuration counts. The output is that of python -m mujica_jax.eval.
# One process on one host: the slice has to be of a single host, whose chips answer without the others.
. "$(dirname "$0")/common.sh"
common_flags "$@"
need_gcloud
need_active
words=$(shown ${REST[@]+"${REST[@]}"})
on_workers 0 "cd ~/mujica && venv/bin/python -m mujica_jax.eval $words --checkpoint '$RUN_DIRECTORY' --out eval-out && gcloud storage cp --recursive eval-out/* '$RUN_DIRECTORY/eval-launch/'" ||
    unreachable "the evaluation failed"
