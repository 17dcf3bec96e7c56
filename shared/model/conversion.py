"""Which conversion a folder of the cache is: of which file, by which version of the converter."""

import re

from shared.model.catalog import CATALOG, CatalogModel
from shared.model.manifest import Manifest

CONVERTER = 2
"""Version of what importing a GGUF file writes. Whoever changes a byte of that counts it up (and the
catalogue's own numbers, where a model of the catalogue comes out different).

1: everything float32. 2: values of 16 bits stay so.
"""


def key_of_file(name: str, digest: str) -> str:
    """The cache's folder for a file of that SHA-256, converted by this version."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{name}-{digest[:12]}-v{CONVERTER}").lstrip(".")


def key_of_catalog(model: CatalogModel) -> str:
    """The cache's folder for a known model; its plain name as long as the first converter's output stands."""
    return model.name if model.converter == 1 else f"{model.name}-v{model.converter}"


def is_stale(folder_name: str, manifest: Manifest) -> bool:
    """Whether this version of the program would convert the model anew instead of serving the folder."""
    known = next(
        (m for m in CATALOG if m.name == manifest.name and manifest.source.startswith("pypi ")), None
    )
    if known:
        return folder_name != key_of_catalog(known) or manifest.converter < known.converter
    return manifest.source.startswith("gguf ") and manifest.converter != CONVERTER
