"""The names of Horovod, for programs that import them. hvd provides horovod.torch; other frameworks are not provided."""

from hvd import run  # noqa: F401

__version__ = "0.28.1+hvd"
