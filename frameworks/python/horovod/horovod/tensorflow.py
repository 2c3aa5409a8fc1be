"""Not provided."""

from horovod._absent import refuse

refuse(__name__)
