"""Gathers of tensors whose first dimension differs between ranks: rank R has R + 1 rows.

hvdrun -np 3 python uneven_gathers.py
"""

import torch

import hvd.torch as hvd


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    own = torch.full((rank + 1, 2), float(rank))
    rows = hvd.allgather(own, name="rows")
    assert rows.shape == (size * (size + 1) // 2, 2)

    several = hvd.grouped_allgather([own, own[:, :1] * 10], name="several")
    at_root = hvd.gather(own, dst_rank=0, name="at_root")  # None on the other ranks
    along = hvd.all_gather_into_tensor(own.t(), dim=1, name="along")
    assert torch.equal(along, rows.t())

    # This rank sends one row to rank 0, two to rank 1, and so on.
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    sent = torch.full((int(splits.sum()),), rank)
    received, counts = hvd.alltoall(sent, splits, name="shares")
    assert counts.tolist() == [rank + 1] * size

    if rank == 0:
        print("rows of the ranks:", rows[:, 0].int().tolist())
        print("a group of two:", several[1].flatten().int().tolist())
        print("gathered at rank 0:", tuple(at_root.shape))
        print("received by rank 0:", received.tolist())
    hvd.shutdown()


if __name__ == "__main__":
    main()
