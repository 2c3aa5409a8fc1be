"""Horovod's launcher."""

from hvd import run  # noqa: F401
