"""The engine on a CUDA device: the same `Decoder`, `RaggedBatch` and `KvCache`, arithmetic in 16 bit.

`decoder.py` is the way in. `inputs.py` lays a step's integers out and pads decode steps to fixed sizes,
`attention.py` reads the paged KV (FlashInfer, or gathered for torch's SDPA), `draw.py` draws tokens where the
logits are. Everything but the capture of graphs and FlashInfer also runs on a CPU, which is how it is tested.
"""
