#!/usr/bin/env bash
# Request the TPU slices and wait until they are ready. If an earlier call has already requested them, only wait.
#
#     launch/create.sh [--dry-run] [--yes] [--env FILE] [--no-wait] [--replace]
#
# --no-wait returns without waiting. --replace deletes slices that were preempted or failed, and requests new ones. The
# script checks gcloud, the project, the zone, the accelerator type and the bucket before it creates anything.
. "$(dirname "$0")/common.sh"
common_flags "$@"
WAIT=1 REPLACE=''
for word in ${REST[@]+"${REST[@]}"}; do
    case $word in
        --no-wait) WAIT='' ;;
        --replace) REPLACE=1 ;;
        *) die "create.sh has no flag $word: choose from --no-wait, --replace" ;;
    esac
done

check_project() {
    ASSUMED=$PROJECT ask projects describe "$PROJECT" --format='value(projectId)' >/dev/null ||
        die "project $PROJECT does not exist, or you have no access to it: list your projects with gcloud projects list, then change PROJECT in $ENV_FILE ($(gcloud_error))"
    local enabled
    enabled=$(ASSUMED=tpu.googleapis.com ask services list --enabled --project="$PROJECT" \
        --filter='config.name=tpu.googleapis.com' --format='value(config.name)') || explained "cannot read the services of $PROJECT"
    [ -n "$enabled" ] ||
        die "the Cloud TPU API is not enabled in project $PROJECT: run gcloud services enable tpu.googleapis.com --project $PROJECT"
}

check_type() {
    local types zones
    types=$(ASSUMED=$ACCELERATOR_TYPE ask compute tpus accelerator-types list --project="$PROJECT" --zone="$ZONE" \
        --format='value(type)') || {
        if grep -qiE 'location|zone' "$ERRORS"; then
            zones=$(gcloud compute tpus locations list --project="$PROJECT" --format='value(locationId)' 2>/dev/null | paste -sd ' ' -)
            die "ZONE $ZONE has no TPUs: choose one of $zones"
        fi
        explained "cannot list the accelerator types of $ZONE"
    }
    grep -qx -- "$ACCELERATOR_TYPE" <<<"$types" ||
        die "ZONE $ZONE has no ACCELERATOR_TYPE $ACCELERATOR_TYPE: choose from $(paste -sd ' ' - <<<"$types")"
}

check_bucket() {
    local location region=${ZONE%-*} continent=${ZONE%%-*} column
    location=$(ASSUMED=$region ask storage buckets describe "$BUCKET" --format='value(location)') ||
        die "bucket $BUCKET does not exist, or you have no access to it: run gcloud storage buckets create $BUCKET --location=$region ($(gcloud_error))"
    location=$(tr '[:upper:]' '[:lower:]' <<<"$location")
    if [ "$location" = "$region" ] || [ "$location" = "$continent" ]; then return; fi
    column=3
    [[ $location == "$continent"* ]] || column=4
    confirm "bucket $BUCKET is in $location and the TPUs are in $region: every GB between them costs about $(awk -v column=$column '$1 == "egress" { print $column }' "$LAUNCH/prices.tsv") dollars. Continue?" ||
        die "bucket $BUCKET is in $location and ZONE is $ZONE: create a bucket near the TPUs with gcloud storage buckets create gs://NEW --location=$region and set BUCKET to it, or accept the costs with --yes"
}

request() {
    local words=(--accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION")
    if [ "$SLICES" -eq 1 ]; then
        words+=(--node-id="$TPU_NAME")
    else
        words+=(--node-count="$SLICES" --node-prefix="$TPU_NAME")
    fi
    case $PROVISIONING in
        spot) words+=(--spot) ;;
        reserved) words+=(--reserved) ;;
    esac
    [ -z "$LABELS" ] || words+=(--labels="$LABELS")
    [ -z "$SERVICE_ACCOUNT" ] || words+=(--service-account="$SERVICE_ACCOUNT" --scopes=cloud-platform)
    [ -z "$NETWORK" ] || words+=(--network="$NETWORK")
    [ -z "$SUBNETWORK" ] || words+=(--subnetwork="$SUBNETWORK")
    act compute tpus queued-resources create "$TPU_NAME" --project="$PROJECT" --zone="$ZONE" "${words[@]}" ||
        explained "$TPU_NAME could not be requested"
}

remove() {
    act compute tpus queued-resources delete "$TPU_NAME" --project="$PROJECT" --zone="$ZONE" --force --quiet ||
        explained "$TPU_NAME could not be deleted"
}

need_gcloud
check_project
check_type
check_bucket
state=$(ASSUMED_STATE=ABSENT resource_state)
case $state in
    SUSPENDED | SUSPENDING | FAILED)
        [ -n "$REPLACE" ] || confirm "$TPU_NAME is $state. Delete it and request it again?" ||
            die "$TPU_NAME is $state: launch/delete.sh deletes it, launch/create.sh --replace deletes it and requests it again"
        remove
        state=ABSENT
        ;;
esac
if [ "$state" = ABSENT ]; then
    request
    if count=$(chips); then
        say "requested $SLICES x $ACCELERATOR_TYPE ($PROVISIONING): $count chips, about $(awk -v count="$count" -v price="$(price)" 'BEGIN { printf "%.2f", count * price }') dollars an hour as soon as they are ready (launch/prices.tsv); launch/delete.sh stops the costs"
    fi
    rule="{\"rule\": [{\"action\": {\"type\": \"Delete\"}, \"condition\": {\"age\": 30, \"matchesPrefix\": [\"runs/$RUN/learning/\"]}}]}"
    say "checkpoints in the bucket are billed until they are deleted; to delete those of this run after 30 days: echo '$rule' > rule.json; gcloud storage buckets update $BUCKET --lifecycle-file=rule.json --clear-soft-delete"
else
    say "$TPU_NAME exists already: $state"
fi
if [ -z "$WAIT" ] || [ -n "$DRY_RUN" ]; then exit 0; fi
shown_state=
while state=$(resource_state) && [ "$state" != ACTIVE ]; do
    case $state in
        FAILED | SUSPENDED | ABSENT)
            die "$TPU_NAME became $state before it was ready: gcloud compute tpus queued-resources describe $TPU_NAME --zone=$ZONE --project=$PROJECT says why; launch/create.sh --replace requests it again" ;;
    esac
    [ "$state" = "$shown_state" ] || say "$TPU_NAME: $state"
    shown_state=$state
    sleep "$POLL_SECONDS"
done
say "$TPU_NAME: ACTIVE"
