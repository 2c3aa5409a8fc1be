#!/usr/bin/env python3
"""Python's safetensors and hvd's read each other's files, bit for bit.

Usage: safetensors_python_test.py PROGRAM    (safetensors_program)
Ends with 77, which ctest takes for a skipped test, where safetensors or torch cannot be imported. The models of torchvision are left out
where it cannot be imported; `bash third_party/setup.sh` installs all of them.
"""

import subprocess
import sys
import tempfile
import unittest
import warnings

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model, save_file, save_model
except ImportError as error:
    print(f"skipped: {error}; run 'bash third_party/setup.sh'")
    sys.exit(77)

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
FORMAT = {"format": "pt"}

DTYPES = ("uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 complex64 float8_e5m2 float8_e4m3fn "
          "float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2").split()

# Twenty models and more; those with 30 million parameters and more take too long here.
MODELS = ("resnet18 resnet34 resnext50_32x4d squeezenet1_0 squeezenet1_1 densenet121 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large "
          "shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5 regnet_y_800mf efficientnet_b0 efficientnet_b1 regnet_y_400mf regnet_x_400mf googlenet "
          "convnext_tiny swin_t").split()


def import_torchvision():
    """Its models; None where it is not installed. Its compiled part needs CUDA, and no classifier uses it, so that declarations of its
    operators are enough."""
    import importlib.util
    import pathlib
    import re

    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return None
    source = (pathlib.Path(spec.origin).parent / "_meta_registrations.py").read_text()
    names = set(re.findall(r'register_meta\("(\w+)"\)|register_fake\("torchvision::(\w+)"\)', source))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in {one or other for one, other in names}:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + "(Tensor x) -> Tensor")
    import torchvision.models
    import_torchvision.library = library  # its destructor would remove the declarations
    return torchvision.models


class Layers(torch.nn.Module):
    """Equal to LayersImpl."""

    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.linear = nn.Linear(3, 4)
        self.no_bias = nn.Linear(3, 4, bias=False)
        self.bilinear = nn.Bilinear(2, 3, 4)
        self.conv1 = nn.Conv1d(2, 4, 3)
        self.conv2 = nn.Conv2d(4, 4, 3, groups=2)
        self.conv3 = nn.Conv3d(1, 2, 3)
        self.transposed = nn.ConvTranspose2d(2, 3, 2)
        self.batch1 = nn.BatchNorm1d(3)
        self.batch2 = nn.BatchNorm2d(3, affine=False)
        self.instance = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        self.layer_norm = nn.LayerNorm(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.embedding = nn.Embedding(5, 3)
        self.bag = nn.EmbeddingBag(5, 3)
        self.prelu = nn.PReLU()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(3, 4)
        self.rnn = nn.RNN(3, 4)
        self.cell = nn.LSTMCell(3, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=2048)
        self.decoder = nn.TransformerDecoderLayer(4, 2, dim_feedforward=2048)
        self.list = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        self.scale = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))


class Tied(torch.nn.Module):
    """Equal to TiedImpl."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Embedding(6, 4)
        self.decoder = torch.nn.Linear(4, 6)
        self.decoder.weight = self.encoder.weight


class Traced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.head = torch.nn.Linear(4 * 6 * 6, 3)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1))


def randomise(module):
    """Values that no initialisation gives, also in buffers."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.9)
            else:
                tensor.random_(0, 100)
    return module


class PythonTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def file(self, name):
        return f"{self.folder}/{name}"

    def run_program(self, *arguments):
        result = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)

    def assert_same_file(self, one, other):
        with open(self.file(one), "rb") as file, open(self.file(other), "rb") as expected:
            self.assertTrue(file.read() == expected.read(), f"{one} and {other} differ")

    def assert_same_state(self, one, other):
        self.assertEqual(list(one), list(other))
        for name, tensor in one.items():
            self.assertEqual(tensor.dtype, other[name].dtype, name)
            self.assertTrue(torch.equal(tensor, other[name]), name)

    def test_every_dtype(self):
        tensors = {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5), "ü\n\"x\"": torch.ones(2)}
        for name in DTYPES:
            dtype = getattr(torch, name)
            values = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
            tensors[name] = values.view(dtype).reshape(2, 3)
        save_file(tensors, self.file("python"), metadata={"note": "é \x01 \\ \""})
        self.run_program("tensors", self.file("python"), self.file("hvd"))
        self.assert_same_file("hvd", "python")
        back = load_file(self.file("hvd"))
        for name, tensor in tensors.items():
            self.assertEqual(tensor.dtype, back[name].dtype)
            self.assertEqual(tensor.shape, back[name].shape)

    def test_files_without_tensors(self):
        save_file({}, self.file("python"))
        self.run_program("tensors", self.file("python"), self.file("hvd"))
        self.assert_same_file("hvd", "python")

    def test_layers_have_the_same_names(self):
        layers = randomise(Layers())
        save_file(layers.state_dict(), self.file("python"), metadata=FORMAT)
        self.run_program("layers", self.file("python"), self.file("hvd"))
        self.assert_same_file("hvd", "python")
        other = Layers()
        load_model(other, self.file("hvd"))
        self.assert_same_state(other.state_dict(), layers.state_dict())

    def test_tied_weights(self):
        tied = randomise(Tied())
        save_model(tied, self.file("python"))
        self.run_program("tied", self.file("python"), self.file("hvd"))
        with safe_open(self.file("hvd"), "pt") as file:
            self.assertEqual(sorted(file.keys()), ["decoder.bias", "decoder.weight"])
            self.assertEqual(file.metadata(), {"encoder.weight": "decoder.weight", **FORMAT})
        other = Tied()
        load_model(other, self.file("hvd"))
        self.assert_same_state(other.state_dict(), tied.state_dict())

    def test_traced_module(self):
        module = randomise(Traced()).eval()
        x = torch.rand(2, 1, 8, 8)
        torch.jit.trace(module, x).save(self.file("traced.pt"))
        save_file(module.state_dict(), self.file("python"), metadata=FORMAT)
        self.run_program("script", self.file("traced.pt"), self.file("python"), self.file("hvd"))
        self.assert_same_file("hvd", "python")
        self.assertTrue(torch.equal(torch.jit.load(self.file("hvd.pt"))(x), module(x)))

    def test_twenty_models(self):
        models = import_torchvision()
        if models is None:
            self.skipTest("torchvision is not installed")
        self.assertGreaterEqual(len(MODELS), 20)
        x = torch.rand(1, 3, 64, 64)
        for name in MODELS:
            with self.subTest(name):
                arguments = {"aux_logits": False} if name == "googlenet" else {}
                make = lambda: getattr(models, name)(weights=None, num_classes=10, **arguments).eval()
                module = make()
                torch.jit.script(module).save(self.file("script.pt"))
                randomise(module)
                save_file(module.state_dict(), self.file("python"), metadata=FORMAT)
                self.run_program("script", self.file("script.pt"), self.file("python"), self.file("hvd"))
                self.assert_same_file("hvd", "python")
                other = make()
                load_model(other, self.file("hvd"))
                self.assert_same_state(other.state_dict(), module.state_dict())
                with torch.no_grad():
                    result = torch.jit.load(self.file("hvd.pt"))(x)
                    result = result if torch.is_tensor(result) else result.logits  # GoogLeNet's
                    self.assertTrue(torch.equal(result, module(x)))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
