"""The pages of docs/: their Python runs as printed, their commands parse, their links and anchors
resolve.
"""

import re
import shlex
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from burnish.loops.cli import main
from burnish.loops.environments import resolve as environments
from burnish.loops.recipes import RECIPES
from burnish.loops.rewards import resolve as rewards
from tiny import save_model, sums, write_rows

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
COLUMNS = 100
PREFIXES = r"^\s*(?:\$ )?(?:torchrun [\w. -]*-m |torchrun [\w. -]*--no-python )?"
EXAMINED = {"plan": "--gpus", "data": "--rows"}
TOOLS = ("chat", "export", "merge", "score")  # on what was trained
REQUIRED = {"--model": "model", "--data": "data.jsonl", "--output": "runs/example"}


# Pages whose blocks continue a program, which tests of their own run with what they need.
RUN_ELSEWHERE = {
    "kernels.md": "tests/test_readme.py",
    "your-own-loss.md": "tests/loops/train/test_signatures_page.py",
}


def text(page):
    return (DOCS / page).read_text()


def python_blocks(page):
    """The fenced blocks of Python; one of another kind, such as ``text``, is no code to run."""
    return re.findall(r"^```python\n(.*?)^```", text(page), flags=re.S | re.M)


def commands(page):
    """The words of each line of code that calls ``burnish``, with its continued lines."""
    code = "\n".join(
        re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text(page), flags=re.S | re.M)
    )
    code += "\n" + "\n".join(
        re.findall(r"^    .*$", re.sub(r"^```.*?^```", "", text(page), flags=re.S | re.M), re.M)
    )
    lines = code.replace("\\\n", " ").splitlines()
    found = [match[1] for line in lines if (match := re.match(PREFIXES + r"(burnish .*)$", line))]
    return [shlex.split(command, comments=True)[1:] for command in found]


def anchor(heading):
    """The anchor that GitHub and mkdocs give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_python_of_a_page_runs_as_printed(page, tmp_path, monkeypatch):
    blocks = python_blocks(page)
    if not blocks or str(page) in RUN_ELSEWHERE:
        return
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "pairs.jsonl", sums(8))
    names = {"name": str(save_model(tmp_path / "model"))}
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_commands_of_a_page_parse(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in commands(page):
        if words[0] in EXAMINED:
            words = without_flag(words[1:], EXAMINED[words[0]])
        if words[0] in TOOLS:
            import_module(f"burnish.loops.cli.{words[0]}").parser().parse_args(words[1:])
            continue
        if words[0] not in RECIPES:
            assert main([words[0], "--help"]) != 2 or "usage" in "".join(capsys.readouterr()), words
            continue
        if words[0] != "demo":
            with pytest.raises(SystemExit) as ended:
                main([words[0], *complete(words[1:]), "--print_config"])
            assert ended.value.code == 0, f"{' '.join(words)}\n{capsys.readouterr().err}"


def without_flag(words, flag):
    """The words without a flag of ``plan`` or ``data`` and its value."""
    if flag not in words:
        return words
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


def complete(words):
    """The flags of a command, with what a page leaves out: an ellipsis, its YAML file, settings
    that must be given.
    """
    flags = [word for word in words if word not in ("...", "--dry_run")]
    if flags and not flags[0].startswith("--"):
        flags.insert(0, "--config")
    for flag, value in REQUIRED.items():
        if flag not in flags:
            flags += [flag, value]
    for word in flags:
        if word.endswith(".yaml"):
            Path(word).write_text("seed: 1\n")
    return flags


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_links_of_a_page_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (DOCS / page).parent / path if path else DOCS / page
        assert file.exists(), f"{page} links to {target}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.M)
            assert fragment in map(anchor, headings), f"{page} links to {target}"


def test_the_page_of_rewards_has_each_that_is_there_with_its_settings():
    page = text("rewards-and-environments.md").partition("### Rewards that are there")[2]
    rows = re.findall(r"^\| `(\w+)` \| .* \|(.*)\|$", page.partition("###")[0], flags=re.M)
    assert [name for name, _ in rows] == list(rewards.SHIPPED)
    for name, settings in rows:
        module, _, attribute = rewards.SHIPPED[name].partition(":")
        found = getattr(import_module(module, "burnish.loops.rewards"), attribute)
        known = signature(found).parameters
        named = set(re.findall(r"`(\w+)`", settings)) - {"answer"}
        assert named <= known.keys(), name
        required = {each.name for each in known.values() if each.default is each.empty}
        assert required - {"row", "sample", "tokenizer"} <= named, name


def test_the_page_of_environments_names_each_that_is_there():
    page = text("rewards-and-environments.md").partition("## An environment")[2]
    named = set(re.findall(r"`(\w+)`", page[page.index("Three are there") :].partition(".")[0]))
    assert named == environments.SHIPPED.keys()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_files_that_a_page_names_exist(page):
    for path in re.findall(r"`([a-z]+/[\w./-]+\.(?:py|yaml|sh|md))`", text(page)):
        assert (ROOT / path).exists(), f"{page} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_is_narrow_and_begins_with_its_title(page):
    lines = text(page).splitlines()
    assert lines[0].startswith("# ")
    prose = [line for line in lines if not line.startswith(("|", "    ", "{")) and "](" not in line]
    assert max(map(len, prose)) <= COLUMNS
