#!/usr/bin/env python3
"""Exports the model of model.py for a program in C++.  Usage: export_model.py FILE.pt"""

import sys

import torch
from model import Net

torch.manual_seed(1)
torch.jit.script(Net()).save(sys.argv[1])
print(f"exported {sys.argv[1]}")
