"""What a record says of where it was made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensor_dropout_lab.run_records import describe_commit, describe_environment

ROOT = Path(__file__).parents[1]


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A user's own project with a commit."""
    git(tmp_path, "init", "-q")
    (tmp_path / "thesis.tex").write_text("", "utf-8")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "begun")
    return tmp_path


def test_the_commit_of_a_repository_that_only_surrounds_the_package_is_not_recorded(repository):
    package = repository / ".venv" / "lib" / "site-packages" / "tensor_dropout_lab"
    package.mkdir(parents=True)
    (package / "records.py").write_text("", "utf-8")
    assert describe_commit(package) == {}  # neither ignored nor tracked
    (repository / ".gitignore").write_text(".venv/\n", "utf-8")
    assert describe_commit(package) == {}


def test_the_commit_of_a_clone_is_recorded_and_whether_it_was_changed(repository):
    package = repository / "src" / "tensor_dropout_lab"
    package.mkdir(parents=True)
    (package / "records.py").write_text("", "utf-8")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "the package")
    commit = git(repository, "rev-parse", "HEAD")
    assert describe_commit(package) == {"commit": commit, "dirty": False}
    (package / "records.py").write_text("changed", "utf-8")
    assert describe_commit(package) == {"commit": commit, "dirty": True}


def test_outside_any_repository_there_is_no_commit(tmp_path):
    assert describe_commit(tmp_path) == {}


def test_an_environment_names_versions_and_machine():
    environment = describe_environment("numpy")
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert {"command", "tensor_dropout", "python", "numpy", "machine", "cpu_count"} <= environment.keys()


def test_a_report_of_the_committed_records_is_written_without_torch(tmp_path):
    """In an interpreter of its own, the way the command starts: reading records must not cost the import of torch."""
    code = (
        "import sys; from pathlib import Path; from tensor_dropout_lab.cli.reproduce import write_report; "
        "write_report({'paper': Path('results')}, Path(sys.argv[1])); "
        "from tensor_dropout_lab import cli; cli.app(['show', 'beyond-search/fc-plain-seed0'], standalone_mode=False); "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "72.34" in (tmp_path / "report.md").read_text("utf-8")
    assert "net.head" in run.stdout
