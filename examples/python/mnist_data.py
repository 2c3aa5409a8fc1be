"""The model, the data and the options that the MNIST examples share."""

import argparse

import torch
from torch.utils.data import Dataset, TensorDataset


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 5, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 5, stride=2),
                                          torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def made_up(count: int, seed: int) -> TensorDataset:
    """Images of ten patterns with noise."""
    patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    numbers = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=numbers)
    return TensorDataset(patterns[labels] + torch.randn(count, 1, 28, 28, generator=numbers) / 2, labels)


def data_sets(folder: str | None) -> tuple[Dataset, Dataset]:
    """For training and for the test. Needs torchvision for a folder."""
    if folder is None:
        return made_up(2048, 1), made_up(512, 2)
    from torchvision import datasets, transforms

    change = transforms.ToTensor()
    return datasets.MNIST(folder, train=True, transform=change), datasets.MNIST(folder, train=False, transform=change)


def options(text: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder in which torchvision has MNIST")
    parser.add_argument("--epochs", type=int, default=1)
    return parser.parse_args()


def require(package: str) -> None:
    """Ends the program with a message if the package is not installed."""
    try:
        __import__(package)
    except ImportError as error:
        raise SystemExit(f"this example needs the package {package}: pip install {package} ({error})") from None


@torch.no_grad()
def right_answers(model: torch.nn.Module, test: Dataset, rank: int, size: int) -> int:
    """The number of right answers in this rank's part of the test data."""
    model.eval()
    part = torch.utils.data.Subset(test, range(rank, len(test), size))
    loader = torch.utils.data.DataLoader(part, batch_size=256)
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
