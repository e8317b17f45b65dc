"""The picture: valid XML on its own, everything of the plan in it, strangers' names as text only."""

import re
import xml.etree.ElementTree as ET

import pytest
from support.sample_plans import sample

from ravnest.views.plan_picture import clean, draw_plan, fit, shorten_text, show_positions, text_width, wrap

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = ["</text><script>alert(1)</script>", "a\x00b\x1b[31m\u202e", "\"><image href='x'/>", "]]>&amp;<!--"]


def parse(picture):
    root = ET.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    return root


def titles(root):
    return [element.text for element in root.iter(f"{SVG}title")]


@pytest.mark.parametrize(
    "sizes", [(1,), (2,), (20,), (1, 1), (3, 2), (5, 7, 3), (4,) * 8, (12, 1) * 5], ids=str
)
def test_every_stage_and_ring_is_there_and_inside_the_page(sizes):
    one = sample(*sizes, spares=3, positions=60)
    root = parse(draw_plan(*one.facts))
    texts = titles(root)
    for k, cluster in enumerate(one.plan.clusters):
        for stage in cluster.stages:
            title = next(t for t in texts if t.startswith(f"{stage.node}: Stage "))
            assert show_positions(stage.start, stage.stop) in title
            assert f"cluster {chr(ord('A') + k)}" in title
    for number, ring in enumerate(one.plan.rings, 1):
        title = next(t for t in texts if t.startswith(f"Ring {number}: "))
        assert show_positions(ring.start, ring.stop) in title
        assert all(owner in title for owner in ring.owners)
    assert sum(t.startswith("Ring ") for t in texts) == len(one.plan.rings)
    dots = len(list(root.iter(f"{SVG}circle")))
    assert dots == len(one.plan.rings) * len(sizes)
    width, height = (float(root.get(key)) for key in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width + 0.1
        assert 0 <= y <= y + h <= height + 0.1


def test_stages_of_one_cluster_lie_side_by_side_in_order():
    one = sample(6, 3)
    root = parse(draw_plan(*one.facts))
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and ": Stage " in title.text:
            boxes[title.text.split(":")[0]] = rect
    for cluster in one.plan.clusters:
        row = [boxes[stage.node] for stage in cluster.stages]
        assert len({rect.get("y") for rect in row}) == 1
        ends = [
            float(v) for rect in row for v in (rect.get("x"), float(rect.get("x")) + float(rect.get("width")))
        ]
        assert ends == sorted(ends)


def test_header_tells_model_rate_staleness_round_and_bottleneck():
    one = sample(3, 2, spares=1)
    text = " ".join(parse(draw_plan(*one.facts)).itertext())
    assert "sample-model on 6 PCs" in text
    assert "samples/s" in text
    assert "2 clusters" in text
    assert "Bottleneck: " in text
    assert "a round of averaging" in text
    assert f"{one.plan.backups[0].spare} backs up {one.plan.backups[0].node}" in text


def test_hostile_names_stay_text():
    one = sample(2, spares=2, names=HOSTILE)
    picture = draw_plan(*one.facts)
    root = parse(picture)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags == {"svg", "title", "style", "rect", "g", "text", "path", "tspan"}
    assert any(HOSTILE[0] in text for text in titles(root))
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", picture)


def test_picture_needs_nothing_from_outside():
    picture = draw_plan(*sample(3, 2).facts).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|url\(|@import|href|<script|<foreignObject|\son\w+=", picture)


def test_same_plan_same_bytes():
    assert draw_plan(*sample(5, 3, spares=4).facts) == draw_plan(*sample(5, 3, spares=4).facts)


def test_many_clusters_and_spares_are_counted_not_drawn():
    one = sample(*[2] * 30, spares=50)
    text = "\n".join(parse(draw_plan(*one.facts)).itertext())
    assert "and 6 more clusters" in text
    assert "and 14 more spares" in text
    assert "Cluster X" in text
    assert "Cluster Y" not in text
    assert "more clusters" not in "\n".join(parse(draw_plan(*sample(*[2] * 24).facts)).itertext())


def test_relayed_hop_and_bottleneck_are_marked():
    hidden = "\n".join(titles(parse(draw_plan(*sample(3, is_reachable=False).facts))))
    assert "pc-000 to pc-001, through the hub" in hidden
    assert "through the hub" not in "\n".join(titles(parse(draw_plan(*sample(3).facts))))
    assert hidden.count("the bottleneck") == 1
    arrows = [
        path.get("class")
        for path in parse(draw_plan(*sample(3, is_reachable=False).facts)).iter(f"{SVG}path")
    ]
    assert arrows.count("f-relay") == 2


def test_a_line_of_thousands_of_positions_stays_a_small_picture():
    long = sample(3, 2, positions=3000)
    assert len(draw_plan(*long.facts)) < 60_000


def test_text_is_cut_to_its_room():
    assert fit("short", 100, 12) == "short"
    assert fit("a long sentence", 40, 12).endswith("…")
    assert fit("wide", 1, 12) == ""
    assert shorten_text("campus-0028", 50, 10) in ("camp…028", "cam…028", "cam…28", "camp…0028")
    assert shorten_text("abc", 0, 10) == ""
    assert all(text_width(shorten_text("x" * 40, room, 10), 10) <= room for room in range(8, 200, 7))
    assert text_width("日本", 10) > text_width("ab", 10)
    lines = wrap("one two three four", 50, 10)
    assert " ".join(lines) == "one two three four"
    assert len(lines) > 1
    assert clean("<a&'\"\x07>") == "&lt;a&amp;&#x27;&quot;\ufffd&gt;"
