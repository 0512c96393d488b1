"""From a name to files, and what the files say of themselves. Torch-free: front and engine both read it.

``names.py`` is the catalog, ``fetch.py`` brings a model of it onto the disk, ``files.py`` finds a model there,
``meta.py`` reads its metadata, ``cache.py`` keeps what was derived from it for the next start.
"""

from .cache import cache_dir, cached, code_version, replacing
from .fetch import pull
from .files import ModelFiles, fingerprint, open_gguf, resolve
from .meta import ModelMeta, read_meta
from .names import CATALOG, CatalogEntry

__all__ = [
    "CATALOG",
    "CatalogEntry",
    "ModelFiles",
    "ModelMeta",
    "cache_dir",
    "cached",
    "code_version",
    "fingerprint",
    "open_gguf",
    "pull",
    "read_meta",
    "replacing",
    "resolve",
]
