"""Horovod's exceptions."""

from hvd.errors import HorovodInternalError  # noqa: F401
from hvd.torch.elastic import HostsUpdatedInterrupt  # noqa: F401
