"""The arrows of the design: plugins → library; policy imports nothing of ours, the library no vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import imports, library_breaches, modules, plugin_breaches

ROOT = Path(__file__).parents[1]
LIBRARY = list(modules(ROOT / "vllm_deepinfer", "vllm_deepinfer"))
PLUGINS = list(modules(ROOT / "plugins" / "vllm_deepinfer_plugins", "vllm_deepinfer_plugins"))
LIGHT = ("__init__.py", "register.py")  # loaded wherever vLLM looks for plugins, before it knows its platform


def name(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else ""


@pytest.mark.parametrize(("path", "package"), LIBRARY, ids=name)
def test_library_imports_neither_torch_nor_vllm_nor_plugins_and_policy_is_pure(
    path: Path, package: str
) -> None:
    assert library_breaches(path.read_text(), package) == []


@pytest.mark.parametrize(("path", "package"), PLUGINS, ids=name)
def test_plugins_load_without_what_a_gpu_or_a_cpu_machine_lacks(path: Path, package: str) -> None:
    light = path.parent.name == "vllm_deepinfer_plugins" and path.name in LIGHT
    assert plugin_breaches(path.read_text(), package, light) == []


def test_the_walk_found_both_packages() -> None:
    assert {package for _, package in LIBRARY} >= {
        "vllm_deepinfer",
        "vllm_deepinfer.policy",
        "vllm_deepinfer.gateway",
    }
    assert (ROOT / "plugins" / "vllm_deepinfer_plugins" / "register.py", "vllm_deepinfer_plugins") in PLUGINS


BLOCKED = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "vllm_deepinfer_plugins", "transformers"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
package = importlib.import_module("vllm_deepinfer")
for module in pkgutil.walk_packages(package.__path__, "vllm_deepinfer."):
    importlib.import_module(module.name)
"""


def test_every_library_module_loads_where_torch_and_vllm_are_refused() -> None:
    """What the source does not show: an import by way of a third package."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_sees_every_form_and_when_it_runs() -> None:
    source = """
import a.b as c
from d import e, f
from . import g
from ..h import i
if TYPE_CHECKING:
    import j
else:
    import k
def later():
    import l
try:
    import m
except ImportError:
    importlib.import_module("n.o")
class C:
    import p
"""
    found = {(i.name, i.at_load) for i in imports(source, "top.sub")}
    assert found == {
        ("a.b", True),
        ("d.e", True),
        ("d.f", True),
        ("top.sub.g", True),
        ("top.h.i", True),
        ("j", False),
        ("k", True),
        ("l", False),
        ("m", True),
        ("n.o", True),
        ("p", True),
    }


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "from torch.nn import Module",
        "def f():\n    import vllm.config",
        "from vllm_deepinfer_plugins import model",
        "if TYPE_CHECKING:\n    from vllm import LLM",
        'import_module("torch.cpu")',
    ],
)
def test_a_breach_in_the_library_is_seen(line: str) -> None:
    assert len(library_breaches(line, "vllm_deepinfer.gateway")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from datetime import datetime",
        "import random",
        "from numpy import random",
        "numpy.random.default_rng()",
        "import os",
        "from pathlib import Path",
        "import logging",
        "open('x')",
        "print(1)",
        "from vllm_deepinfer.engine import base",
        "from ..engine.base import Engine",
        "import httpx",
    ],
)
def test_a_breach_in_policy_is_seen(line: str) -> None:
    assert len(library_breaches(line, "vllm_deepinfer.policy")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "from vllm_deepinfer.policy.step_cost import StepCost",
        "from .step_cost import StepCost",
        "import numpy as np\nnp.linalg.lstsq",
        "from collections.abc import Sequence",
        "import vllm_deepinfer.policy",
    ],
)
def test_what_policy_may_import(line: str) -> None:
    assert library_breaches(line, "vllm_deepinfer.policy") == []


def test_a_name_that_only_begins_like_a_forbidden_one_is_fine() -> None:
    assert library_breaches("import torchless, vllm_deepinfer.engine", "vllm_deepinfer") == []


def test_plugins_may_load_torch_and_vllm_but_what_vllm_finds_first_may_not() -> None:
    source = "import torch\nfrom vllm.config import VllmConfig\n"
    assert plugin_breaches(source, "vllm_deepinfer_plugins", light=False) == []
    assert plugin_breaches(source, "vllm_deepinfer_plugins", light=True) == [
        "line 1: torch",
        "line 2: vllm.config.VllmConfig",
    ]


def test_a_cuda_or_cpu_only_package_may_be_imported_later_but_not_at_load() -> None:
    assert plugin_breaches("def f():\n    import flash_mla\n", "vllm_deepinfer_plugins", light=True) == []
    for line in (
        "import flash_mla",
        "from vllm.models.deepseek_v4.cpu import model",
        "import triton.language as tl",
    ):
        assert len(plugin_breaches(line, "vllm_deepinfer_plugins.model", light=False)) == 1
