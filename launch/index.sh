#!/usr/bin/env bash
# Build an index on the first worker and copy it to BUCKET/indexes/NAME. The setting FETCH can copy it to every worker.
#
#     launch/index.sh [--dry-run] [--env FILE] NAME [flags of python -m mujica_jax.index build]
#
# Example: launch/index.sh two_wiki --corpus data/corpus_6119.json.gz --kind scann
#
# Without --kind, a corpus of more than 100,000 passages becomes a ScaNN index, and a smaller one an exact index. The
# build is one process on one host. The slice must have a single host, because JAX cannot use the chips of one host of a
# larger slice alone.
. "$(dirname "$0")/common.sh"
common_flags "$@"
[ ${#REST[@]} -ge 2 ] || usage
[[ ${REST[0]} =~ ^[A-Za-z0-9._-]+$ ]] || die "the name of the index is ${REST[0]} and may only contain letters, digits, '.', '_' and '-'"
need_gcloud
need_active
words=$(shown "${REST[@]:1}")
on_workers 0 "mkdir -p ~/mujica/indexes && cd ~/mujica && venv/bin/python -m mujica_jax.index build $words --out 'indexes/${REST[0]}' && gcloud storage rsync --recursive 'indexes/${REST[0]}' '$BUCKET/indexes/${REST[0]}'" ||
    unreachable "the index could not be built"
