"""Roots and paths: each leaf leads to the root from its own place only."""

import pytest

from ravnest.averaging.direct import HashTree, digest_content, follow_path


def leaves(count: int) -> list[bytes]:
    return [digest_content(bytes([k])) for k in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 100])
def test_every_leaf_leads_to_the_root(count):
    found = leaves(count)
    for place, leaf in enumerate(found):
        path = HashTree(found).find_path(place)
        assert follow_path(leaf, place, count, path) == (HashTree(found).root, ())


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_another_leaf_place_or_path_leads_elsewhere(count):
    found = leaves(count)
    root, path = HashTree(found).root, HashTree(found).find_path(1)
    assert follow_path(digest_content(b"else"), 1, count, path)[0] != root
    assert follow_path(found[1], 0, count, path)[0] != root
    assert follow_path(found[1], 1, count, path[:-1])[0] != root
    assert follow_path(found[1], 1, count, (bytes(16), *path[1:]))[0] != root


def test_what_follows_a_path_is_left_for_the_next_one():
    found = leaves(4)
    more = HashTree(leaves(2)).find_path(0)
    assert follow_path(found[2], 2, 4, (*HashTree(found).find_path(2), *more)) == (HashTree(found).root, more)


def test_no_leaf_is_a_pair_of_others():
    found = leaves(2)
    assert digest_content(found[0] + found[1]) != HashTree(found).root
    assert digest_content(b"pair" + found[0] + found[1]) != HashTree(found).root


def test_an_empty_part_has_a_root_too():
    assert HashTree([]).root == HashTree([bytes(16)]).root
