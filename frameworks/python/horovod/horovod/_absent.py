"""The error of the parts of Horovod that are not provided."""


def refuse(name: str) -> None:
    """Raises ImportError for a module."""
    raise ImportError(f"{name} is not provided: hvd provides horovod.torch, for PyTorch; use it, or the library horovod itself")
