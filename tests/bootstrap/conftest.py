"""Fixtures of the bootstrap tests."""

from pathlib import Path

import pytest

from tests.bootstrap.build import build_wheel, copy_sources
from tests.bootstrap.checkout_copy import Checkout


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A copy of everything that a wheel is built from."""
    return copy_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def wheel_file(source, tmp_path_factory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))
