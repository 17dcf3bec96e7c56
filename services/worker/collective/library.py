"""The compiled transports: the functions of `src/collective.cpp`, typed."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_void_p

from services.worker.collective.abi import Exchange
from services.worker.engine.native import build

SIZE_CLASSES = 40
ALGORITHMS = ("one-shot", "two-shot", "direct", "ring", "tree", "scatter")
"""By their numbers in `src/program.h`."""


class Setup(Structure):
    """`Setup` of `src/group.h`."""

    _fields_ = (
        ("rank", c_int64),
        ("size", c_int64),
        ("memory", c_int64),
        ("peer", POINTER(c_int32)),
        ("most_floats", c_int64),
        ("spin_s", c_double),
        ("limit_s", c_double),
        ("core", POINTER(c_int32)),
        ("cores", c_int64),
    )


class Count(Structure):
    """`Count` of `src/group.h`."""

    _fields_ = (
        ("messages", c_int64),
        ("bytes", c_int64),
        ("exposed_s", c_double),
        ("fastest_s", c_double * SIZE_CLASSES),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Loaded, compiled first if need be. Raises `KernelsUnavailable`."""
    loaded = build.load(build.COLLECTIVE)
    for name, result, *arguments in (
        ("region_bytes", c_int64, c_int64, c_int64),
        ("open", c_void_p, POINTER(Setup), c_char_p, c_int64),
        ("close", None, c_void_p),
        ("exchange", None, c_void_p, POINTER(Exchange)),
        ("all_reduce", c_int32, c_void_p, c_void_p, c_int64),
        ("gather", c_int32, c_void_p, c_void_p, c_int64, c_void_p),
        ("check", c_int32, c_void_p),
        ("limit", None, c_void_p, c_double),
        ("table", None, c_void_p, c_void_p, c_void_p, c_int64),
        ("counts", None, c_void_p, POINTER(Count), c_int32),
        ("time", c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p),
        ("busy", c_double, c_void_p),
        ("lose", None, c_void_p, c_char_p),
        ("reason", None, c_void_p, c_char_p, c_int64),
    ):
        function = getattr(loaded, f"hortator_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded
