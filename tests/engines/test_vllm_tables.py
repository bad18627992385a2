"""Block tables are followed by cutting lists; here against block by block, without the engine."""

import random
from dataclasses import dataclass

import pytest

from hybridkv_ref.adapters.vllm_tables import PIECE, Held, Oldest, Run, first_block, follow, split
from hybridkv_ref.models import load_model, model_names
from hybridkv_ref.recovery import from_model

NULL = 0


@dataclass(frozen=True, eq=False)
class Block:
    """As the engine's: one object per number."""

    block_id: int


BLOCKS = [Block(n) for n in range(400)]


def changed(chance: random.Random, table: list[Block]) -> list[Block]:
    """A window that slides, a new end, a block in another one's place, or nothing left."""
    table = list(table)
    for _ in range(chance.randint(0, 2)):
        match chance.randrange(4):
            case 0 if table:
                low = chance.randint(0, len(table))
                table[:low] = [BLOCKS[NULL]] * low
            case 1:
                table += chance.choices(BLOCKS, k=chance.randint(0, 2 * PIECE))
            case 2 if table:
                table[chance.randrange(len(table))] = chance.choice(BLOCKS)
            case 3 if chance.random() < 0.3:
                table = table[: chance.randint(0, len(table))]
    return table


def spread(runs: list[Run]) -> list[tuple[int, int]]:
    return [(first + i, n) for first, numbers in runs for i, n in enumerate(numbers)]


@pytest.mark.parametrize("seed", range(20))
def test_follows_as_block_by_block(seed: int) -> None:
    chance = random.Random(seed)
    table: list[Block] = []
    seen: list[Block] = []
    numbers: list[int] = []
    for _ in range(60):
        table = changed(chance, table)
        old, new = list(numbers), [b.block_id for b in table]
        gone, came = follow(seen, numbers, table, NULL)
        assert (seen, numbers) == (table, new)
        assert seen is not table
        at = range(max(len(old), len(new)))
        pairs = [(old[i] if i < len(old) else NULL, new[i] if i < len(new) else NULL) for i in at]
        assert gone == [a for a, b in pairs if a != b and a != NULL]
        assert spread(came) == [(i, b) for i, (a, b) in enumerate(pairs) if a != b and b != NULL]


def test_a_hit_that_the_window_has_passed_in_part() -> None:
    """What is at its own place in the hit is pinned; the same number elsewhere is a new block."""
    assert split([(0, [4, 5, 6, 7])], [4, 5], NULL) == ([4, 5], [(2, [6, 7])])
    assert split([(2, [6, 4])], [4, 5, 6], NULL) == ([6], [(3, [4])])
    assert split([(1, [9, 6])], [4, 5, 6], NULL) == ([6], [(1, [9])])


@pytest.mark.parametrize("seed", range(10))
def test_held_counts_references(seed: int) -> None:
    chance, held, plain = random.Random(seed), Held(20), list[int]()
    for _ in range(200):
        if plain and chance.random() < 0.5:
            back = chance.sample(plain, chance.randint(1, len(plain)))
            held.give(back)
            for number in back:
                plain.remove(number)
        else:
            taken = chance.choices(range(20), k=chance.randint(0, 5))
            held.take(taken)
            plain += taken
        assert held.count == len(set(plain))


def test_what_a_window_left_behind_is_looked_at_when_asked() -> None:
    table = [BLOCKS[NULL]] * 100 + BLOCKS[1:9]
    seen, numbers = list(table), [b.block_id for b in table]
    first = first_block(numbers, 0, NULL)
    assert first == 100
    table[100] = BLOCKS[NULL]
    assert follow(seen, numbers, [*table, BLOCKS[9]], NULL, first) == ([1], [(108, [9])])
    assert (first_block(numbers, first, NULL), numbers[98:102]) == (101, [NULL, NULL, NULL, 2])
    assert first_block([NULL, NULL], 0, NULL) == 2
    revived = [BLOCKS[NULL]] * 50 + [BLOCKS[20]] + table[51:] + [BLOCKS[9]]
    assert follow(seen, numbers, revived, NULL, 101) == ([], [])
    assert follow(seen, numbers, revived, NULL) == ([], [(50, [20])])


@pytest.mark.parametrize("model", model_names())
def test_the_oldest_block_is_what_the_need_says(model: str) -> None:
    """At each position of a request that goes on, by one token or several, and now and then back; for every group."""
    chance = random.Random(model)
    for group in from_model(load_model(model)):
        oldest, at = Oldest(), 0
        for _ in range(600):
            assert oldest.at(group.need, group.unit, at) == group.need(at, at)[0] // group.unit
            at = max(0, at + chance.choice((1, 1, 1, 1, 2, 7, 300, -1, -3)))
