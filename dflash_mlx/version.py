"""The one place of the version; read without importing MLX."""

__version__ = "0.1.0"
