"""README and docs/ as a reader meets them: links lead somewhere, commands and Python parse, nothing is left out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from test_eval_scripts import script
from typer.main import get_command

import qattn_hf
from qattn_hf.cli import app
from qattn_hf.methods import list_methods
from qattn_kernels.formats.packed import pack

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s:]+)\)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?: \"\w+\")?\)")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose_of(path: Path) -> str:
    """Without blocks of code, and with what code spans hold left out."""
    return re.sub(r"`[^`\n]*`", "``", FENCE.sub("", text_of(path)))


def anchors_of(path: Path) -> set[str]:
    """Of a page's headings, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def blocks(path: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(text_of(path)) if language in languages]


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_relative_links_and_anchors_exist(path: Path):
    broken = []
    for link in LINK.findall(prose_of(path)):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        found = path if not target else (path.parent / target).resolve()
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_pictures_exist(path: Path):
    assert [name for name in IMAGE.findall(prose_of(path)) if not (path.parent / name).is_file()] == []


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_commands_are_known_to_the_command_line(path: Path):
    """Every `qattn ...` names a command, options that it has, and none without its value."""
    for line in "\n".join(blocks(path, "bash")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:  # settings of the environment
            words = words[1:]
        if words[:1] != ["qattn"]:
            continue
        command = get_command(app)
        while words[1:] and hasattr(command, "commands"):
            assert words[1] in command.commands, line
            command, words = command.commands[words[1]], words[1:]
        command.make_context("qattn", words[1:], resilient_parsing=False).close()


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_python_and_yaml_parse(path: Path):
    for code in blocks(path, "python"):
        if path.name != "api.md":  # signatures
            ast.parse(code)
    for code in blocks(path, "yaml"):
        yaml.safe_load(code)


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "examples").glob("*.ipynb"))], ids=lambda path: path.name)
def test_what_python_imports_from_the_packages_exists(path: Path):
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text_of(path))["cells"] if cell["cell_type"] == "code"]
        codes = [re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE) for cell in cells]
    else:
        codes = blocks(path, "python") if path.name != "api.md" else []
    missing = []
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("qattn_hf", "qattn_kernels"):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                    missing.append(f"{node.module}.{name}")
    assert missing == []


def test_the_front_page_is_short():
    lines = text_of(ROOT / "README.md").splitlines()
    assert len(lines) <= 250 and max(map(len, lines)) <= 240
    made = re.findall(r"<!-- table:\S+ -->\n(.*?)<!-- /table -->", "\n".join(lines), re.DOTALL)
    assert made and max(part.count("\n") for part in made) <= 15


def test_every_public_name_is_in_the_api():
    found = re.findall(r"^## (\w+)$", text_of(ROOT / "docs" / "api.md"), re.MULTILINE)
    assert sorted(found) == sorted(name for name in qattn_hf.__all__ if not name.startswith("__"))


def test_the_page_of_the_api_has_what_users_call():
    page = text_of(ROOT / "docs" / "api.md")
    assert "**`QAttnCache.for_model`**" in page and "**`QAttnCache.keep`**" in page
    assert "Internal:" not in page and "QAttnCache.plan" not in page


def test_every_command_is_on_the_page_of_commands():
    command = get_command(app)
    page = text_of(ROOT / "docs" / "cli.md")
    names = [name for name, inner in command.commands.items() if not inner.hidden]
    assert names and [name for name in names if not re.search(rf"^## qattn {name}\b", page, re.MULTILINE)] == []


def test_dead_links_of_a_built_site_are_found(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h2 id="here">Here</h2><img src="gone.png">', encoding="utf-8")
    good = '<a href="other/">1</a><a href="other/#here">2</a><a href="#top">3</a><b id="top"></b><a href="https://x.y">4</a>'
    bad = '<a href="other/#there">5</a><a href="quickstart.ipynb">6</a>'
    (tmp_path / "index.html").write_text(good + bad, encoding="utf-8")
    assert script("check_links", "docs").broken(tmp_path) == [
        "index.html: other/#there",
        "index.html: quickstart.ipynb",
        "other/index.html: gone.png",
    ]


def test_a_source_link_leads_to_the_line_of_its_name():
    pages = script("source_pages", "docs")
    links = list(pages.LINK.finditer(text_of(ROOT / "docs" / "api.md")))
    assert len([link for link in links if link["name"]]) > 10
    for link in links:
        line = text_of(ROOT / link["path"]).splitlines()[pages.line_of(link["path"], link["name"] or "") - 1]
        assert link["name"] is None or link["name"] in line


def test_every_method_has_a_page_that_the_front_page_leads_to():
    """The front page chooses among the methods; the page it links to lists all of them."""
    pages = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")} - {"index"}
    assert pages == set(list_methods())
    assert "](docs/methods/index.md)" in text_of(ROOT / "README.md")
    index = text_of(ROOT / "docs" / "methods" / "index.md")
    assert [name for name in pages if f"]({name}.md)" not in index] == []


def test_the_glossary_names_what_stands_in_the_code():
    folders = (ROOT / "qattn_hf", ROOT / "kernels" / "qattn_kernels")
    words = {w for folder in folders for path in folder.rglob("*.py") for w in re.findall(r"\w+", text_of(path))}
    rows = [line.split(" | ") for line in text_of(ROOT / "docs" / "glossary.md").splitlines() if line.startswith("| ")]
    spans = [span for row in rows if len(row) == 4 for span in re.findall(r"`([^`]+)`", row[3])]
    assert len(spans) > 40
    missing = {span for span in spans if not set(re.findall(r"[A-Za-z_]\w*", span)) <= words | {"py"}}
    assert missing == set()


def test_the_page_of_the_architecture_names_files_that_exist_and_all_of_many_requests():
    page = text_of(ROOT / "docs" / "architecture.md")
    named = {Path(name).name for name in re.findall(r"`[\w/]*?(\w+\.py)`", page)}
    folders = [ROOT / name for name in ("qattn_hf", "kernels", "tests", "eval")]
    assert named - {path.name for folder in folders for path in folder.rglob("*.py")} == set()
    parts = {
        path.name for part in ("generate/continuous", "server") for path in (ROOT / "qattn_hf" / part).glob("[a-z]*.py")
    }
    assert parts - named == set()


def test_every_page_is_in_the_navigation():
    navigation = text_of(ROOT / "mkdocs.yml")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES[2:]]
    notebooks = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.ipynb")]
    assert [
        name for name in (*pages, *notebooks) if not re.search(rf"[ :]{re.escape(name)}$", navigation, re.MULTILINE)
    ] == []


@pytest.mark.parametrize(
    ("bits", "codes", "bytes_"),
    [
        (4, {0: 5, 32: 9}, {0: 0x95}),
        (2, {0: 1, 16: 2, 32: 3}, {0: 0x39}),
        (3, {0: 5, 8: 4, 16: 2, 32: 7, 48: 1}, {0: 0x79, 16: 0x13}),
    ],
)
def test_worked_bytes_are_those_of_the_packing(bits: int, codes: dict[int, int], bytes_: dict[int, int]):
    code = torch.zeros(64, 1, dtype=torch.uint8)
    for token, value in codes.items():
        code[token] = value
    packed = pack(code, bits)[:, 0]
    page = text_of(ROOT / "docs" / "kernels.md")
    for place, byte in bytes_.items():
        assert packed[place] == byte and f"{byte:#04x}" in page
