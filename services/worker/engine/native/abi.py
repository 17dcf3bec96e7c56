"""The structs of `src/pass.h`, `src/decoder.cpp`, `src/matrix.h` and `src/int8.h`, field for field.

That of `src/draw.h` is `services.worker.engine.draw.DRAW`, those of `src/candidates.h` are in
`services.worker.engine.sharded_sampling_looks` and `…_merge`.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p

from services.worker.collective.abi import Exchange

Pointer = c_void_p


class Matrix(Structure):
    _fields_ = (
        ("panels", Pointer),
        ("bias", Pointer),
        ("scale", Pointer),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int64),
    )


class Codes(Structure):
    _fields_ = (("runs", Pointer), ("scales", Pointer))


class Layer(Structure):
    _fields_ = (
        ("input_norm", Pointer),
        ("q_norm", Pointer),
        ("k_norm", Pointer),
        ("post_norm", Pointer),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Model(Structure):
    _fields_ = (
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("layers", c_int64),
        ("block_tokens", c_int64),
        ("half_kv", c_int64),
        ("eps", c_float),
        ("cos", Pointer),
        ("sin", Pointer),
        ("layer", POINTER(Layer)),
        ("embed", Matrix),
        ("head", Matrix),
        ("norm", Pointer),
        ("kv", Pointer),
        ("team", Pointer),
        ("groups", Pointer),
        ("first_id", c_int64),
        ("exchange", POINTER(Exchange)),
    )


class Batch(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("rows", c_int64),
        ("table_width", c_int64),
        ("logits", c_int64),
        ("chunks", c_int64),
        ("first_layer", c_int64),
        ("stop_layer", c_int64),
        ("ids", Pointer),
        ("positions", Pointer),
        ("row_start", Pointer),
        ("table", Pointer),
        ("write_block", Pointer),
        ("write_offset", Pointer),
        ("logit_tokens", Pointer),
        ("chunk_start", Pointer),
    )


class Buffers(Structure):
    _fields_ = (
        ("x", Pointer),
        ("normed", Pointer),
        ("qkv", Pointer),
        ("attended", Pointer),
        ("act", Pointer),
        ("codes", Codes),
    )


class AttentionCall(Structure):
    _fields_ = (
        ("kv", Pointer),
        ("half_kv", c_int64),
        ("layer", c_int64),
        ("layers", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_tokens", c_int64),
        ("rows", c_int64),
        ("table_width", c_int64),
        ("row_start", Pointer),
        ("positions", Pointer),
        ("table", Pointer),
        ("q", Pointer),
        ("out", Pointer),
        ("groups", Pointer),
    )


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the functions' parameter types."""
    library.hortator_forward.argtypes = [POINTER(Model), POINTER(Batch), POINTER(Buffers), Pointer, Pointer]
    library.hortator_forward.restype = c_int64
    library.hortator_muster.argtypes = [c_int64]
    library.hortator_muster.restype = Pointer
    library.hortator_dismiss.argtypes = [Pointer]
    library.hortator_dismiss.restype = None
    library.hortator_pack.argtypes = [Pointer, Pointer, c_int64, POINTER(Matrix)]
    library.hortator_pack.restype = None
    library.hortator_multiply.argtypes = [
        Pointer,
        POINTER(Matrix),
        c_int64,
        Pointer,
        c_int64,
        Pointer,
        c_int64,
        POINTER(Codes),
    ]
    library.hortator_multiply.restype = None
    library.hortator_attend.argtypes = [Pointer, POINTER(AttentionCall)]
    library.hortator_attend.restype = None
    library.hortator_scan.argtypes = [Pointer, Pointer, c_int64, c_int64, c_int64, Pointer, Pointer]
    library.hortator_scan.restype = None
    library.hortator_draw.argtypes = [Pointer, Pointer, c_int64, c_int64, Pointer, c_int64, Pointer]
    library.hortator_draw.restype = None
    library.hortator_look.argtypes = [
        *(Pointer, Pointer, c_int64, c_int64, c_int64),
        *(Pointer, c_int64, Pointer, Pointer),
    ]
    library.hortator_look.restype = None
    library.hortator_decide.argtypes = [
        *(Pointer, Pointer, c_int64, c_int64, Pointer, Pointer, Pointer),
        *(c_int64, c_int64, Pointer),
    ]
    library.hortator_decide.restype = None
    return library
