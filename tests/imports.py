"""Reads the imports of a source file without running it, and says which of them break the design's arrows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# What policy may use: computation only. The rest might read a clock, a file, a socket or a random number.
PURE = frozenset(
    [
        "__future__",
        "abc",
        "array",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",  # text to values, no file
        "math",
        "numbers",
        "numpy",
        "operator",
        "statistics",
        "types",
        "typing",
        "vllm_deepinfer.policy",
    ]
)
IMPURE_PARTS = frozenset({"numpy.random"})
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "breakpoint", "__import__"})

# The library and its command line run where neither torch nor vLLM is installed.
HEAVY = frozenset({"torch", "vllm", "vllm_deepinfer_plugins", "transformers", "torchvision", "triton"})

# A GPU machine lacks the first group, a CPU machine the second: no plugin module may need either to load.
CPU_ONLY = frozenset(
    {"intel_extension_for_pytorch", "zentorch", "vllm._C_cpu", "vllm.models.deepseek_v4.cpu", "vllm_cpu"}
)
CUDA_ONLY = frozenset(
    [
        "cupy",
        "cuda",
        "cutlass",
        "deep_ep",
        "deep_gemm",
        "flash_attn",
        "flash_mla",
        "flashinfer",
        "nixl",
        "pplx_kernels",
        "pynvml",
        "tilelang",
        "triton",
        "vllm._C",
        "vllm._flashmla_C",
        "vllm.vllm_flash_attn",
        "vllm.models.deepseek_v4.nvidia",
        "vllm.models.deepseek_v4.amd",
    ]
)


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is `a.b.c`, for c may be a module."""

    name: str
    line: int
    at_load: bool  # runs when the module is loaded, not later in a function or for type checkers only


def within(name: str, packages: frozenset[str]) -> bool:
    """True when `name` is one of the packages or lies inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports(source: str, package: str) -> list[Import]:
    """Every import of a module of `package`, in functions and by `importlib.import_module("...")` too."""
    return list(_walk(ast.parse(source), package, at_load=True))


def _walk(node: ast.AST, package: str, at_load: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, package)
        yield from (Import(f"{base}.{alias.name}", node.lineno, at_load) for alias in node.names)
    elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield Import(first.value, node.lineno, at_load)
    later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    types_only = isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )
    for child in ast.iter_child_nodes(node):
        else_branch = isinstance(node, ast.If) and child in node.orelse
        yield from _walk(child, package, at_load and not later and (else_branch or not types_only))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def library_breaches(source: str, package: str) -> list[str]:
    """What a module of `vllm_deepinfer` may not import, at any place."""
    found = [f"line {i.line}: {i.name}" for i in imports(source, package) if within(i.name, HEAVY)]
    return found + (
        policy_breaches(source, package) if within(package, frozenset({"vllm_deepinfer.policy"})) else []
    )


def policy_breaches(source: str, package: str) -> list[str]:
    """Imports of `vllm_deepinfer.policy` that are not pure, and calls that do I/O without an import."""
    found = [
        f"line {i.line}: {i.name}"
        for i in imports(source, package)
        if not within(i.name, PURE) or within(i.name, IMPURE_PARTS)
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"line {node.lineno}: {node.func.id}()")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random"):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def plugin_breaches(source: str, package: str, light: bool) -> list[str]:
    """What a plugin module loads that a machine may lack; a `light` one may load neither torch nor vLLM."""
    forbidden = CPU_ONLY | CUDA_ONLY | (HEAVY - {"vllm_deepinfer_plugins"} if light else frozenset())
    return [
        f"line {i.line}: {i.name}"
        for i in imports(source, package)
        if i.at_load and within(i.name, forbidden)
    ]


def modules(folder: Path, top: str) -> Iterator[tuple[Path, str]]:
    """Every source file below `folder`, which is the package `top`, with the package that it belongs to."""
    for path in sorted(folder.rglob("*.py")):
        yield path, ".".join([top, *path.relative_to(folder).parent.parts])
