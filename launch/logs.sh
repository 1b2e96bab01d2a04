#!/usr/bin/env bash
# What a run printed: the last lines of one worker or of all.
#
#     launch/logs.sh [--dry-run] [--env FILE] [--worker NUMBER|all] [--lines 50] [--follow]
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
        *) die "logs.sh knows no $1: --worker, --lines, --follow" ;;
    esac
    shift
done
[[ $worker == all || $worker =~ ^[0-9]+$ ]] || die "--worker is $worker: a number or all"
[[ $lines =~ ^[0-9]+$ ]] || die "--lines is $lines: a number"
need_gcloud
need_active
on_workers "$worker" "bash ~/mujica/src/launch/worker.sh log 'train-$RUN' $lines $follow" || unreachable "the log could not be read"
