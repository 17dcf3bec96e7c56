"""Model folders: the catalogue, the node cache, GGUF import and the checks before anything is loaded.

What a service needs is `resolve(name_or_path) -> ModelFolder`. Only importing a GGUF file needs numpy and
gguf, and only a hub download needs huggingface_hub; both are imported when they are used.
"""

from shared.model.catalog import CATALOG, CatalogModel
from shared.model.errors import ModelError
from shared.model.folder import ModelFolder, open_folder
from shared.model.resolve import resolve

__all__ = ["CATALOG", "CatalogModel", "ModelError", "ModelFolder", "open_folder", "resolve"]
