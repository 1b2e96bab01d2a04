#!/usr/bin/env bash
# Print the state of the slices and of the run, and the costs of the slices so far. For the run, also print its last
# step, its tokens per second, and its newest checkpoint and policy.
#
#     launch/status.sh [--dry-run] [--env FILE]
. "$(dirname "$0")/common.sh"
common_flags "$@"
[ ${#REST[@]} -eq 0 ] || die "status.sh has no argument ${REST[0]}: leave it out"
need_gcloud
state=$(resource_state)
printf 'slices      %s x %s (%s) in %s: %s\n' "$SLICES" "$ACCELERATOR_TYPE" "$PROVISIONING" "$ZONE" "$state"
if [ "$state" = ACTIVE ]; then
    states=$(on_workers all "bash ~/mujica/src/launch/worker.sh state 'train-$RUN'" 2>/dev/null | sort | uniq -c | awk '{ $1 = $1 "x"; print }' | paste -sd ',' -) ||
        states='a worker does not answer'
    printf 'run         %s: %s\n' "$RUN" "${states:-not started}"
fi
field() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^,\"}]*\).*/\1/p" <<<"$2"; }
if lines=$(ASSUMED='' ask storage cat --range=-20000 "$RUN_DIRECTORY/metrics.jsonl"); then
    line=$(grep '"tokens_per_second"' <<<"$lines" | tail -n 1) || true
    [ -z "$line" ] || printf 'learning    %s, step %s, loss %s, %s tokens/s\n' "$(field phase "$line")" "$(field step "$line")" "$(field loss "$line")" "$(field tokens_per_second "$line")"
fi
saved=$(ASSUMED='' ask storage ls "$RUN_DIRECTORY/learning/*/*/COMMITTED" | sort -V | tail -n 1) || saved=''
policy=$(ASSUMED='' ask storage ls "$RUN_DIRECTORY/policies/*/COMMITTED" | sort | tail -n 1) || policy=''
[ -z "$saved" ] || printf 'checkpoint  %s\n' "$(dirname "${saved#"$RUN_DIRECTORY"/}")"
[ -z "$policy" ] || printf 'policy      %s\n' "$(dirname "${policy#"$RUN_DIRECTORY"/}")"
if [ "$state" = ACTIVE ] && count=$(chips); then
    made=$(ASSUMED='' ask compute tpus tpu-vm describe "$(nodes | head -n 1)" --project="$PROJECT" --zone="$ZONE" --format='value(createTime.date(format=%s))') || made=''
    if [[ $made =~ ^[0-9]+$ ]]; then
        awk -v count="$count" -v price="$(price)" -v seconds=$(($(date +%s) - made)) 'BEGIN {
            printf "cost        %.2f dollars since this slice was created (%.1f hours x %d chips x %.2f, launch/prices.tsv)\n", seconds / 3600 * count * price, seconds / 3600, count, price }'
    fi
fi
