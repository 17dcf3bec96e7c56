"""How GGUF files store tensors: block sizes of every type that the installed package gguf knows."""

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True)
class TensorType:
    """A storage type: `block_values` values take `block_bytes` bytes."""

    code: int
    name: str
    block_values: int
    block_bytes: int

    def bytes_of(self, values: int) -> int:
        return values // self.block_values * self.block_bytes

    @property
    def kept_as(self) -> str:
        """The safetensors type that holds its values exactly: 16 bit where they are 16 bit, else float32."""
        return self.name if self.name in ("F16", "BF16") else "F32"


_TYPES = {
    int(kind): TensorType(int(kind), kind.name, *GGML_QUANT_SIZES[kind])
    for kind in GGMLQuantizationType
    if kind in GGML_QUANT_SIZES
}


def tensor_type(code: int) -> TensorType | None:
    return _TYPES.get(code)
