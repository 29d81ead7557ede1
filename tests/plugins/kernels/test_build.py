"""Compiling: once, again where something has changed, and one sentence where it is not possible."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Kernels
from vllm_deepinfer_plugins.kernels import build as making
from vllm_deepinfer_plugins.kernels.build import BuildError, build, cache_folder, compiler

from .samples import noise

ONE = 'int deepinfer_answer(void) { return ANSWER; }\n#include "answer.h"\n'
QUICK = ("-DANSWER=42",)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder of one small file, which compiles in no time."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.c").write_text(ONE)
    (folder / "answer.h").write_text("/* 1 */\n")
    monkeypatch.setattr(making, "SOURCES", folder)
    return folder


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command of the compiler, which is a script in front of the real one."""
    log, script = tmp_path / "log", tmp_path / "my-cc"
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which(compiler()[0])} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))
    return log


def compilations(log: Path) -> int:
    return log.read_text().count(" -c ")


def refusal(folder: Path, extra: tuple[str, ...] = QUICK) -> str:
    """The sentence of a refused build."""
    with pytest.raises(BuildError) as refused:
        build(folder, extra)
    sentence = str(refused.value)
    assert "\n" not in sentence and sentence and not sentence.endswith(": ")
    return sentence


def test_a_second_call_compiles_nothing(sources: Path, log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    first = build(folder, QUICK)
    assert compilations(log) == 1
    made = first.stat().st_mtime_ns
    assert build(folder, QUICK) == first and compilations(log) == 1
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in folder.iterdir()] == [first.name], "no scratch is left"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_changes_gives_another_name(sources: Path, log: Path, tmp_path: Path) -> None:
    names = [build(tmp_path / "c", QUICK).name]
    names.append(build(tmp_path / "c", (*QUICK, "-DMORE")).name)
    names.append(build(tmp_path / "c", ("-DANSWER=43",)).name)
    (sources / "answer.h").write_text("/* 2 */\n")
    names.append(build(tmp_path / "c", QUICK).name)
    (sources / "two.c").write_text("int two;\n")
    names.append(build(tmp_path / "c", QUICK).name)
    assert len(set(names)) == 5 and compilations(log) == 6
    (sources / "one.c~").write_text("an editor's copy")
    assert build(tmp_path / "c", QUICK).name == names[-1]


def test_another_compiler_gives_another_name(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, real = build(tmp_path / "c", QUICK), making._run

    def newer(command: list[str]) -> str:
        return "cc 99.0\n" if "--version" in command else real(command)

    monkeypatch.setattr(making, "_run", newer)
    second = build(tmp_path / "c", QUICK)
    monkeypatch.setattr(making, "_processor", lambda: "flags : other")
    third = build(tmp_path / "c", QUICK)
    assert len({first, second, third}) == 3 and all(path.is_file() for path in (first, second, third))


def test_cc_may_be_several_words(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ccache: the words in front belong to every call, the linker's too."""
    command = shutil.which(compiler()[0])
    monkeypatch.setenv("CC", f"env LC_ALL=C {command} -DUNUSED")
    assert compiler() == ["env", "LC_ALL=C", command, "-DUNUSED"]
    assert build(tmp_path / "c", QUICK).stat().st_size > 1000


def test_an_empty_cc_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", " ")
    assert compiler() in (["cc"], ["gcc"], ["clang"])


def test_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(tmp_path / "c").startswith("there is no cc, gcc or clang on PATH: install")
    assert not (tmp_path / "c").exists()


def test_cc_names_nothing(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-cc -m64")
    assert refusal(tmp_path / "c").startswith("CC names 'no-such-cc', which is not on PATH: install")
    monkeypatch.setenv("CC", "gcc 'unclosed")
    assert "which is no command" in refusal(tmp_path / "c")


def test_a_compiler_that_refuses(sources: Path, tmp_path: Path) -> None:
    (sources / "one.c").write_text("int f(void) { return unknown_name; }\n")
    sentence = refusal(tmp_path / "c")
    assert "refused the kernels" in sentence and "unknown_name" in sentence
    assert not list((tmp_path / "c").iterdir()), "nothing half made is left"
    assert "no-such-flag" in refusal(tmp_path / "c", ("-fno-such-flag",))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "exit status 3"),
        ("echo first >&2; echo second >&2; exit 1", "first"),
        ("kill -9 $$", "exit status -9"),
    ],
)
def test_a_compiler_that_fails(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    (tmp_path / "bad").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bad").chmod(0o700)
    monkeypatch.setenv("CC", str(tmp_path / "bad"))
    assert refusal(tmp_path / "c").endswith(words)


def test_a_compiler_that_hangs(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "slow").chmod(0o700)
    monkeypatch.setenv("CC", str(tmp_path / "slow"))
    monkeypatch.setattr(making, "TIMEOUT", 0.2)
    assert "did not run" in refusal(tmp_path / "c")


def test_a_file_that_cannot_run(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(b"\0\1")
    (tmp_path / "text").chmod(0o700)
    monkeypatch.setenv("CC", str(tmp_path / "text"))
    assert "did not run" in refusal(tmp_path / "c")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to(sources: Path, tmp_path: Path, mode: int) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(mode)
    assert refusal(tmp_path / "c").endswith("chmod 700 it, or set XDG_CACHE_HOME")
    assert not list((tmp_path / "c").iterdir())


def test_somebody_elses_folder_or_file(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(tmp_path / "c", QUICK)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert "belongs to another user" in refusal(tmp_path / "c")
    monkeypatch.setattr(os, "getuid", lambda: me)
    real = made.rename(tmp_path / "elsewhere.so")
    made.symlink_to(real)
    assert refusal(tmp_path / "c").endswith("remove it")


def test_a_folder_that_cannot_be(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file" / "c").endswith("set XDG_CACHE_HOME to a writable folder")
    # Nobody, not even root, makes files in procfs.
    if os.stat("/proc/self/task").st_uid == os.getuid():
        assert refusal(Path("/proc/self/task")).endswith("set XDG_CACHE_HOME to a writable folder")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vllm-deepinfer" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/of")
    assert cache_folder() == Path("/home/of/.cache/vllm-deepinfer/kernels")


@pytest.mark.parametrize("kept", [0, 10, 5000, -4000, -32, -1])
def test_a_damaged_library_is_made_again(sources: Path, log: Path, tmp_path: Path, kept: int) -> None:
    """Cut anywhere: also where the loader would notice nothing and the process die of a bus error later."""
    made = build(tmp_path / "c", QUICK)
    whole = made.read_bytes()
    made.write_bytes(whole[:kept])
    assert build(tmp_path / "c", QUICK) == made and compilations(log) == 2
    assert len(made.read_bytes()) == len(whole)
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    made.write_bytes(changed)
    build(tmp_path / "c", QUICK)
    assert compilations(log) == 3 and made.read_bytes() != changed


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both compile the real kernels into one empty folder, and both can use them."""
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from vllm_deepinfer_plugins.kernels import Kernels\n"
        "from vllm_deepinfer_plugins.kernels.build import build\n"
        "made = build(Path(sys.argv[1]), ('-O0',))\n"
        "one = torch.ones(1, 32).bfloat16()\n"
        "packed = Kernels.pack(torch.eye(32).bfloat16())\n"
        "assert torch.equal(Kernels(made).linear(one, packed), one); print(made.name)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "c")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert [path.name for path in (tmp_path / "c").iterdir()] == list(names)


def test_the_kernels_themselves(kernels: Kernels) -> None:
    """Of every variant: x times the identity is x."""
    x = noise(3, 32)
    assert torch.equal(kernels.linear(x, kernels.pack(torch.eye(32).bfloat16())), x)
