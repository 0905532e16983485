#!/usr/bin/env bash
# Test and measure on a GPU, in at most 8 minutes: first the tests of compile_tests/gpu, then scripts/bench.py,
# the most important setting first. Needs a python with torch, transformers, safetensors, einops, numpy, pytest
# and hypothesis, and no network.
#
#   scripts/gpu_check.sh [FILE]      write one results file (default: benchmarks/NAME-OF-THE-GPU.json)
#
# A part that fails or takes too long does not stop later ones. The exit code is 0 if every part passed.
# Environment variables, for other machines and for rehearsals: PYTHON, DEVICE, SHAPE, CONTEXTS, BATCHES,
# SECONDS_IN_ALL and BENCH_ARGS (more arguments for bench.py).
set -uo pipefail

python=${PYTHON:-python3}
"$python" -c "import torch, pytest" || { echo "error: $python has no torch or no pytest; set PYTHON" >&2; exit 2; }
device=${DEVICE:-cuda}
shape=${SHAPE:-llama-3.1-8b}
contexts=${CONTEXTS:-65536 32768 16384}
batches=${BATCHES:-1 16}
read -ra more <<< "${BENCH_ARGS:-}"
file=${1:-}
[[ -z $file || $file == /* ]] || file=$PWD/$file
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
deadline=$((SECONDS + ${SECONDS_IN_ALL:-470}))

part() { # NAME SECONDS COMMAND...: run it within its limit and the total; record how it went
    local name=$1 limit=$2 left=$((deadline - SECONDS)) begin=$SECONDS code
    shift 2
    ((limit <= left)) || limit=$left
    echo "--- $name, at most $((limit > 0 ? limit : 0)) s" >&2
    if ((limit >= 5)); then
        timeout --kill-after=5 "$limit" "$@" > "$work/$name.log" 2>&1
        code=$?
    else
        echo "no time was left" > "$work/$name.log"
        code=124
    fi
    tail -n 40 "$work/$name.log" >&2
    printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - begin))" >> "$work/parts.tsv"
}

bench() { # NAME SECONDS ARGUMENTS...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" scripts/bench.py --shape "$shape" --device "$device" --against none \
        --skip-prefill --blocks 5 --out "$work/$name.json" "$@" "${more[@]}"
}

part tests 170 "$python" -m pytest compile_tests/gpu -q -p no:cacheprovider
first=${contexts%% *}
for context in $contexts; do
    for batch in $batches; do
        bench "context-$context-batch-$batch" 110 --context "$context" --batch "$batch"
    done
    if [[ $context == "$first" ]]; then
        bench profile 110 --context "$first" --policies inertiakv --profile
    fi
done
bench dense 80 --context "$first" --policies inertiakv,score_free --attention dense
bench compile-times 110 --context "$first" --policies lazy4 --compile-times

"$python" -m inertiakv.scripts.benchmarking.combine "$work" "$device" "$file"
