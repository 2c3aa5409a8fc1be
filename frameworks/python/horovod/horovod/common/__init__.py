"""The common parts of Horovod that programs import."""
