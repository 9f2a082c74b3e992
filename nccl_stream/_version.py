"""The version of this package, for those who must not import the rest of it."""

__all__ = ["__version__"]

__version__ = "0.1.0"  # as in pyproject.toml
