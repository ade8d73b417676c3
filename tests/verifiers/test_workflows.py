"""examples/github: results of actionlint and of schemas of build servers, with planted defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import verifiers

pytestmark = pytest.mark.programs

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "github"
WORKFLOW = (FOLDER / "contracts.yml").read_text(encoding="utf-8")
ACTION = (FOLDER / "action.yml").read_text(encoding="utf-8")


def repository(folder: Path, workflow: str, action: str = ACTION) -> Path:
    """Write the workflow and the action at their paths in a new repository."""
    places = {
        ".github/workflows/contracts.yml": workflow,
        ".github/actions/check-certificates/action.yml": action,
    }
    for name, text in places.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / ".git").mkdir()
    return folder


def test_actionlint_accepts_the_workflow(tmp_path: Path) -> None:
    assert verifiers.actionlint(repository(tmp_path, WORKFLOW)) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("vars.KCDSL_PUBLIC_KEY", "var.KCDSL_PUBLIC_KEY", 'undefined variable "var"'),
        ("certificates: out/", "certificats: out/", 'missing input "certificates"'),
        ("needs: lint", "needs: lints", "lints"),
        ("actions/checkout@v6", "actions/checkout@v4", "deprecated"),
    ],
)
def test_actionlint_reports_planted_workflow_defects(
    tmp_path: Path, right: str, wrong: str, said: str
) -> None:
    assert right in WORKFLOW
    (found, *_) = verifiers.actionlint(repository(tmp_path, WORKFLOW.replace(right, wrong, 1)))
    assert said in found


def test_actionlint_accepts_the_steps_of_the_action(tmp_path: Path) -> None:
    """actionlint reads only steps of workflows, so those of the action are inserted there."""
    head = (
        "on: {workflow_call: {inputs: {%s}}}\njobs:\n  job:\n    runs-on: ubuntu-latest\n    steps:"
    )
    names = ("certificates", "key", "folder", "kernels", "complete", "recheck", "package")
    inputs = ", ".join(f"{name}: {{type: string}}" for name in names)
    steps = (
        ACTION.split("  steps:\n")[1].replace("\n    ", "\n      ").replace("    -", "      -", 1)
    )
    made = f"{head % inputs}\n{steps}"
    assert verifiers.actionlint(repository(tmp_path / "right", made)) == []
    assert "inputs.key }" in made
    wrong = made.replace("inputs.key }", "inputs.keys }")
    (found,) = verifiers.actionlint(repository(tmp_path / "wrong", wrong))
    assert '"keys" is not defined' in found


@pytest.mark.parametrize(
    ("name", "schema", "right", "wrong"),
    [
        ("action.yml", "github-actions", "shell: bash", "shel: bash"),
        ("contracts.yml", "github-workflows", "runs-on:", "run-on:"),
        ("gitlab-ci.yml", "gitlab-ci", "when: always", "when: ever"),
    ],
)
def test_build_server_files_follow_their_schemas(
    tmp_path: Path, name: str, schema: str, right: str, wrong: str
) -> None:
    assert verifiers.follows_schema(schema, FOLDER / name)
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert right in text
    (tmp_path / name).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert not verifiers.follows_schema(schema, tmp_path / name)
