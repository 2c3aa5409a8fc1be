#!/usr/bin/env python3
"""Foreign and hostile files of safetensors, written byte by byte by this test and read by hvd and by Python's safetensors.

Usage: safetensors_hostile_test.py PROGRAM    (safetensors_program)
Ends with 77, which ctest takes for a skipped test, where safetensors or torch cannot be imported.

Every file is read by hvd as new tensors, tensor by tensor, and into existing tensors. A file that Python reads must have the same tensors
in hvd, or be refused for one of the reasons in STRICTER. A file that Python refuses must be refused by hvd, with a SafetensorsError, and
without a change of a tensor.
"""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    from safetensors import safe_open
except ImportError as error:
    print(f"skipped: {error}; run 'bash third_party/setup.sh'")
    sys.exit(77)

# Why hvd refuses files that Python's safetensors reads: LibTorch cannot represent them, or the format forbids them.
STRICTER = ("occurs twice", "does not begin with '{'", "neither 0 nor 1", "has more than 64 dimensions", "expected a string, got an object",
            "expected whole numbers, got", "which LibTorch does not have", "has the data_offsets")

BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2,
         "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8}


def framed(header, data=b"", length=None):
    """The bytes of a file. @param length: what the file claims to be the length of its header"""
    if isinstance(header, (dict, list)):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype="U8", shape=(2,), offsets=(0, 2), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def text(member, value):
    """A header with one tensor of two bytes, in which one member has this JSON text."""
    members = {"dtype": '"U8"', "shape": "[2]", "data_offsets": "[0,2]", member: value}
    return '{"t":{' + ",".join(f'"{name}":{value}' for name, value in members.items()) + "}}"


def good_file(draw=random.Random(1)):
    """Tensors of all dtypes and several shapes, in any order, with a header of any length."""
    tensors, data = [], b""
    for dtype, size in BYTES.items():
        for shape in ((), (0,), (3, 0, 2), (1,), (2, 3)):
            count = size
            for dim in shape:
                count *= dim
            tensors.append((f"{dtype}.{'x'.join(map(str, shape))}", dtype, shape, bytes(draw.randrange(2) for _ in range(count))))
    draw.shuffle(tensors)
    header = {}
    for name, dtype, shape, values in tensors:
        header[name] = entry(dtype, shape, (len(data), len(data) + len(values)))
        data += values
    return header, data


class HostileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.paths = []
        with open(f"{self.folder}/good", "wb") as file:
            file.write(framed({"w": entry("F32", (2, 2), (0, 16)), "flag": entry("BOOL", (2,), (16, 18))}, bytes(16) + b"\1\0"))

    def add(self, content):
        path = f"{self.folder}/{len(self.paths)}"
        with open(path, "wb") as file:
            file.write(content)
        self.paths.append(path)
        return path

    def probe(self, paths):
        """hvd's line for each path."""
        with open(f"{self.folder}/list", "w", encoding="utf-8") as file:
            file.write("".join(path + "\n" for path in paths))
        result = subprocess.run([PROGRAM, "probe", f"{self.folder}/list", f"{self.folder}/good"], capture_output=True, timeout=100, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.decode("utf-8", "strict").splitlines()
        self.assertEqual(len(lines), len(paths))
        for line in lines:
            self.assertNotRegex(line, "^[A-Z ]+: |^AN ERROR")
            self.assertLess(len(line), 2000)
        return lines

    def python_reads(self, path):
        """The tensors and the metadata as Python reads them; None if it refuses the file."""
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
        except Exception:  # the package has errors of many types, and panics
            return None

    def compare(self, path, line):
        expected = self.python_reads(path)
        with open(path, "rb") as file:
            shown = f"{line}\n{file.read(400)}"
        if expected is None:
            self.assertNotEqual(line, "ok", f"hvd reads a file that Python refuses: {shown}")
        elif line != "ok":
            self.assertTrue(any(reason in line for reason in STRICTER), f"hvd refuses a file that Python reads: {shown}")
        else:
            actual = self.python_reads(path + ".again")
            self.assertIsNotNone(actual, shown)
            self.assertEqual(actual[1], expected[1], shown)
            self.assertEqual(sorted(actual[0]), sorted(expected[0]), shown)
            for name, tensor in expected[0].items():
                self.assertEqual((actual[0][name].dtype, actual[0][name].shape), (tensor.dtype, tensor.shape), shown)
                bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (actual[0][name], tensor)]
                self.assertTrue(torch.equal(*bits), f"{name}: {shown}")

    def compare_all(self):
        lines = self.probe(self.paths)
        for path, line in zip(self.paths, lines):
            self.compare(path, line)
        return lines

    def expect(self, cases):
        """@param cases: (content, text that hvd's line has), ..."""
        for content, _ in cases:
            self.add(content)
        for line, (content, part) in zip(self.compare_all(), cases):
            with self.subTest(content[:300]):
                self.assertIn(part, line)

    def test_foreign_files_are_read(self):
        header, data = good_file()
        for padding in (*range(8), 4096):
            self.add(framed(json.dumps(header).encode() + b" " * padding, data))
        self.add(framed(json.dumps(header, indent=3), data))
        self.add(framed(json.dumps(header) + "\n\t\r ", data))
        self.add(framed(json.dumps({**header, "__metadata__": {"é\0": "x" * 10_000, "": ""}}, ensure_ascii=False), data))
        self.add(framed({"__metadata__": {"k": "v"}, **header}, data))
        self.add(framed({"__metadata__": None, **header}, data))
        for name in ("", "/", "a b", "\0", "é😀", "\\\"", "x" * 100_000, "constructor", "__proto__", "__metadata", "../../x"):
            self.add(framed({name: entry()}, b"ab"))
            self.add(framed(json.dumps({name: entry()}, ensure_ascii=False), b"ab"))
        self.add(framed({str(i): entry("U8", (1,), (i, i + 1)) for i in range(10_000)}, bytes(10_000)))
        self.add(framed({}))
        self.add(framed({"__metadata__": {}}))
        self.add(framed({"t": entry("U8", [1] * 64, (0, 1))}, b"x"))
        self.add(framed({"t": entry("F4", (3, 2), (0, 3))}, b"abc"))
        self.add(framed({"t": entry("U8", more=1, none=None, name="x", flag=True)}, b"ab"))
        # Empty tensors may lie anywhere between others.
        self.add(framed({"a": entry(), "b": entry("F32", (0,), (2, 2)), "c": entry("I8", (1,), (2, 3)), "d": entry("U8", (0, 9), (3, 3))}, b"abc"))
        self.assertEqual(set(self.compare_all()), {"ok"})

    def test_damaged_layouts(self):
        whole = framed({"t": entry()}, b"ab")
        self.expect([
            (b"", "it has 0 bytes"), (b"\1\0\0", "it has 3 bytes"), (struct.pack("<Q", 0), "does not begin with '{'"),
            (framed({"t": entry()}, b"ab", length=2**64 - 1), "its header has 18446744073709551615 bytes"),
            (framed({"t": entry()}, b"ab", length=2**63), "its header has 9223372036854775808 bytes"),
            (framed({"t": entry()}, b"ab", length=100_000_001), "the format allows 100000000"),
            (framed({"t": entry()}, b"ab", length=len(whole) - 7), "behind the length"),
            (framed({"t": entry()}, b"ab", length=1), "not JSON"), (framed({"t": entry()}, b"abc"), "which belong to no tensor"),
            (framed({"t": entry()}, b"a"), "the file is truncated"), (framed({}, b"a"), "which belong to no tensor"),
            (framed({"t": entry("U8", (0,), (1, 1))}, b"a"), "so that bytes before it belong to no tensor"),
            (framed({"a": entry(), "b": entry("U8", (2,), (1, 3))}, b"abc"), "overlaps the tensor before it"),
            (framed({"a": entry(), "b": entry()}, b"ab"), "overlaps the tensor before it"),
            (framed({"a": entry(), "b": entry("U8", (0,), (1, 1))}, b"ab"), "overlaps the tensor before it"),
            (framed({"a": entry(), "b": entry("U8", (2,), (3, 5))}, b"abcde"), "so that bytes before it belong to no tensor"),
            (framed({"t": entry("U8", (2,), (2, 0))}, b"ab"), "has the data_offsets 2 and 0"),
            (framed({"t": entry("U8", (3,), (0, 2))}, b"ab"), "need 3 bytes"), (framed({"t": entry("F32", (1,), (0, 2))}, b"ab"), "need 4 bytes"),
            (framed({"t": entry("U8", (2**32, 2**32, 2**32), (0, 2))}, b"ab"), "another number of bytes"),
            (framed({"t": entry("F64", (2**61,), (0, 0))}), "another number of bytes"),
            (framed({"t": entry("U8", (2**63, 0, 2**63), (0, 0))}), "another number of bytes"),
            (framed({"t": entry("F4", (3,), (0, 2))}, b"ab"), "need"), (framed({"t": entry("F4", (2, 3), (0, 3))}, b"abc"), "odd last dimension"),
            (framed({"t": entry("F4", (), (0, 0))}), "need"), (framed({"t": entry("BOOL")}, b"\1\2"), "neither 0 nor 1"),
            (framed({"t": entry("U8", [1] * 65, (0, 1))}, b"x"), "more than 64 dimensions"),
        ])

    def test_damaged_json(self):
        deep = 100_000
        self.expect([(framed(header, b"ab"), part) for header, part in [
            ("[" * deep, "does not begin with '{'"), ('{"t":' * deep, "got an object"),
            ('{"t":' + "[" * deep, "got an array"), (text("shape", "[" * deep), "got an array"), (text("x", '{"y":' * deep), "got an object"),
            ('{"__metadata__":' + '{"x":' * deep, "got an object"), ("{", "not JSON"), ("{}{}", "not JSON"), ('{"t"}', "not JSON"), ("{,}", "not JSON"),
            ('{"t":' + json.dumps(entry()) + ",}", "not JSON"), ("{'t':" + json.dumps(entry()) + "}", "not JSON"),
            ("{//\n" + json.dumps({"t": entry()})[1:], "not JSON"), (json.dumps({"t": entry()}) + "\0", "not JSON"),
            (b"\xef\xbb\xbf" + json.dumps({"t": entry()}).encode(), "does not begin with '{'"), (" " + json.dumps({"t": entry()}), "does not begin with '{'"),
            (json.dumps({"t": entry()}).encode("utf-16-le"), "not JSON"), ("null", "does not begin"), ("{\"t\":null}", "expected an object, got null"),
            ('{"t":[]}', "expected an object, got an array"), ('{"t":1}', "expected an object, got the number 1"), ('{"t":{}}', "has no dtype"),
            ('{"t":{"dtype":"U8","shape":[2]}}', "has no data_offsets"), ('{"t":{"dtype":"U8","data_offsets":[0,2]}}', "has no shape"),
            ('{"t":' + json.dumps(entry()) + ',"t":' + json.dumps(entry()) + "}", "the name 't' occurs twice"),
            ('{"t":' + json.dumps(entry()) + ',"\\u0074":' + json.dumps(entry()) + "}", "the name 't' occurs twice"),
            ('{"__metadata__":{"a":"1","a":"2"},"t":' + json.dumps(entry()) + "}", "the name 'a' occurs twice"),
            ('{"__metadata__":{},"__metadata__":{},"t":' + json.dumps(entry()) + "}", "occurs twice"),
            ('{"t":{"shape":[2],' + json.dumps(entry())[1:] + "}", "the name 'shape' occurs twice"),
            ('{"__metadata__":{"a":1},"t":' + json.dumps(entry()) + "}", "expected a string, got the number 1"),
            ('{"__metadata__":{"a":null},"t":' + json.dumps(entry()) + "}", "expected a string, got null"),
            ('{"__metadata__":[],"t":' + json.dumps(entry()) + "}", "expected an object, got an array"),
            *[(b'{"' + name + b'":' + json.dumps(entry()).encode() + b"}", "not JSON")
              for name in (b"\xff", b"\xc3", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"a\nb", b"\0", b"\\ud800", b"\\udc00\\ud800", b"\\x", b"\\u12")],
            *[(text("dtype", value), "dtype") for value in ('"u8"', '"U9"', '"F32 "', '""', "1", "null", "[]", '["U8"]', '{"U8":null}', '"F6_E2M3"', '"C128"', "true")],
            *[(text("shape", value), "shape") for value in ("2", "null", '"2"', '["2"]', "[null]", "[[2]]", "{}", "[2.0]", "[-2]", "[2e0]", "[-0]", "[true]",
                                                            "[18446744073709551616]", "[2")],
            *[(text("shape", value), "not JSON") for value in ("[02]", "[+2]", "[2,]", "[0x2]", "[NaN]", "[Infinity]", "[2 2]", "[.5]", "[2.]", "]",
                                                               "[1" + "0" * 5000 + "]", "[1e400]")],
            *[(text("shape", value), "need") for value in ("[18446744073709551615]", "[]", "[2,2]", "[9223372036854775807,2]", "[4294967296,4294967296]")],
            *[(text("data_offsets", value), "data_offsets") for value in ("[0]", "[]", "[0,2,2]", "[0.0,2]", "[-1,1]", "[0,-2]", "[0,1e99]", "2", "null", '"02"', "[[0,2]]",
                                                                          "[0,18446744073709551617]", "[18446744073709551615,1]", "[0,18446744073709551615]", "[null,2]")],
        ]])

    def test_every_truncation_and_every_flipped_bit(self):
        whole = framed({"w": entry("F32", (2, 2), (0, 16)), "__metadata__": {"a": "é"}, "flag": entry("BOOL", (2,), (16, 18))}, bytes(16) + b"\1\0")
        paths = [self.add(whole[:size]) for size in range(len(whole))]
        for path, line in zip(paths, self.probe(paths)):
            self.assertRegex(line, "is not a valid safetensors file")
            self.compare(path, line)
        self.paths = []
        for bit in range(len(whole) * 8):
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << (bit % 8)
            self.add(bytes(changed))
        self.compare_all()

    def test_random_changes(self):
        """Parts of files and of JSON are exchanged, repeated, and removed."""
        draw = random.Random(SEED)
        parts = [b"{", b"}", b"[", b"]", b",", b":", b'"', b" ", b"0", b"-1", b"1.5", b"1e3", b"null", b'"U8"', b'"shape"', b'"__metadata__"', b"\\u0000",
                 b"\xc3", b"18446744073709551615", b"9223372036854775808", b"\0", b'{"x":1}', b"[0,2]"]
        for _ in range(ROUNDS):
            header, data = good_file(draw) if draw.random() < 0.1 else ({"a": entry(), "b": entry("F32", (0,), (2, 2)), "__metadata__": {"k": "v"}}, b"ab")
            body = bytearray(json.dumps(header).encode())
            for _ in range(draw.randrange(1, 4)):
                at = draw.randrange(len(body))
                kind = draw.randrange(4)
                if kind == 0:
                    body[at:at + draw.randrange(3)] = draw.choice(parts)
                elif kind == 1:
                    del body[at:at + draw.randrange(1, 12)]
                elif kind == 2:
                    other = draw.randrange(len(body))
                    body[at:at] = body[other:other + draw.randrange(1, 40)]
                else:
                    digits = [i for i, c in enumerate(body) if chr(c).isdigit()]
                    if digits:
                        body[draw.choice(digits)] = ord(str(draw.randrange(10)))
                if not body:
                    body = bytearray(b"{")
            self.add(framed(bytes(body), data, length=None if draw.random() < 0.9 else len(body) + draw.randrange(-3, 4)))
        self.compare_all()

    def test_paths_that_are_no_files(self):
        os.mkfifo(f"{self.folder}/pipe")
        os.symlink("loop", f"{self.folder}/loop")
        with open(f"{self.folder}/file", "wb"):
            pass
        cases = {"pipe": "is a pipe or a device", "none": "No such file", ".": "is a folder", "loop": "symbolic links", "file/x": "Not a directory",
                 "x" * 300: "File name too long", "/dev/zero": "is a pipe or a device", "/dev/null": "is a pipe or a device", "/proc/self/status": "has 0 bytes"}
        lines = self.probe([os.path.join(self.folder, name) for name in cases])
        for (name, part), line in zip(cases.items(), lines):
            self.assertIn(part, line, name)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    SEED = int(os.environ.get("SEED", "1"))
    ROUNDS = int(os.environ.get("ROUNDS", "1000"))
    unittest.main()
