"""Rotary position tables, computed exactly as transformers does (float32 throughout)."""

import math

import torch

from services.worker.engine.config import ModelConfig


def rope_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_len, head_dim / 2], float32. Dimension i is paired with i + head_dim / 2."""
    dim = config.head_dim
    inverse = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if config.rope_llama3 is not None:
        inverse = _llama3(inverse, config)
    angles = torch.arange(config.max_len, dtype=torch.float32)[:, None] * inverse[None, :]
    return angles.cos(), angles.sin()


def _llama3(inverse: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, smoothly blended between."""
    s = config.rope_llama3
    assert s is not None
    wavelength = 2 * math.pi / inverse
    smooth = (s.original_max_len / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blended = (1 - smooth) * inverse / s.factor + smooth * inverse
    scaled = torch.where(wavelength > s.original_max_len / s.low_freq_factor, inverse / s.factor, inverse)
    medium = (wavelength >= s.original_max_len / s.high_freq_factor) & (
        wavelength <= s.original_max_len / s.low_freq_factor
    )
    return torch.where(medium, blended, scaled)
