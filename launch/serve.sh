#!/usr/bin/env bash
# Serve the latest policy of the run and its agent from the first worker: a page, and OpenAI's interface. The server outlives the ssh session.
#
#     launch/serve.sh [--dry-run] [--env FILE] [flags of python -m mujica_jax.serve]
#
# The server accepts connections only from its own machine. The script prints a command that forwards the port to your
# machine. The server is one process on one host. The slice must have a single host, because JAX cannot use the chips of
# one host of a larger slice alone.
. "$(dirname "$0")/common.sh"
common_flags "$@"
need_gcloud
need_active
words=$(shown ${REST[@]+"${REST[@]}"})
on_workers 0 "bash ~/mujica/src/launch/worker.sh start 'serve-$RUN' '$SECRETS' mujica_jax.serve '$RUN_DIRECTORY' $words" ||
    unreachable "the server could not be started"
node=$(nodes | head -n 1)
say "to forward the port to this machine, run: gcloud compute tpus tpu-vm ssh $node --project=$PROJECT --zone=$ZONE --worker=0 -- -L 8000:localhost:8000"
