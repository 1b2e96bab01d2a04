"""Tests that need an optional package are skipped where it is missing. The extra `dev` has all."""

import importlib.util

import pytest


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test without this package, and names the extra that brings it."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"the extra `{extra}` is not installed"
    )
