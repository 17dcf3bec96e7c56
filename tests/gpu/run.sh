#!/bin/sh
# The GPU lane: tests of the CUDA path, then one table; with two GPUs or more, one of a group of two ranks as
# well. At most 11 minutes; downloads nothing.
#
#   tests/gpu/run.sh [MODEL_FOLDER | tiny | 135m | 1b | 8b] [options of tests/gpu/measure.py]
#
# PYTHON names the interpreter; it needs hortator[worker], pytest and pytest-timeout, and a CUDA build of torch.
set -u
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }

case " $* " in *" -h "* | *" --help "*)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exec "$python" -m tests.gpu.measure --help
esac

"$python" - <<'CHECK' || exit 2
import sys
try:
    import torch, pytest, pytest_timeout, services.worker.engine
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}. Install hortator[worker], pytest and pytest-timeout there, or set PYTHON")
if not torch.cuda.is_available():
    sys.exit(
        f"NO CUDA DEVICE: torch {torch.__version__} sees none; check nvidia-smi and that torch is a CUDA build. "
        "The script itself can be checked without one:\n"
        f"  {sys.executable} -m tests.gpu.measure tiny --device cpu --dtype float32 --seconds 0.1"
    )
CHECK

timeout 200 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider
tests=$?
[ "$tests" -eq 0 ] || echo "tests failed ($tests); the table follows all the same"
timeout 270 "$python" -m tests.gpu.measure "$@"
table=$?
[ "$table" -ne 124 ] || echo "the table took too long: take a smaller model or --seconds 1"
group=0
if "$python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    timeout 170 "$python" -m tests.gpu.tp
    group=$?
else
    echo "one CUDA device: nothing of tensor parallelism was checked"
fi
[ "$tests" -eq 0 ] && [ "$table" -eq 0 ] && [ "$group" -eq 0 ]
