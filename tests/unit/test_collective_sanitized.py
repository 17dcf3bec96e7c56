"""The transports under the thread, address and undefined-behaviour sanitizers (second lane)."""

import os
import random
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
STRESS = ROOT / "tests" / "support" / "collective_stress.cpp"
# A piece may be read over floats that were sent before: the peer answers only to what it has received, which
# goes through the kernel, where the sanitizer does not see it.
EXPECTED = "race:hortator::Link::read\n"


def has(runtime: str) -> bool:
    try:
        found = subprocess.run(
            ["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return os.path.isabs(found.stdout.strip())


@pytest.mark.parametrize(
    ("runtime", "flags"),
    [
        ("libtsan.so", ["-fsanitize=thread", "-Wno-tsan"]),
        ("libasan.so", ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]),
    ],
)
def test_ranks_touch_only_what_is_theirs_at_the_time(runtime, flags, tmp_path):
    if not has(runtime):
        pytest.skip(f"no g++ with {runtime} here")
    program, expected = tmp_path / "stress", tmp_path / "expected"
    sources = f"-I{ROOT / 'services' / 'worker' / 'collective' / 'src'}"
    command = ["g++", "-std=c++20", "-O1", "-g", "-pthread", *flags, sources, str(STRESS), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    expected.write_text(EXPECTED)
    env = os.environ | {"TSAN_OPTIONS": f"suppressions={expected}"}
    seed = random.randrange(1 << 20)
    print("seed", seed)
    done = subprocess.run(
        [program, str(seed), "40"], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.endswith("clean\n"), done.stdout[-4000:] + done.stderr[-8000:]
    assert "WARNING" not in done.stderr, done.stderr[-8000:]
