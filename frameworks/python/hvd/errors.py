"""The exceptions of hvd. Each corresponds to the class of the same name in <hvd/error.h>."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "MismatchError", "NotInitializedError", "PeerLostError", "ShutdownError", "StalledError",
           "UsageError"]


class UsageError(ValueError, RuntimeError):
    """The call itself was wrong. It sent no message and had no effect."""


class NotInitializedError(UsageError):
    """The call needs ``init()`` before it."""


class HorovodInternalError(RuntimeError):
    """An operation failed. The subclasses distinguish the reasons."""


class MismatchError(HorovodInternalError):
    """Ranks disagree about one operation. Raised on every rank of the process set; the runtime continues."""


class StalledError(HorovodInternalError):
    """Some ranks did not submit an operation in time. The runtime continues."""


class PeerLostError(HorovodInternalError):
    """A rank died, stopped or left, so the runtime has failed. `rank` is that rank, or -1 if it is not known."""

    def __init__(self, message: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ShutdownError(HorovodInternalError):
    """The operation was cut off by a shutdown. The text has the cause if there is one."""
