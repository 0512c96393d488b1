"""Fixtures for every room."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import catalog
from forebay.config import PathSettings
from forebay.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_model() -> catalog.ModelFiles:
    """The real demo model, in the user's own data folder: fetched once, then found there."""
    return catalog.pull("smollm2-135m-instruct", PathSettings().data_dir)


@pytest.fixture(scope="session")
def demo_meta(demo_model: catalog.ModelFiles) -> catalog.ModelMeta:
    return catalog.read_meta(demo_model)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: catalog.ModelFiles, demo_meta: catalog.ModelMeta) -> Tokenizer:
    return Tokenizer.load(demo_model, demo_meta)


@pytest.fixture(scope="session")
def demo_judge(demo_model: catalog.ModelFiles) -> Any:
    """The demo model's tokenizer as transformers reads it (without the digit split, which its conversion omits)."""
    import transformers  # noqa: PLC0415 - seconds, and few tests need it

    return transformers.AutoTokenizer.from_pretrained(str(demo_model.path.parent), gguf_file=demo_model.path.name)
