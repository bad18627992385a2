"""The expression language: what it types and refuses, and that all back ends agree on what an expression means."""

from typing import Any

import pytest
import z3
from helpers import evaluate
from hypothesis import given
from hypothesis import strategies as st

from hybridkv_ref.compile_py import python
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, COUNTER, INT, Expr, Lit, Member, Op, Ref, Scope, enum, parse, refs, render, rewrite
from hybridkv_ref.model_checks.smt import constant, literal, term

FRUIT, TREE = enum(("FIG", "PEAR", "PLUM"), "fruit"), enum(("ASH", "OAK"), "tree")
REFS = {
    "a": Ref("self", "a", INT),
    "b": Ref("global", "b", INT),
    "tally": Ref("self", "tally", COUNTER),
    "req.s": Ref("req", "s", INT),
    "cap": Ref("const", "cap", INT),
    "n": Ref("input", "n", INT),
    "p": Ref("self", "p", BOOL),
    "lease.q": Ref("lease", "q", BOOL),
    "fruit": Ref("self", "fruit", FRUIT),
    "lease.fruit": Ref("lease", "fruit", FRUIT),
    "tree": Ref("self", "tree", TREE),
}
SCOPE = Scope(REFS, {"SWEET": {FRUIT: ("FIG", "PLUM")}, "SMALL": {FRUIT: ("FIG",), TREE: ("ASH",)}})
ARITH = Scope(REFS, SCOPE.sets, arith=True)
STEP = Scope(REFS, SCOPE.sets, new=True)
A, B, P, F = REFS["a"], REFS["b"], REFS["p"], REFS["fruit"]


@pytest.mark.parametrize(
    ("text", "want", "tree"),
    [
        ("True", BOOL, Lit(1, BOOL)),
        ("a", INT, A),
        ("tally", INT, REFS["tally"]),
        ("req.s", INT, REFS["req.s"]),
        ("-a", INT, Op("neg", (A,), INT)),
        ("a + b - 1", INT, Op("-", (Op("+", (A, B), INT), Lit(1, INT)), INT)),
        ("a == b", BOOL, Op("==", (A, B), BOOL)),
        ("a != b", BOOL, Op("!=", (A, B), BOOL)),
        ("a < b", BOOL, Op("<", (A, B), BOOL)),
        ("a <= b", BOOL, Op("<=", (A, B), BOOL)),
        ("a > b", BOOL, Op(">", (A, B), BOOL)),
        ("a >= b", BOOL, Op(">=", (A, B), BOOL)),
        ("p and lease.q and p", BOOL, Op("and", (P, REFS["lease.q"], P), BOOL)),
        ("p or not p", BOOL, Op("or", (P, Op("not", (P,), BOOL)), BOOL)),
        ("implies(p, a > b)", BOOL, Op("implies", (P, Op(">", (A, B), BOOL)), BOOL)),
        ("a if p else b", INT, Op("ite", (P, A, B), INT)),
        ("PLUM if p else fruit", FRUIT, Op("ite", (P, Lit("PLUM", FRUIT), F), FRUIT)),
        ("p == (a > b)", BOOL, Op("==", (P, Op(">", (A, B), BOOL)), BOOL)),
        ("fruit == FIG", BOOL, Op("==", (F, Lit("FIG", FRUIT)), BOOL)),
        ("FIG == fruit", BOOL, Op("==", (Lit("FIG", FRUIT), F), BOOL)),
        ("fruit in SWEET", BOOL, Member(F, ("FIG", "PLUM"))),
        ("tree in SMALL", BOOL, Member(REFS["tree"], ("ASH",))),
        ("fruit in {PEAR, FIG}", BOOL, Member(F, ("PEAR", "FIG"))),
        ("fruit not in SWEET", BOOL, Op("not", (Member(F, ("FIG", "PLUM")),), BOOL)),
    ],
)
def test_an_expression_is_typed_and_becomes_one_tree(text: str, want: Any, tree: Expr) -> None:
    assert parse(text, SCOPE, "x", want) == tree


def test_operators_bind_as_in_python() -> None:
    assert parse("p or p and not a == b + 1", SCOPE, "x") == parse("p or (p and (not (a == (b + 1))))", SCOPE, "x")
    assert parse("a - b - 1", SCOPE, "x", INT) != parse("a - (b - 1)", SCOPE, "x", INT)


@pytest.mark.parametrize(
    ("text", "want", "column", "token", "reason"),
    [
        ("a", BOOL, 1, "a", "is int, expected bool"),
        ("p", INT, 1, "p", "is bool, expected int"),
        ("a + p", INT, 5, "p", "is bool, expected int"),
        ("p and a", BOOL, 7, "a", "is int, expected bool"),
        ("not a", BOOL, 5, "a", "is int, expected bool"),
        ("a == p", BOOL, 1, "a == p", "compares int with bool"),
        ("fruit == tree", BOOL, 1, "fruit == tree", "compares enum{FIG, PEAR, PLUM} with enum{ASH, OAK}"),
        ("fruit == OAK", BOOL, 10, "OAK", "not a member of enum{FIG, PEAR, PLUM}"),
        ("fruit < FIG", BOOL, 1, "fruit < FIG", "'<' needs numbers"),
        ("p < p", BOOL, 1, "p < p", "'<' needs numbers, not bool"),
        ("a in SWEET", BOOL, 1, "a", "'in' needs an enum, not int"),
        ("fruit in SOUR", BOOL, 10, "SOUR", "unknown set"),
        ("tree in SWEET", BOOL, 9, "SWEET", "not a set of enum{ASH, OAK}"),
        ("fruit in {FIG, OAK}", BOOL, 16, "OAK", "not a member"),
        ("fruit in {FIG, lease.fruit}", BOOL, 16, "lease.fruit", "not a member"),
        ("a if p else p", INT, 1, "a if p else p", "branches are int and bool"),
        ("a if a else b", INT, 6, "a", "is int, expected bool"),
        ("a == bb", BOOL, 6, "bb", "unknown name"),
        ("lease.seen == a", BOOL, 1, "lease.seen", "unknown name"),
        ("a < b < 3", BOOL, 1, "a < b < 3", "chained comparisons"),
        ("a * 2", INT, 1, "a * 2", "not part of the expression language"),
        ("a is b", BOOL, 1, "a is b", "not part of the expression language"),
        ("1.5", INT, 1, "1.5", "not part of the expression language"),
        ("'FIG' == fruit", BOOL, 1, "'FIG'", "not part of the expression language"),
        ("sum(a)", INT, 1, "sum(a)", "not part of the expression language"),
        ("implies(p)", BOOL, 1, "implies(p)", "not part of the expression language"),
        ("implies(p, q=p)", BOOL, 1, "implies(p, q=p)", "not part of the expression language"),
        ("a.b.c", INT, 1, "a.b.c", "not part of the expression language"),
        ("(lambda: p)()", BOOL, 1, "(lambda: p)()", "not part of the expression language"),
        ("new(a) == a", BOOL, 1, "new(a)", "not part of the expression language"),
        ("min(a, b)", INT, 1, "min(a, b)", "not part of the expression language"),
    ],
)
def test_a_refusal_names_place_column_token_and_reason(
    text: str, want: Any, column: int, token: str, reason: str
) -> None:
    with pytest.raises(InputError) as error:
        parse(text, SCOPE, "t.toml: rows.r.when[0]", want)
    message = str(error.value)
    assert message.startswith(f"t.toml: rows.r.when[0]: column {column}, at '{token}': ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["", "a ==", "a = b", "(a", "a; b", "p and", "\x00", "a b", "(" * 300 + "a" + ")" * 300]
)
def test_text_that_is_no_expression_is_one_clear_line(text: str) -> None:
    with pytest.raises(InputError, match=r"^t: column \d+") as error:
        parse(text, SCOPE, "t", INT)
    assert "\n" not in str(error.value)


def test_an_endless_expression_is_refused() -> None:
    with pytest.raises(InputError, match=r"^t: column 1"):
        parse("not " * 5000 + "p", SCOPE, "t")


def test_something_else_than_text_is_refused() -> None:
    with pytest.raises(InputError, match="t: expected an expression in quotes, got 3"):
        parse(3, SCOPE, "t")  # type: ignore[arg-type]


def test_the_first_of_two_mistakes_is_named() -> None:
    with pytest.raises(InputError, match="column 1, at 'x'"):
        parse("x == y", SCOPE, "t")


def test_new_stands_for_one_variable_and_only_in_step_properties() -> None:
    assert parse("new(a)", STEP, "t", INT) == Ref("self", "a", INT, new=True)
    for text, token in (("new(cap)", "cap"), ("new(n)", "n"), ("new(a + 1)", "a \\+ 1")):
        with pytest.raises(InputError, match=f"at '{token}': new\\(...\\) takes one variable"):
            parse(text, STEP, "t", INT)


def test_recovery_functions_stand_only_where_they_are_allowed() -> None:
    assert parse("floor_to(a, b)", ARITH, "t", INT) == Op("floor_to", (A, B), INT)
    with pytest.raises(InputError, match="at 'p': is bool, expected int"):
        parse("max(a, p)", ARITH, "t", INT)


def test_enums_with_equal_members_are_still_two_types() -> None:
    twin = enum(FRUIT.members, "other")
    scope = SCOPE.with_names({"twin": Ref("self", "twin", twin)})
    with pytest.raises(InputError, match="compares"):
        parse("fruit == twin", scope, "t")


def test_refs_finds_every_variable_and_rewrite_replaces_it() -> None:
    tree = parse("implies(fruit in SWEET, a + b > (1 if p else -n))", SCOPE, "t")
    assert refs(tree) == {F, A, B, P, REFS["n"]}
    assert refs(rewrite(tree, lambda e: A if e == B else None)) == {F, A, P, REFS["n"]}


# -- any expression at all ---------------------------------------------------------------------------------------------
def numbers(depth: int, arith: bool) -> st.SearchStrategy[Expr]:
    names = [r for r in REFS.values() if r.type.number]
    leaf: st.SearchStrategy[Expr] = st.one_of(st.sampled_from(names), st.integers(0, 5).map(lambda v: Lit(v, INT)))
    if not depth:
        return leaf
    below = numbers(depth - 1, arith)
    kinds = ["+", "-", *(("min", "max") if arith else ())]
    options = [
        leaf,
        st.tuples(st.sampled_from(kinds), below, below).map(lambda t: Op(t[0], (t[1], t[2]), INT)),
        below.map(lambda e: Op("neg", (e,), INT)),
        st.tuples(truths(depth - 1, arith), below, below).map(lambda t: Op("ite", t, INT)),
    ]
    if arith:
        options.append(st.tuples(below, st.integers(1, 4)).map(lambda t: Op("floor_to", (t[0], Lit(t[1], INT)), INT)))
    return st.one_of(options)


def fruits(depth: int, literals: bool, arith: bool) -> st.SearchStrategy[Expr]:
    """Enum expressions; a literal cannot stand where nothing else says which enum is meant."""
    names: list[Expr] = [REFS["fruit"], REFS["lease.fruit"]]
    leaf = st.sampled_from(names + [Lit(m, FRUIT) for m in FRUIT.members] if literals else names)
    if not depth:
        return leaf
    first, second = fruits(depth - 1, literals, arith), fruits(depth - 1, True, arith)
    return st.one_of(leaf, st.tuples(truths(depth - 1, arith), first, second).map(lambda t: Op("ite", t, FRUIT)))


def truths(depth: int, arith: bool) -> st.SearchStrategy[Expr]:
    names = [r for r in REFS.values() if r.type == BOOL]
    leaf: st.SearchStrategy[Expr] = st.one_of(st.sampled_from(names), st.booleans().map(lambda v: Lit(int(v), BOOL)))
    if not depth:
        return leaf
    below, number = truths(depth - 1, arith), numbers(depth - 1, arith)
    compared = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
    some = st.lists(st.sampled_from(FRUIT.members), min_size=1, max_size=3, unique=True)
    return st.one_of(
        leaf,
        st.tuples(st.sampled_from(["and", "or"]), st.lists(below, min_size=2, max_size=3)).map(
            lambda t: Op(t[0], tuple(t[1]), BOOL)
        ),
        below.map(lambda e: Op("not", (e,), BOOL)),
        st.tuples(below, below).map(lambda t: Op("implies", t, BOOL)),
        st.tuples(st.sampled_from(["==", "!="]), below, below).map(lambda t: Op(t[0], (t[1], t[2]), BOOL)),
        st.tuples(compared, number, number).map(lambda t: Op(t[0], (t[1], t[2]), BOOL)),
        st.tuples(st.sampled_from(["==", "!="]), fruits(depth - 1, False, arith), fruits(depth - 1, True, arith)).map(
            lambda t: Op(t[0], (t[1], t[2]), BOOL)
        ),
        st.tuples(fruits(depth - 1, False, arith), some).map(lambda t: Member(t[0], tuple(t[1]))),
    )


ANY = st.one_of(truths(3, False), numbers(3, False), truths(2, True), numbers(2, True))
VALUES = st.fixed_dictionaries(
    {
        n: st.integers(-4, 6) if r.type.number else st.booleans() if r.type == BOOL else st.sampled_from(r.type.members)
        for n, r in REFS.items()
    }
)


@given(ANY)
def test_what_is_rendered_reads_back_as_the_same_tree(tree: Expr) -> None:
    assert parse(render(tree), ARITH, "t", tree.type) == tree


@given(ANY, VALUES)
def test_what_runs_and_what_is_proved_have_the_value_of_the_tree(tree: Expr, values: dict[str, Any]) -> None:
    by_ref = {REFS[name]: value for name, value in values.items()}
    meant = evaluate(tree, by_ref.__getitem__)
    local = {f"v{i}": by_ref[ref] for i, ref in enumerate(by_ref)}
    names = {ref: f"v{i}" for i, ref in enumerate(by_ref)}
    source = python(tree, names.__getitem__)
    assert eval(source, {"min": min, "max": max}, local) == meant

    cells = {ref: constant(names[ref], ref.type) for ref in by_ref}
    put_in = [(cells[ref], literal(value, ref.type)) for ref, value in by_ref.items()]
    found = z3.simplify(z3.substitute(term(tree, cells.__getitem__), *put_in))
    assert z3.is_true(found) if meant is True else z3.is_false(found) if meant is False else found.as_long() == meant


@given(numbers(2, False), numbers(2, False), VALUES)
def test_the_comparison_would_notice_a_wrong_operator(left: Expr, right: Expr, values: dict[str, Any]) -> None:
    by_ref = {REFS[name]: value for name, value in values.items()}
    less, more = Op("<", (left, right), BOOL), Op(">=", (left, right), BOOL)
    assert evaluate(less, by_ref.__getitem__) is not evaluate(more, by_ref.__getitem__)


def test_an_empty_set_reads_as_false_in_every_back_end() -> None:
    scope = Scope(REFS, {"NOTHING": {FRUIT: ()}})
    tree = parse("fruit in NOTHING", scope, "t")
    assert evaluate(tree, {F: "FIG"}.__getitem__) is False
    assert eval(python(tree, lambda ref: "'FIG'")) is False
    assert z3.is_false(z3.simplify(term(tree, lambda ref: z3.IntVal(0))))
    assert parse(render(tree), SCOPE, "t") == Lit(0, BOOL)
