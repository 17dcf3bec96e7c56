"""The structs of `src/exchange.h`, field for field."""

from ctypes import CFUNCTYPE, POINTER, Structure, c_int64, c_void_p

MOST_RANKS = 64
SUM, GATHER = 0, 1


class Landed(Structure):
    _fields_ = (("parts", c_int64), ("part", c_void_p * MOST_RANKS))


ROOM = CFUNCTYPE(c_void_p, c_void_p, c_int64, c_int64)
BEGIN = CFUNCTYPE(None, c_void_p)
LAND = CFUNCTYPE(None, c_void_p, POINTER(Landed))
RELEASE = CFUNCTYPE(None, c_void_p)


class Exchange(Structure):
    _fields_ = (
        ("self", c_void_p),
        ("rank", c_int64),
        ("size", c_int64),
        ("most_floats", c_int64),
        ("room", ROOM),
        ("begin", BEGIN),
        ("land", LAND),
        ("release", RELEASE),
    )
