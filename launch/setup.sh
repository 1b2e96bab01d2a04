#!/usr/bin/env bash
# Install this checkout on every worker: a virtual environment, requirements.txt, the package with its extras, and the
# folders of FETCH.
# The script checks that every worker sees its chips. If the same checkout is already installed, it installs nothing.
#
#     launch/setup.sh [--dry-run] [--env FILE]
. "$(dirname "$0")/common.sh"
common_flags "$@"
[ ${#REST[@]} -eq 0 ] || die "setup.sh has no argument ${REST[0]}: leave it out"
need_gcloud
need_active
files() { (cd "$ROOT" && find mujica_jax configs launch pyproject.toml requirements.txt README.md LICENSE -type f ! -name '*.pyc' ! -name env | LC_ALL=C sort); }
id=$( (cd "$ROOT" && files | tr '\n' '\0' | xargs -0 cksum) | cksum | tr ' ' -)-$EXTRAS
if [ -z "$DRY_RUN" ] && on_workers all "test \"\$(cat ~/mujica/installed 2>/dev/null)\" = '$id'" >/dev/null 2>&1; then
    say "this checkout is installed on all workers"
else
    archive=$(mktemp)
    trap 'rm -f "$ERRORS" "$archive"' EXIT
    (cd "$ROOT" && files | tar -czf "$archive" -T -)
    while read -r node; do
        act compute tpus tpu-vm scp "$archive" "$node:mujica.tar.gz" --project="$PROJECT" --zone="$ZONE" --worker=all --quiet </dev/null ||
            unreachable "the checkout could not be copied"
    done < <(nodes)
    on_workers all "rm -rf ~/mujica/src && mkdir -p ~/mujica/src && tar -xzf ~/mujica.tar.gz -C ~/mujica/src && bash ~/mujica/src/launch/worker.sh install '$id' '$EXTRAS' '$PLATFORM'" ||
        unreachable "the installation failed"
fi
if [ -n "$FETCH" ]; then
    on_workers all "bash ~/mujica/src/launch/worker.sh fetch $FETCH" || unreachable "the folders of FETCH could not be copied"
fi
achieved "$TPU_NAME is set up: start a run with launch/train.sh CONFIG [flags]"
