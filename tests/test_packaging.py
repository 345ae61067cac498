"""Wheel, sdist and editable install: complete, and working from any directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from qattn_hf import list_methods
from qattn_hf.recipes.families import list_families

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = sorted(model_type for family in list_families() for model_type in family.model_types)
FOLDERS = (".ci", ".github", "qattn_hf", "kernels", "configs", "docs", "eval", "examples", "tests")

SMOKE = """
import json, pathlib, sys
import qattn_hf, qattn_kernels, qattn_kernels.layer.spec
from qattn_kernels.launch import tuned
from qattn_hf.assets import configs_dir, demo_model_dir, tasks_dir
from qattn_hf.recipes.families import list_families
print(json.dumps({
    "qattn_hf": qattn_hf.__file__,
    "qattn_kernels": qattn_kernels.__file__,
    "version": qattn_hf.__version__,
    "methods": qattn_hf.list_methods(),
    "configs": sorted(p.name for p in configs_dir().glob("*.yaml")),
    "families": sorted(t for family in list_families() for t in family.model_types),
    "tasks": sorted(p.name for p in tasks_dir().glob("*.yaml")),
    "tuned": tuned.read(tuned.DEFAULT).gpu,
    "demo_model": sorted(p.name for p in demo_model_dir().iterdir()),
}))
"""
BUILD = """
import sys
from hatchling import build
getattr(build, sys.argv[1])(sys.argv[2])
"""
# One prompt: the wheel has to run, and five take 20 s.
DEMO = """
from qattn_hf.cli import _prompts, main
shortest = [min(_prompts.demo_prompts(), key=lambda prompt: len(prompt.text))]
_prompts.demo_prompts = lambda: shortest
main(["demo", "--max-new-tokens", "4"])
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command, which finds packages where they are installed alone; its whole text is shown if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_files(folder: str, pattern: str = "*") -> set[str]:
    """Files of the tree below `folder`, relative to the root, caches left out."""
    found = (path for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the sdist, so both are proved."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-c", BUILD, "build_sdist", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(folder)
    run(sys.executable, "-c", BUILD, "build_wheel", folder, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    return sdist, next(folder.glob("*.whl"))


@pytest.fixture
def fresh_environment(tmp_path) -> Path:
    """Return the python of a new environment that finds torch and other packages in this environment's site-
    packages."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # A path added by a .pth file does not get its own .pth files read: an editable qattn_hf of ours stays out of sight.
    (Path(site) / "these.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, "--no-build-isolation", "--disable-pip-version-check", *what, cwd=python.parent)


def smoke(python: Path, cwd: Path, more: str = "") -> tuple[dict, str]:
    """What `SMOKE` says from a folder `cwd` that is made, and what code in the same process prints after it."""
    cwd.mkdir()
    said, _, after = run(python, "-c", SMOKE + more, cwd=cwd).partition("\n")
    return json.loads(said), after


@pytest.mark.slow  # the first tier compares the wheel's files with the tree, and tries an editable install
def test_installed_wheel_works_from_another_directory(built, fresh_environment, tmp_path):
    install(fresh_environment, built[1])
    found, answered = smoke(fresh_environment, tmp_path / "elsewhere", DEMO)
    environment = str(tmp_path / "env")
    assert found["qattn_hf"].startswith(environment) and found["qattn_kernels"].startswith(environment)
    assert found["configs"] == sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    assert found["tuned"] == "NVIDIA H200"
    assert found["families"] == FAMILIES and found["methods"] == list_methods()
    assert found["tasks"] == sorted(path.name for path in (ROOT / "eval" / "tasks").glob("*.yaml"))
    assert f"qattn_hf-{found['version']}-" in built[1].name
    assert (fresh_environment.parent / "qattn").is_file()
    assert "Verdict: turbo picks" in answered


@pytest.mark.slow
def test_editable_install_works_from_another_directory(fresh_environment, tmp_path):
    install(fresh_environment, "--editable", ROOT)
    found, _ = smoke(fresh_environment, tmp_path / "elsewhere")
    assert Path(found["qattn_hf"]) == ROOT / "qattn_hf" / "__init__.py"
    assert Path(found["qattn_kernels"]) == ROOT / "kernels" / "qattn_kernels" / "__init__.py"
    assert found["configs"] == sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    assert found["tuned"] == "NVIDIA H200"
    assert found["families"] == FAMILIES
    assert found["tasks"] == sorted(path.name for path in (ROOT / "eval" / "tasks").glob("*.yaml"))


def test_wheel_holds_the_packages_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qattn_hf", "qattn_kernels"}
    expected = {name.removeprefix("kernels/") for name in source_files("qattn_hf") | source_files("kernels")}
    expected |= {f"qattn_hf/{name}" for name in source_files("configs")}
    expected |= {name.replace("eval/tasks/", "qattn_hf/eval_tasks/") for name in source_files("eval/tasks")}
    assert expected - names == set() and {n for n in names if ".dist-info" not in n} - expected == set()
    assert {"qattn_hf/py.typed", "qattn_kernels/py.typed", "qattn_hf/assets/demo_model/model.safetensors"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_sdist_holds_what_a_developer_needs(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml"}
    expected |= {"constraints.txt", "constraints-oldest.txt", "SECURITY.md", "CITATION.cff", ".pre-commit-config.yaml"}
    expected = expected.union(*(source_files(folder) for folder in FOLDERS))
    assert expected - names == set()
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|^\.venv|^dist/|_cache/", name)]


def test_kernels_is_a_folder_not_a_package():
    """An importable `kernels` would shadow the package of that name that transformers imports."""
    assert (ROOT / "kernels" / "qattn_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))


def test_ci_runs_what_the_makefile_has():
    """The workflow calls `.ci/run`, and `make test` on other Pythons. Targets exist, also those that README names."""
    jobs = workflow("ci")["jobs"]
    called = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert called == {"checks": [".ci/run"], "pythons": ["make test"]}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for name, command in ((".ci/run", "step make"), ("README.md", "make"), ("CONTRIBUTING.md", "make")):
        calls = rf"(?:^|`){command}(?: -\S+)*((?: [a-z][a-z-]*)+)"  # of one target or several
        called = set(" ".join(re.findall(calls, (ROOT / name).read_text(encoding="utf-8"), re.M)).split())
        assert called and called <= targets, name


def test_ci_has_every_python_of_the_classifiers():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project))
    jobs = workflow("ci")["jobs"]
    setup = next(step for step in jobs["checks"]["steps"] if "setup-python" in step.get("uses", ""))
    assert named == {setup["with"]["python-version"], *jobs["pythons"]["strategy"]["matrix"]["python"]}


def test_actions_of_workflows_are_named_by_hash():
    """A tag may be moved to other code; a hash may not."""
    used = [
        step["uses"]
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in workflow(path.stem)["jobs"].values()
        for step in job["steps"]
        if "uses" in step
    ]
    assert used and [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []


def test_every_dependency_has_a_lowest_version():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    runtime = re.search(r"^dependencies = \[(.*?)^\]", project, re.M | re.S)
    extras = re.findall(r"^(?:eval|plot|serve) = \[(.*)\]", project, re.M)
    assert runtime is not None and len(extras) == 3
    needs = re.findall(r'"([^"]+)"', runtime[1] + "".join(extras))
    assert len(needs) > 12 and [need for need in needs if ">=" not in need] == []


def test_a_release_has_absolute_links_and_addresses(tmp_path):
    """`.ci/package_page.py`, which the workflow `publish.yml` runs before it builds."""
    script = ROOT / ".ci" / "package_page.py"
    for name in ("README.md", "pyproject.toml", ".ci/package_page.py", "qattn_hf/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    address = "https://example.org/owner/name"
    run(sys.executable, tmp_path / ".ci" / script.name, address, cwd=tmp_path)
    links = re.findall(r"\]\(([^)\s]+)\)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    assert links and [link for link in links if not link.startswith(("https://", "#"))] == []
    page = next(link for link in links if link.endswith("/docs/models.md"))
    assert re.fullmatch(rf"{address}/blob/v\d+\.\d+\.\d+/docs/models\.md", page)
    project = (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.urls]\nHomepage = "{address}"\n' in project
    again = subprocess.run([sys.executable, tmp_path / ".ci" / script.name, address], capture_output=True, text=True)
    assert again.returncode != 0 and "git checkout README.md pyproject.toml" in again.stderr


WITHOUT_TRITON = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
importlib.util.find_spec = lambda name, package=None, real=importlib.util.find_spec: (
    None if name.partition(".")[0] == "triton" else real(name, package))
import torch
from qattn_hf import patch, report
from qattn_hf.assets import demo_model_dir
from transformers import AutoModelForCausalLM
model = patch(AutoModelForCausalLM.from_pretrained(demo_model_dir()), method="turbo")
model.generate(torch.arange(80)[None] + 5, max_new_tokens=3, do_sample=False)
print({row["kernels"] for row in report(model).to_dict()["layers"]}, "triton" in sys.modules)
"""


@pytest.mark.slow
def test_the_package_imports_and_generates_without_triton(tmp_path):
    """As on macOS and Windows, where no Triton is installed: nothing imports it, and the reference computes."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    code = f"import sys; sys.path[:0] = {path.split(os.pathsep)!r}\n{WITHOUT_TRITON}"
    assert run(sys.executable, "-c", code, cwd=tmp_path).splitlines()[-1] == "{'reference'} False"


def test_hooks_call_tools_of_the_environment():
    """Only constraints.txt has versions, and nothing is downloaded."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    pinned = re.findall(r"^([a-z-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert all(hook["entry"].split()[0].removeprefix(".venv/bin/") in pinned for hook in hooks)


def text_files() -> Iterator[tuple[str, str]]:
    """Name and content of every text file that is published."""
    names = {path.name for path in ROOT.iterdir() if path.is_file() and path.name != ".git"}.union(
        *(source_files(name) for name in FOLDERS)
    )
    for name in sorted(names):
        if not name.endswith((".safetensors", "tokenizer.json", ".png")):
            yield name, (ROOT / name).read_text(encoding="utf-8")


def test_no_file_names_a_path_of_somebodys_machine():
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|farm|mnt|opt|srv|Users)/\w")
    found = [
        f"{name}: {line.strip()}" for name, text in text_files() for line in text.splitlines() if pattern.search(line)
    ]
    assert found == []
