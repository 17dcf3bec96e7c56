"""The counter-based uniform behind every drawn token: same (seed, choice, index), same number, everywhere.

splitmix64 (Steele, Lea, Flood 2014) finalises each key in turn:

    x = mix(seed + GOLDEN); x = mix((x ^ choice) + GOLDEN); x = mix((x ^ index) + GOLDEN)
    uniform = (x >> 11) * 2**-53                      in [0, 1)

Test vectors: tests/unit/test_sampler_uniform.py.
"""

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: U64, choices: U64, indices: U64) -> NDArray[np.float64]:
    """One uniform in [0, 1) per row; `indices` counts output tokens from 0."""
    with np.errstate(over="ignore"):
        x = _mix(seeds + _GOLDEN)
        x = _mix((x ^ choices) + _GOLDEN)
        x = _mix((x ^ indices) + _GOLDEN)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
