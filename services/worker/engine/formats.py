"""Formats of a model's matrices, embedding and head included: names, sizes, and the arithmetic of int8 ones.

Norms, biases, scales and KV do not belong to them. What is written here in torch is the reference that the
native kernels are tested against.
"""

from dataclasses import dataclass

import torch

GROUP = 64
"""Consecutive activations that share a scale when they are quantised."""
ACTIVATION_TOP = 127
"""Largest code of a quantised activation."""


@dataclass(frozen=True)
class WeightFormat:
    """One way to keep weights; activations and results are float32 in all of them."""

    name: str
    code: int
    """Its number in `native/src/formats.h`."""
    bytes: int
    """Per weight."""
    top: int | None = None
    """Largest code of a weight quantised per output channel; None: weights are floats."""
    dynamic: bool = False
    """Whether activations are quantised too, token by token, so that products are those of integers."""

    @property
    def alignment(self) -> int:
        """Inputs are padded with zeros to a multiple of this where kernels store the weights."""
        return GROUP if self.dynamic else 1


FORMATS = {
    f.name: f
    for f in (
        WeightFormat("float32", 0, 4),
        WeightFormat("float16", 1, 2),
        WeightFormat("int8", 2, 1, top=127),
        # 7 bits: four products of such a weight and an 8-bit activation still fit into 16 bits, which saves
        # a third of the multiplications of the widest integer instructions that AVX2 has.
        WeightFormat("int8-dynamic", 3, 1, top=63, dynamic=True),
    )
}


def weight_format(name: str) -> WeightFormat:
    """The format called `name`. Raises ValueError for one that is none."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"--dtype {name}: choose one of {', '.join(FORMATS)}") from None


def quantize(values: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8, scales float32) of each row of `values` [n, k]: value = code · scale, |code| ≤ top.

    The scale of a row with a value that is not finite is NaN, so that whatever it touches shows it.
    """
    largest = values.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest / top, torch.nan)
    # Not top / largest: torch rounds that twice, by way of the reciprocal.
    factor = torch.where(largest > 0, torch.full_like(largest, top) / largest, 0.0)
    codes = (values * factor[..., None]).round().nan_to_num(0.0, 0.0, 0.0)
    return codes.to(torch.int8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [n, k] float32 of `quantize`."""
    return codes.float() * scales[..., None]


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [m, k rounded up], scales [m, groups]) of x [m, k], each `GROUP` of a row by itself."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP))
    codes, scales = quantize(padded.view(len(x), -1, GROUP), ACTIVATION_TOP)
    return codes.view(padded.shape), scales


def rounded(weight: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """`weight` [n, k] float32 as this format keeps it."""
    if form.top is not None:
        return dequantize(*quantize(weight, form.top))
    return weight.half().float() if form.bytes == 2 else weight
