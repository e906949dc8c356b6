#!/usr/bin/env bash
# One call on a machine with a GPU and an image of torch: tests on CUDA, then costs. OUT: a folder.
set -uo pipefail
part=${1:-tests}
export PYTHONPATH=tests:tests/helpers:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if [ "$part" = first ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    (cd /tmp && cp -r "$OLDPWD" source && cd source && timeout 60 python3 -m pip install -q --no-deps --no-build-isolation . 2>&1 | tail -3)
    python3 -c "import bigbatch.kernels._kernels" || export PYTHONPATH=src:$PYTHONPATH
    timeout 150 python3 -m pytest -n 12 -p no:cacheprovider tests/optim/test_gpu_optimizers.py \
        tests/training/test_find_micro_batch.py tests/gradients/test_meter_engines.py \
        tests/statistics/test_no_waiting.py tests/statistics/test_confidence.py \
        tests/data/test_loader_state.py -rfE --durations=5 >"$OUT/tests.txt" 2>&1
    tail -40 "$OUT/tests.txt"
    timeout 270 python3 -m studies.gpu "$OUT/costs.json" --seconds 215 2>"$OUT/costs.err" | cut -c1-400
    tail -5 "$OUT/costs.err"
else
    python3 -c "import bigbatch" 2>/dev/null || export PYTHONPATH=src:$PYTHONPATH
    timeout 100 python3 -m bigbatch advise --budget 50s -o "$OUT/advice.json" -o "$OUT/advice.txt" \
        -m studies.gpu_program 2>&1 | tail -40
    for run in "32 3e-4" "128 6e-4" "512 1.2e-3"; do
        set -- $run
        timeout 60 python3 -m studies.gpu_program --batch "$1" --lr "$2" --seconds 40 --out "$OUT/run-$1.json"
    done
fi
