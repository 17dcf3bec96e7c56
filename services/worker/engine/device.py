"""Where tensors live and how a linear layer is computed there: all that differs between CPU and CUDA."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

Linear = Callable[[torch.Tensor], torch.Tensor]

WEIGHT_DTYPES = ("float32", "float16")
CUDA_DTYPES = (*WEIGHT_DTYPES, "bfloat16")


class Device:
    """One torch device. `weight_dtype` float16 keeps matrices at 16 bit; activations are float32."""

    def __init__(self, name: str, weight_dtype: str) -> None:
        self.torch = torch.device(name)
        if weight_dtype == "bfloat16" and self.torch.type != "cuda":
            raise ValueError(
                f"--dtype bfloat16 is computed on CUDA devices only, not on {name}: take float16, as "
                "small, or --device cuda"
            )
        known = CUDA_DTYPES if self.torch.type == "cuda" else WEIGHT_DTYPES
        if weight_dtype not in known:
            raise ValueError(f"--dtype {weight_dtype}: choose one of {', '.join(known)}")
        if self.torch.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"--device {name}: torch {torch.__version__} sees no CUDA device here; check nvidia-smi and "
                "that torch is a CUDA build, or take --device cpu"
            )
        self.weight_dtype = weight_dtype

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.torch)

    def index(self, value: NDArray[np.int32]) -> torch.Tensor:
        """An index array as int64 on the device."""
        return torch.from_numpy(value.astype(np.int64)).to(self.torch, non_blocking=True)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """x [rows, in] → x · weightᵀ + bias [rows, out], both float32. `weight` is [out, in] float32."""
        if self.weight_dtype == "float32":
            w, b = self.tensor(weight), None if bias is None else self.tensor(bias)
            return lambda x: F.linear(x, w, b)
        if self.torch.type == "cpu":
            # 16-bit weights, float32 arithmetic (FBGEMM); stock half-precision matmul is far slower here.
            packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
            return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)
        dtype = getattr(torch, self.weight_dtype)
        half, half_bias = self.tensor(weight).to(dtype), None if bias is None else self.tensor(bias).to(dtype)
        return lambda x: F.linear(x.to(dtype), half, half_bias).float()
