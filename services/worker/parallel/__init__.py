"""Tensor parallelism as pure logic: how a model is split, what communication costs, what pays (design §7)."""
