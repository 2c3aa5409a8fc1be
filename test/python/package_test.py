"""The package: what an import loads, its versions and its commands."""

import ast
import os
import pathlib
import subprocess
import sys
import warnings

import pytest

from hvd import _build, _loader, _plugin


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True,
                          timeout=60)


def test_import_loads_no_library():
    done = run("import sys, hvd; names = ('torch', 'numpy', 'hvd._C')\n"
               "assert not [n for n in names if n in sys.modules], sys.modules\n"
               "maps = open('/proc/self/maps').read()\n"
               "assert not [n for n in ('libmpi', 'libucp', 'libhvd', 'libtorch') if n in maps], maps\n"
               "print(hvd.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == _loader.VERSION


def test_import_torch_registers_the_backend_without_the_library():
    done = run("import sys, torch.distributed as dist; assert 'hvd' in dist.Backend.backend_list\n"
               "assert 'hvd._C' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("of_hvd", [False, True])
@pytest.mark.parametrize("of_torch", [False, True])
def test_the_backend_is_registered_for_the_devices_of_both_builds(monkeypatch, of_hvd, of_torch):
    import torch
    import torch.distributed as dist

    registered = {}
    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", lambda name, make, **options: registered.update({name: options["devices"]}))
    monkeypatch.setattr(_build, "WITH_CUDA", of_hvd)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: of_torch)
    _plugin.register()
    assert registered == {"hvd": ["cpu", "cuda"] if of_hvd and of_torch else ["cpu"]}


def test_library_loads_neither_mpi_nor_ucx():
    done = run("import hvd; assert not hvd.is_initialized(); maps = open('/proc/self/maps').read()\n"
               "assert 'libhvd_torch' in maps\n"
               "assert not [n for n in ('libmpi.', 'libucp.') if n in maps], maps")
    assert done.returncode == 0, done.stderr


def test_registration_never_raises(monkeypatch):
    import torch.distributed as dist

    def refuse(*arguments, **options):
        raise ValueError("refused")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _plugin.register()
    assert "refused" in str(caught[0].message)


def test_versions_are_checked():
    _loader.check_versions(_loader.TORCH_VERSION + "+cpu", _loader.PYTHON_VERSION)
    for versions in (("1.4.0", _loader.PYTHON_VERSION), (_loader.TORCH_VERSION, "3.9.1")):
        with pytest.raises(ImportError, match=r"built for .* 1\.4\.0|3\.9\.1.*pip install"):
            _loader.check_versions(*versions)


def test_one_rank_alone():
    done = run("import hvd; hvd.init(); print(hvd.rank(), hvd.size(), hvd.controller()); hvd.shutdown()")
    assert done.stdout.split() == ["0", "1", "local"], done.stderr


def test_hvdrun_gets_the_words_and_this_interpreter(tmp_path):
    hvdrun = tmp_path / "hvdrun"
    hvdrun.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHON_EXEC" "$@"')
    hvdrun.chmod(0o755)
    words = ["-np", "2", "python", "train me.py"]
    done = subprocess.run([sys.executable, "-m", "hvd", *words], env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"},
                          capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [sys.executable, *words], done


def signatures(functions):
    """Parameters and type of the result by name. Annotations may qualify a type or not."""
    return {f.name: ([a.arg for a in f.args.args], ast.unparse(f.returns).rpartition(".")[2]) for f in functions}


def built_signatures(scope):
    """pybind11 puts the signature into the docstring."""
    functions = {name: value for name, value in vars(scope).items()
                 if callable(value) and not isinstance(value, type) and (not name.startswith("_") or name == "__call__")}
    texts = [function.__doc__.strip().splitlines()[0] for function in functions.values()]
    return signatures(ast.parse(f"def {text}: ...").body[0] for text in texts)


def test_the_stub_declares_what_the_module_has():
    native = _loader.native()
    stub = ast.parse((pathlib.Path(_loader.__file__).parent / "_C.pyi").read_text()).body
    built = built_signatures(native)
    assert signatures(node for node in stub if isinstance(node, ast.FunctionDef)) == built
    assert len(built) > 10
    classes = {name: value for name, value in vars(native).items() if isinstance(value, type)}
    declared = {node.name: node for node in stub if isinstance(node, ast.ClassDef)}
    assert classes.keys() == declared.keys()
    for name, value in classes.items():
        methods = [node for node in declared[name].body
                   if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name != "__init__"]
        assert signatures(methods) == built_signatures(value), name


def test_a_group_whose_members_change_joins_no_job_before():
    done = run("import datetime, types, torch, hvd\n"
               "from hvd import _plugin\n"
               "group = types.SimpleNamespace(store=None, group_rank=1, group_size=3, global_ranks_in_group=[0, 1, 2],\n"
               "                              timeout=datetime.timedelta(seconds=5), enable_reconfigure=True)\n"
               "backend = _plugin._make_backend(group, None)\n"
               "assert (backend.rank(), backend.size(), hvd.is_initialized()) == (1, 3, False)\n"
               "try:\n"
               "    backend.allreduce([torch.ones(1)])\n"
               "except Exception as error:\n"
               "    assert 'made with enable_reconfigure' in str(error), error\n"
               "else:\n"
               "    raise AssertionError('no error')")
    assert done.returncode == 0, done.stderr
