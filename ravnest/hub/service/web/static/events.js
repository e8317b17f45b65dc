// Everything people were told, as a timeline that can be filtered.

import { el, keep, nodeLink, setText } from "/static/dom.js";
import { clock, count } from "/static/format.js";

const TOPICS = ["members", "plan", "training", "rounds", "checkpoints", "hub"];
const MOST_SHOWN = 500;

export function eventsView() {
  const chosen = new Set(TOPICS);
  const search = el("input", { type: "search", placeholder: "words or a node", "aria-label": "Search in events" });
  const onlyBad = el("input", { type: "checkbox" });
  const shown = el("p", { class: "facts", role: "status" });
  const list = el("ol", { class: "news timeline" });
  const boxes = TOPICS.map((topic) => {
    const box = el("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(topic);
      else chosen.delete(topic);
      redraw();
    });
    return el("label", {}, box, topic);
  });
  search.addEventListener("input", () => redraw());
  onlyBad.addEventListener("change", () => redraw());
  const filters = el(
    "div",
    { class: "controls" },
    el("fieldset", {}, el("legend", {}, "About"), ...boxes),
    el("label", {}, onlyBad, "only what went wrong"),
    search,
  );
  const element = el("div", { class: "events" }, filters, el("section", { class: "card" }, shown, list));
  let last = null;

  function update(store) {
    last = store;
    const words = search.value.trim().toLowerCase();
    const found = store.news.filter(
      (each) =>
        chosen.has(each.topic) &&
        (!onlyBad.checked || each.tone === "bad" || each.tone === "warning") &&
        (!words || `${each.text} ${each.kind} ${each.names.join(" ")}`.toLowerCase().includes(words)),
    );
    const newest = found.slice(-MOST_SHOWN).reverse();
    setText(shown, `${count(found.length)} of ${count(store.news.length)} events, the newest first`);
    fillTimeline(list, newest, store.run);
  }

  function redraw() {
    if (last) update(last);
  }

  return { element, update };
}

const MOST_LINKS = 8;

// A sentence in pieces: names of nodes become links where they stand, or behind it if they are not in it.
export function linkNames(text, names) {
  let pieces = [text];
  const others = [];
  for (const name of [...new Set(names)].slice(0, MOST_LINKS)) {
    const index = pieces.findIndex((piece) => typeof piece === "string" && holds(piece, name));
    if (index < 0) {
      others.push(name);
      continue;
    }
    const at = pieces[index].indexOf(name);
    const ends = [pieces[index].slice(0, at), pieces[index].slice(at + name.length)];
    pieces = [...pieces.slice(0, index), ends[0], el("a", { href: nodeLink(name) }, name), ends[1], ...pieces.slice(index + 1)];
  }
  return [...pieces, ...others.map((name) => el("a", { class: "also", href: nodeLink(name) }, name))];
}

function holds(piece, name) {
  const at = piece.indexOf(name);
  const next = piece[at + name.length] ?? " ";
  return name !== "" && at >= 0 && !/[\w-]/.test(next);
}

export function fillTimeline(list, news, run) {
  keep(
    list,
    news,
    (each) => each.number,
    (each) =>
      el(
        "li",
        { class: `tone-${each.tone}` },
        el("time", {}, clock(run, each.at)),
        el("span", { class: "what" }, ...linkNames(each.text, each.names)),
        el("span", { class: "topic" }, each.topic),
      ),
    () => {},
  );
}
