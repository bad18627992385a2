"""The rule file: IDs, vocabulary, both articles placed sentence by sentence, and what the loader refuses."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import AREAS, CHECKS, load_rules

RULES = load_rules()
ARTICLES: dict[str, dict[str, Any]] = tomllib.loads((SPEC_DIR / "rules.toml").read_text("utf-8"))["articles"]
README = (SPEC_DIR / "README.md").read_text("utf-8")
GOOD = """
[rules.HKV-S1-001]
level = "MUST"
statement = "A pool never exceeds its cap."
source = { design = "4" }
checked_by = ["invariant", "test:test_rules.py"]
"""


def area(rule_id: str) -> str:
    return rule_id.split("-")[1]


def test_every_area_has_rules_numbered_without_gap_and_in_order() -> None:
    assert list(dict.fromkeys(map(area, RULES))) == list(AREAS)
    for name in AREAS:
        numbers = [int(rule_id[-3:]) for rule_id in RULES if area(rule_id) == name]
        assert numbers == list(range(1, len(numbers) + 1)), name


def test_no_statement_stands_twice() -> None:
    statements = [rule.statement.casefold() for rule in RULES.values()]
    assert sorted(set(statements)) == sorted(statements)


def test_every_check_of_the_vocabulary_has_rules() -> None:
    used = {check for rule in RULES.values() for check in rule.checked_by}
    assert set(CHECKS) <= used


def test_the_named_test_files_exist() -> None:
    named = {c.removeprefix("test:") for rule in RULES.values() for c in rule.checked_by if c.startswith("test:")}
    here = Path(__file__).parent
    assert named, "no rule is checked by a test of its own"
    assert sorted(name for name in named if not (here / name).is_file()) == []


def test_no_rule_mentions_a_fault() -> None:
    text = (SPEC_DIR / "rules.toml").read_text("utf-8")
    assert re.findall(r"KVB-\d+|#\d{3,}|\bpull request\b|\bbug\b", text, re.IGNORECASE) == []


def test_ids_inside_notes_and_statements_exist() -> None:
    for rule in RULES.values():
        for cited in re.findall(r"\b(?:HKV-)?[A-Z]+\d?-\d{3}\b", rule.statement + " " + rule.note):
            assert cited in RULES, rule.id


def test_readme_explains_every_area_and_check() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE)
    assert [r for r in rows if r in AREAS] == list(AREAS)
    assert [r for r in rows if r in CHECKS] == list(CHECKS)


@pytest.mark.parametrize("article", ARTICLES)
def test_every_sentence_is_a_rule_or_background(article: str) -> None:
    """Each section's ordinals 1..n occur exactly once, under ``sentences`` or under ``background``."""
    book = ARTICLES[article]
    placed: dict[str, list[int]] = {section: list(book["background"].get(section, ())) for section in book["sections"]}
    assert set(book["background"]) <= set(book["sections"])
    for key in book["sentences"]:
        section, _, ordinal = key.rpartition("/")
        placed[section].append(int(ordinal))
    assert {s: sorted(p) for s, p in placed.items()} == {s: list(range(1, n + 1)) for s, n in book["sections"].items()}


@pytest.mark.parametrize("article", ARTICLES)
def test_sentences_name_known_rules_in_few_words(article: str) -> None:
    for key, sentence in ARTICLES[article]["sentences"].items():
        assert set(sentence) == {"gist", "rules"}, key
        assert 3 <= len(sentence["gist"].split()) <= 6, key
        assert sentence["rules"], key
        assert set(sentence["rules"]) <= set(RULES), key


def test_sources_and_article_map_agree() -> None:
    """A rule's source.article lists exactly the sections whose sentences lead to it."""
    leads: dict[str, set[str]] = {rule_id: set() for rule_id in RULES}
    for article, book in ARTICLES.items():
        for key, sentence in book["sentences"].items():
            for rule_id in sentence["rules"]:
                leads[rule_id].add(f"{article} {key.rpartition('/')[0]}")
    assert {i: sorted(r.source.article) for i, r in RULES.items()} == {i: sorted(s) for i, s in leads.items()}


@pytest.mark.parametrize(("article", "prefix"), [("A1", "000_"), ("A2", "001_")])
def test_section_counts_are_those_of_the_articles(article: str, prefix: str, shared_data: Path) -> None:
    """Counted anew in the texts: a listing counts its lines, all other text its sentences."""
    seeds = sorted((shared_data.parent / "seeds").glob(f"{prefix}*.txt"))
    if not seeds:
        pytest.skip(f"no article {article} beside the data folder")
    lines = [line.strip() for line in seeds[0].read_text("utf-8").splitlines()[1:] if line.strip()]
    total = 0
    for line in lines:
        code = article == "A1" and re.match(r"\d+\. (?://|struct|enum|State|uint|void|class|Cache|bool|\})", line)
        body = re.sub(r"^(?:\d+\.|[-•])\s+", "", line).replace("e.g.", "eg")
        heading = not re.search(r"[.:”]$|\?", body) and len(body) < 110
        total += 1 if code else 0 if heading else len(re.split(r"(?<=[.?!])”?\s+(?=[A-Z“])", body))
    assert total == sum(ARTICLES[article]["sections"].values())


def load_text(folder: Path, text: str) -> str:
    """The message with which the loader refuses ``text``."""
    (folder / "rules.toml").write_text(text, "utf-8")
    with pytest.raises(InputError) as refused:
        load_rules(folder)
    return str(refused.value)


def test_the_good_example_loads(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(GOOD, "utf-8")
    assert load_rules(tmp_path)["HKV-S1-001"].checked_by == ("invariant", "test:test_rules.py")


def replaced(old: str, new: str) -> Callable[[], str]:
    def edit() -> str:
        assert old in GOOD
        return GOOD.replace(old, new)

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (replaced("HKV-S1-001", "HKV-S9-001"), "not an ID"),
        (replaced("HKV-S1-001", "HKV-S1-01"), "not an ID"),
        (replaced("HKV-S1-001", "HKV-S1-000"), "not an ID"),
        (replaced("HKV-S1-001", "HKV-S1-0011"), "not an ID"),
        (replaced('"MUST"', '"must"'), "Invalid enum value 'must'"),
        (replaced('level = "MUST"', ""), "missing required field `level`"),
        (replaced('level = "MUST"', "level = 1"), "Expected `str`"),
        (replaced('level = "MUST"', 'level = "MUST"\nlevle = "MUST"'), "unknown field `levle`"),
        (replaced("A pool never exceeds its cap.", ""), "statement: empty"),
        (replaced("A pool never exceeds its cap.", " ."), "statement: empty"),
        (replaced("its cap.", "its cap"), "does not end with a period"),
        (replaced("its cap.", "its cap. It never does."), "more than one sentence"),
        (replaced("its cap.", "its\\ncap."), "more than one sentence"),
        (replaced('{ design = "4" }', "{}"), "source: names no source"),
        (replaced('{ design = "4" }', '{ desing = "4" }'), "unknown field `desing`"),
        (replaced('"invariant", "test:test_rules.py"', ""), "checked_by: empty"),
        (replaced('"invariant"', '"invariants"'), "'invariants' is none of invariant, step"),
        (replaced("test:test_rules.py", "test:../x.py"), "'test:../x.py' is none of"),
        (replaced('"test:test_rules.py"', '"invariant"'), "names a check twice"),
        (replaced("[rules.HKV-S1-001]", "[rules.HKV-S1-001]\n[rules.HKV-S1-001]"), "rules.toml: "),
        (replaced("[rules.HKV-S1-001]", "[rule.HKV-S1-001]"), "rule: unknown section"),
        (lambda: "rules = 3", "rules.toml:rules: no rules"),
        (lambda: "[rules]", "rules.toml:rules: no rules"),
        (lambda: "[articles]", "rules.toml:rules: no rules"),
        (lambda: "[rules]\nHKV-S1-001 = 4", "Expected `object`, got `int`"),
        (lambda: "", "empty table"),
        (lambda: "[rules", "rules.toml: "),
    ],
)
def test_the_loader_refuses_in_one_line(tmp_path: Path, edit: Callable[[], str], reason: str) -> None:
    message = load_text(tmp_path, edit())
    assert reason in message
    assert message.startswith("rules.toml")
    assert "\n" not in message


def test_a_missing_or_binary_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^rules\.toml: cannot be read: "):
        load_rules(tmp_path)
    (tmp_path / "rules.toml").write_bytes(b"\xff\x00")
    with pytest.raises(InputError, match=r"^rules\.toml: byte 0: not UTF-8 text$"):
        load_rules(tmp_path)
