#!/usr/bin/env python3
"""Uses the model that the program in C++ has trained.  Usage: use_model.py FILE.pt FILE.safetensors

The exported module can be used as it is. The weights alone go into an ordinary module, which Python can train further.
"""

import sys

import torch
from model import Net
from safetensors.torch import load_model

scripted = torch.jit.load(sys.argv[1]).eval()
net = Net()
load_model(net, sys.argv[2])
net.eval()
images = torch.rand(8, 1, 28, 28)
with torch.no_grad():
    same = torch.equal(scripted(images), net(images))
print("both give the same answers" if same else "the answers differ")
sys.exit(0 if same else 1)
