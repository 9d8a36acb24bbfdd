"""A module that is loaded at its first use is then the module itself, in every thread."""

import subprocess
import sys
import threading

import pytest

from lachesis.environment_process.lazy_imports import LazyModule, load_when_used


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that takes a moment to import, with a submodule."""
    folder = tmp_path / "late_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import time\nfrom late_package import part\ntime.sleep(0.2)\nvalue = part.value + 1\n"
        "def __getattr__(name):\n    if name == 'made':\n        return 3\n    raise "
        "AttributeError(name)\n"
    )
    (folder / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "late_package"
    for name in ("late_package", "late_package.part"):
        sys.modules.pop(name, None)


def test_a_module_is_loaded_at_its_first_use(package):
    load_when_used(package)
    import late_package

    assert type(late_package) is LazyModule
    assert "late_package.part" not in sys.modules
    assert late_package.value == 2
    assert type(late_package) is not LazyModule
    assert late_package.made == 3
    assert sys.modules[package] is late_package
    with pytest.raises(AttributeError):
        _ = late_package.missing


def test_an_import_of_a_submodule_loads_the_package(package):
    load_when_used(package)
    from late_package.part import value

    assert value == 1
    assert sys.modules[package].value == 2


def test_threads_see_the_complete_module(package):
    load_when_used(package)
    module = sys.modules[package]
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(module.value)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [2] * 8


def test_a_module_that_cannot_be_loaded_says_why_each_time(package, tmp_path):
    (tmp_path / package / "part.py").write_text("raise OSError('no library')\n")
    load_when_used(package)
    module = sys.modules[package]
    for _ in range(2):
        with pytest.raises(OSError, match="no library"):
            _ = module.value


def test_what_is_loaded_or_missing_is_left_alone(package):
    import late_package

    load_when_used(package, "no_such_package_anywhere")
    assert sys.modules[package] is late_package
    assert type(late_package) is not LazyModule
    assert "no_such_package_anywhere" not in sys.modules


def test_atropos_loads_without_pytorch_and_w_and_b_which_still_work(random_model):
    program = (
        "import sys\n"
        "from lachesis.environment_process.lazy_imports import load_when_used, "
        "load_tokenizers_without_torch\n"
        "load_when_used('torch', 'wandb')\n"
        "import atroposlib.envs.base\n"
        "load_tokenizers_without_torch()\n"
        "from transformers import AutoConfig, AutoTokenizer\n"
        "print(len(AutoTokenizer.from_pretrained(sys.argv[1]).encode('1+1')))\n"
        "print('torch._C' in sys.modules, 'wandb.sdk' in sys.modules)\n"
        "import torch, wandb\n"
        "print(AutoConfig.from_pretrained(sys.argv[1]).dtype is torch.float32)\n"
        "from torch import nn\n"
        "print(tuple(nn.Linear(3, 2)(torch.zeros(3)).shape), wandb.Settings is not None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, random_model], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["3", "False False", "True", "(2,) True"], done.stderr
