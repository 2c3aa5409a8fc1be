"""MNIST with Hugging Face's Accelerate over hvd. Needs the package accelerate.

torchrun --nproc-per-node 2 mnist_accelerate.py [--data FOLDER]      also: hvdrun -np 2 python mnist_accelerate.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import mnist_data


def main() -> None:
    options = mnist_data.options(__doc__)
    mnist_data.require("accelerate")
    from accelerate import Accelerator

    dist.init_process_group("hvd")  # before the Accelerator, which then uses this group
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = mnist_data.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, test = mnist_data.data_sets(options.data)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(options.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    right = torch.tensor(mnist_data.right_answers(model, test, accelerator.process_index, accelerator.num_processes))
    total = accelerator.reduce(right, reduction="sum")
    accelerator.print(f"accuracy {total.item() / len(test):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
