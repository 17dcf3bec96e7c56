"""The engine on a CUDA device: the same `Decoder`, `RaggedBatch` and `KvCache`, arithmetic in 16 bit.

`decoder.py` is the way in. `inputs.py` lays a step's integers out and pads decode steps to fixed sizes,
`attention.py` reads the paged KV (FlashInfer, or gathered for torch's SDPA), `draw.py` draws tokens where the
logits are. Of a group of ranks, `group.py` forms what sums tensors, `planning.py` measures into how many
`chunks.py` a prompt is cut, `sums.py` has their sums travel meanwhile. Everything but the capture of graphs,
second streams and FlashInfer also runs on a CPU, which is how it is tested.
"""
