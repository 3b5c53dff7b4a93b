#!/bin/sh
# What only a GPU can show, in two calls of at most ten minutes each:
#   sh scripts/gpu_calls.sh 1 DATA OUT   the tests on the device, the speed of trainings, recipes
#   sh scripts/gpu_calls.sh 2 DATA OUT   gSASRec and towers for the results page, resumable
# DATA holds ml-1m and ml-1m-sasrec. OUT gets logs and results. PYTHON is an interpreter with torch,
# the package's requirements and those of its tests.
set -u
call=$1 data=$2 out=$3
python=${PYTHON:-python3}
mkdir -p "$out/results"
export BENCHMARK_RESULTS="$out/results"

# Each step has seconds of its own, so that one that hangs leaves time to the others.
step() {
    name=$1 seconds=$2
    shift 2
    started=$(date +%s)
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "$name: exit status $?, $(($(date +%s) - started)) s; $(tail -n 1 "$out/$name.log")"
}

case $call in
1)
    step tests 210 "$python" -m pytest -q -p no:cacheprovider \
        tests/ncr_core/ranking/test_devices.py tests/ncr_core/ranking/test_backends.py \
        tests/ncr_core/training/test_kept_start.py tests/ncr_core/training/test_remembered_users.py
    step training 80 "$python" -m benchmarks.cuda training "$data"
    step epochs 60 "$python" -m benchmarks.cuda epochs "$data"
    step recipes 160 "$python" -m benchmarks.cuda recipes "$data"
    step rank 40 "$python" -m benchmarks.gpu_sweeps rank "$data"
    step ranker 40 "$python" -m benchmarks.cuda ranker "$data" 8
    ;;
2)
    for seed in 0 1 2 3 4; do
        step "seed-$seed" 560 "$python" -m benchmarks.gpu_sweeps "$data" "$out/seed-$seed" "$seed" &
    done
    wait
    ;;
*)
    echo "call 1 or 2, not $call" >&2
    exit 2
    ;;
esac
