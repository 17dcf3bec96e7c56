"""The forward pass in C++ for CPUs with AVX2: one call per step, sources in `src/`.

`build.py` compiles and loads them, `abi.py` mirrors their structs, `decoder.py` is the `Decoder` on top.
"""
