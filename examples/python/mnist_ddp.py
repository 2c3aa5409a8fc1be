"""MNIST with DistributedDataParallel over hvd.

hvdrun -np 2 python mnist_ddp.py [--data FOLDER]      without a folder of MNIST's files: made-up images
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import mnist_data


def main() -> None:
    options = mnist_data.options(__doc__)
    dist.init_process_group("hvd")
    torch.manual_seed(0)
    model = DistributedDataParallel(mnist_data.Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, test = mnist_data.data_sets(options.data)
    sampler = DistributedSampler(train)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in DataLoader(train, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    right = torch.tensor(mnist_data.right_answers(model, test, dist.get_rank(), dist.get_world_size()))
    dist.all_reduce(right)
    if dist.get_rank() == 0:
        print(f"accuracy {right.item() / len(test):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
