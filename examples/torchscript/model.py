"""The model of this example, as an ordinary module of Python."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(32 * 5 * 5, 10)

    def forward(self, images):
        return self.head(self.dropout(self.features(images).flatten(1)))
