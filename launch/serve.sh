#!/usr/bin/env bash
# Serve the latest policy of the run over gRPC from the first worker, as a unit that outlives the ssh session.
#
#     launch/serve.sh [--dry-run] [--env FILE] [flags of python -m mujica_jax.serve]
#
# It listens on the worker alone; what is printed at the end brings the port here.
# One process on one host: the slice has to be of a single host, whose chips answer without the others.
. "$(dirname "$0")/common.sh"
common_flags "$@"
need_gcloud
need_active
words=$(shown ${REST[@]+"${REST[@]}"})
on_workers 0 "bash ~/mujica/src/launch/worker.sh start 'serve-$RUN' '$SECRETS' mujica_jax.serve --checkpoint '$RUN_DIRECTORY' $words" ||
    unreachable "the server could not be started"
node=$(nodes | head -n 1)
say "from here: gcloud compute tpus tpu-vm ssh $node --project=$PROJECT --zone=$ZONE --worker=0 -- -L 9000:localhost:9000"
