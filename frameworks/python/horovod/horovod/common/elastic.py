"""Horovod's states of elastic programs."""

from hvd.torch.elastic import ObjectState, State, run_fn  # noqa: F401
