"""Tiny random models, and transformers as the judge of them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, TINY, Judge, save_tiny

from forebay.catalog import ModelFiles
from forebay.config import EngineSettings
from forebay.engine.loop import Engine
from forebay.engine.process import load

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", params=[*TINY, *FAMILIES])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, Judge]:
    """Each tiny model in turn."""
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, Judge]:
    """One tiny model, where the kind of model does not matter."""
    return save_tiny("gqa", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def demo_transformers(demo_model: ModelFiles) -> Judge:
    return Judge.of_gguf(demo_model.path)


@pytest.fixture
def engine_of() -> Callable[..., Engine]:
    """Build an engine in float32; keyword arguments are settings."""

    def make(files: ModelFiles, **settings: object) -> Engine:
        chosen = {"dtype": "float32", "device": "cpu", "kv_memory": 2**27, "max_context": 1024, **settings}
        return load(files, EngineSettings.model_validate(chosen))[0]

    return make


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_make_parametrize_id(val: object) -> str | None:
    return val.name if isinstance(val, Path) else None
