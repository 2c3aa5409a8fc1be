"""MNIST with a launcher for notebooks: the program starts the ranks of a function itself, by hvd.run(), and gets their results.

python mnist_notebook.py [--data FOLDER]
"""

import hvd
import mnist_data


def train(folder: str | None, epochs: int) -> float:
    """Runs on each rank. Returns the accuracy."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    import hvd.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = mnist_data.Net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    train_data, test_data = mnist_data.data_sets(folder)
    sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in DataLoader(train_data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    right = torch.tensor(mnist_data.right_answers(model, test_data, hvd.rank(), hvd.size()))
    return hvd.allreduce(right, op=hvd.Sum).item() / len(test_data)


if __name__ == "__main__":
    chosen = mnist_data.options(__doc__)
    accuracies = hvd.run(train, (chosen.data, chosen.epochs), num_proc=2)
    assert len(set(accuracies)) == 1
    print(f"accuracy {accuracies[0]:.3f} on {len(accuracies)} ranks")
