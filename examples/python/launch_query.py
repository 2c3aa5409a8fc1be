"""Each rank's place in the job, and how the job was started.

hvdrun -np 2 python launch_query.py        also by torchrun, mpirun, or alone
"""

import hvd.torch as hvd


def main() -> None:
    hvd.init()
    mine = (f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}, "
            f"host {hvd.cross_rank()} of {hvd.cross_size()}")
    lines = hvd.allgather_object(mine)  # also keeps the lines in order
    if hvd.rank() == 0:
        print(*lines, sep="\n")
        print("every host has as many ranks" if hvd.is_homogeneous() else "hosts differ in their numbers of ranks")
        print("messages over MPI:", hvd.mpi_enabled())
    hvd.shutdown()


if __name__ == "__main__":
    main()
