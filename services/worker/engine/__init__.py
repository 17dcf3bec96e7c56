"""The inference engine of one rank: config, weights, paged KV, forward pass, sampler, executor.

The only package that computes. `executor.py` is the way in (`TorchExecutor` implements
`services.worker.step.Executor`); `decoder.py` is the reference path in plain torch, `native/` the faster one
on CPUs, `cuda/` the one of NVIDIA GPUs.
"""
