#!/usr/bin/env bash
# Print the last lines of a run's log, of one worker or of all workers.
#
#     launch/logs.sh [--dry-run] [--env FILE] [--worker NUMBER|all] [--lines 50] [--follow]
#
# --follow also prints new lines as they come.
. "$(dirname "$0")/common.sh"
common_flags "$@"
worker=0 lines=50 follow=''
set -- ${REST[@]+"${REST[@]}"}
while [ $# -gt 0 ]; do
    case $1 in
        --worker | --lines)
            [ $# -gt 1 ] || die "$1 needs a value"
            [ "$1" = --lines ] || worker=$2
            [ "$1" = --worker ] || lines=$2
            shift
            ;;
        --follow) follow=follow ;;
        *) die "logs.sh has no flag $1: choose from --worker, --lines, --follow" ;;
    esac
    shift
done
[[ $worker == all || $worker =~ ^[0-9]+$ ]] || die "--worker is $worker and must be a number or all"
[[ $lines =~ ^[0-9]+$ ]] || die "--lines is $lines and must be a number"
need_gcloud
need_active
on_workers "$worker" "bash ~/mujica/src/launch/worker.sh log 'train-$RUN' $lines $follow" || unreachable "the log could not be read"
