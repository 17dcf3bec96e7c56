"""Where tensors live and how a linear layer is computed there: all that differs between CPU and CUDA."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from services.worker.engine.formats import (
    WeightFormat,
    dequantize,
    quantize,
    quantize_groups,
    rounded,
    weight_format,
)

Linear = Callable[[torch.Tensor], torch.Tensor]

CUDA_DTYPES = ("float32", "float16", "bfloat16")


class Device:
    """One torch device. `weight_dtype` is a weight format (`formats.py`) on CPUs; activations are float32."""

    def __init__(self, name: str, weight_dtype: str) -> None:
        try:
            self.torch = torch.device(name)
        except RuntimeError:
            raise ValueError(
                f"--device {name} is none; take cpu, cuda or one of several, as cuda:1"
            ) from None
        if self.torch.type not in ("cpu", "cuda"):
            raise ValueError(f"--device {name}: models are computed on cpu and cuda only")
        if weight_dtype == "bfloat16" and self.torch.type != "cuda":
            raise ValueError(
                f"--dtype bfloat16 is computed on CUDA devices only, not on {name}: take float16, as "
                "small, or --device cuda"
            )
        if self.torch.type != "cuda":
            self._form: WeightFormat | None = weight_format(weight_dtype)
        elif weight_dtype in CUDA_DTYPES:
            self._form = None
        else:
            raise ValueError(f"--dtype {weight_dtype} on {name}: choose one of {', '.join(CUDA_DTYPES)}")
        if self.torch.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"--device {name}: torch {torch.__version__} sees no CUDA device here; check nvidia-smi and "
                "that torch is a CUDA build, or take --device cpu"
            )
        if self.torch.type == "cuda" and (self.torch.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device {name}: cuda:{torch.cuda.device_count() - 1} is the last one here")
        self.weight_dtype = weight_dtype

    @property
    def form(self) -> WeightFormat:
        """How matrices are kept on a CPU."""
        if self._form is None:
            raise ValueError(f"{self.torch} keeps matrices as {self.weight_dtype} tensors")
        return self._form

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.torch)

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [vocab, hidden] float32 for looking rows up: the values the format keeps, float32."""
        return self.tensor(weight if self._form is None else rounded(weight, self._form))

    def index(self, value: NDArray[np.int32]) -> torch.Tensor:
        """An index array as int64 on the device."""
        return torch.from_numpy(value.astype(np.int64)).to(self.torch, non_blocking=True)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """x [rows, in] → x · weightᵀ + bias [rows, out], both float32. `weight` is [out, in] float32."""
        if self._form is not None and self._form.top is not None:
            return _int8_linear(weight, bias, self._form)
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


def _int8_linear(weight: torch.Tensor, bias: torch.Tensor | None, form: WeightFormat) -> Linear:
    """The reference of int8 arithmetic: what codes stand for, multiplied in float32."""
    assert form.top is not None
    codes, scales = quantize(weight, form.top)
    inputs = weight.shape[1]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if form.dynamic:
            x_codes, x_scales = quantize_groups(x)
            x = dequantize(x_codes.view(*x_scales.shape, -1), x_scales).view(len(x), -1)[:, :inputs]
        product = F.linear(x, codes.float()) * scales
        return product if bias is None else product + bias

    return multiply
