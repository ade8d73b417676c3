"""examples/github: run the commands of the action and the jobs on a certificate."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from tests.conftest import Cli

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "github"
PATHS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def document(name: str) -> dict[Any, Any]:
    """Return a file of the example."""
    found: dict[Any, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


def test_workflow_passes_the_inputs_of_the_action() -> None:
    action, workflow = document("action.yml"), document("contracts.yml")
    assert action["runs"]["using"] == "composite"
    assert all("shell" in step for step in action["runs"]["steps"] if "run" in step)
    steps = workflow["jobs"]["certificates"]["steps"]
    (given,) = (step["with"] for step in steps if step["uses"].startswith("./"))
    required = {name for name, found in action["inputs"].items() if found.get("required")}
    assert required <= set(given) <= set(action["inputs"])
    for step in action["runs"]["steps"]:  # an expression in a script would execute its value
        assert "${{" not in step.get("run", "")


def scripts() -> list[str]:
    """Return the command lines of the jobs of both build servers."""
    jobs = document("contracts.yml")["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    return lines + document("gitlab-ci.yml")["contracts"]["script"]


def test_job_commands_accept_their_options(cli: Cli, tmp_path: Path) -> None:
    import shlex

    from kcdsl.cli.application import parser_of
    from kcdsl.cli.commands import load

    lines = [line for line in scripts() if line.startswith("kcdsl ")]
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line)[1:]
        assert parser_of(words[0], load(words[0])).parse_args(words).command == words[0]


@pytest.mark.full
def test_action_accepts_a_certificate_and_refuses_a_changed_one(
    repository: Path, tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "tiny_lm"
    left_out = shutil.ignore_patterns("out", "__pycache__")
    shutil.copytree(repository / "examples" / "tiny_lm", folder, ignore=left_out)
    assert cli("keygen", "-o", "signing.key", cwd=folder).code == 0
    proved = cli(
        *("verify", "--clause", "N-ATTN-0", "--attack", "off", "--sign", "signing.key"), cwd=folder
    )
    assert proved.code == 0, proved.stderr
    (certificate,) = (folder / "out").glob("*.cert.json")
    (script,) = (
        s["run"] for s in document("action.yml")["runs"]["steps"] if s.get("name") == "Check"
    )

    def check(key: str) -> int:
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=folder,
            env={
                **os.environ,
                "PATH": PATHS,
                "CERTIFICATES": certificate.relative_to(folder).as_posix(),
                "TRUSTED_KEY": key,
                "KERNELS": "",
                "COMPLETE": "false",
                "RECHECK": "true",
                "RUNNER_TEMP": str(tmp_path),
                "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            },
            check=False,
        )
        return done.returncode

    key = (folder / "signing.key.pub").read_text(encoding="utf-8")
    assert check(key) == 0
    assert "valid" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert cli("keygen", "-o", "other.key", cwd=folder).code == 0
    assert check((folder / "other.key.pub").read_text(encoding="utf-8")) == 4
    text = certificate.read_text(encoding="utf-8")
    certificate.write_text(text.replace('"sig":"', '"sig":"A', 1), encoding="utf-8")
    assert check(key) in {2, 4}
