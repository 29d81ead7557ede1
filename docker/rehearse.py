"""Runs the steps of a Dockerfile in a folder, with chroot, where no container engine is at hand.

    python docker/rehearse.py docker/Dockerfile.cpu ROOTFS COMMAND...

ROOTFS holds the base image's files, such as `mmdebstrap --variant=minbase bookworm ROOTFS` makes, and is
changed in place. After the last step COMMAND runs in it as the image's user. Needs root. Understands what our
Dockerfiles use and refuses the rest. This is no isolation: it proves the steps, not the image.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import dockerfile

PASSED_ON = (
    "PIP_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)  # how this machine reaches an index is not the image's


class Image:
    """What the steps have made so far."""

    def __init__(self, rootfs: Path, context: Path) -> None:
        self.rootfs, self.context = rootfs, context
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self.cwd, self.user = "/", 0

    def run(self, *command: str) -> None:
        """Run one command inside, as the user of the moment."""
        outside = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        inside = ["chroot", f"--userspec={self.user}:{self.user}", str(self.rootfs)]
        inside += ["/bin/sh", "-c", f"cd {shlex.quote(self.cwd)} && {shlex.join(command)}"]
        subprocess.run(inside, env={**outside, **self.env}, check=True)

    def copy(self, sources: list[str], target: str) -> None:
        """COPY from the build context; the ignore file is not read, compiled files stay out."""
        into = self.rootfs / os.path.join(self.cwd, target).lstrip("/")
        for name in sources:
            source = self.context / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
                shutil.copytree(source, into, dirs_exist_ok=True, ignore=ignored)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, into / source.name)

    def step(self, command: dockerfile.Command) -> None:
        """Carry out one instruction."""
        words = list(command.value)
        match command.cmd.upper():
            case "RUN":
                self.run("/bin/sh", "-c", words[0])
            case "COPY" if not command.flags:
                self.copy(words[:-1], words[-1])
            case "WORKDIR":
                self.cwd = os.path.join(self.cwd, words[0])
                (self.rootfs / self.cwd.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV":
                for name, value in zip(words[::2], words[1::2], strict=True):
                    self.env[name] = value.strip('"').replace("$PATH", self.env["PATH"])
            case "USER":
                self.user = int(words[0])
                self.env["HOME"] = "/home/deepinfer"
            case "FROM" | "LABEL" | "EXPOSE" | "VOLUME" | "HEALTHCHECK" | "ENTRYPOINT" | "CMD":
                pass
            case other:
                raise SystemExit(f"{other} on line {command.start_line} is nothing that this can rehearse.")


def main(file: Path, rootfs: Path, last: list[str]) -> None:
    """All steps, each with its time."""
    image = Image(rootfs, file.resolve().parents[1])
    for folder in ("proc", "sys", "dev"):
        # A slave, or taking it away at the end could take away the machine's own.
        subprocess.run(["mount", "--rbind", "--make-rslave", f"/{folder}", str(rootfs / folder)], check=True)
    try:
        for command in dockerfile.parse_file(str(file)):
            began = time.monotonic()
            image.step(command)
            print(f"{time.monotonic() - began:7.1f} s  {command.original[:100]}", flush=True)
        if last:
            image.run(*last)
    finally:
        for folder in ("dev", "sys", "proc"):
            subprocess.run(["umount", "--lazy", "--recursive", str(rootfs / folder)], check=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
