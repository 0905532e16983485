"""These tests need a GPU. They import nothing beyond torch, transformers, safetensors, einops, numpy, pytest
and hypothesis."""

import secrets
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def seed() -> int:
    """Fresh inputs in every run; a failure's captured output says which."""
    value = secrets.randbelow(2**31)
    print(f"seed {value}")
    return value
