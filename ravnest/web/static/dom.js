// Small helpers around the document. Text only ever becomes text: nothing here parses HTML.

export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
}

export function setText(node, text) {
  const shown = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== shown) node.textContent = shown;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

export function setVar(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

export function setTitle(node, text) {
  if (node.title !== text) node.title = text;
}

// Keep one child per item, in order; a child is made once and updated in place.
export function keep(parent, items, keyOf, make, update) {
  const known = parent.kept ?? (parent.kept = new Map());
  const wanted = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let child = known.get(key);
    if (!child) {
      child = make(item);
      known.set(key, child);
    }
    update(child, item);
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
  }
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}

// A list of [name, value].
export function fillFacts(list, facts) {
  keep(
    list,
    facts,
    (each) => each[0],
    ([name]) => el("div", {}, el("dt", {}, name), el("dd", {})),
    (item, [, value]) => setText(item.lastChild, value),
  );
}

// The large numbers at the top, each [name, value, more]; with a share, a bar of progress above them.
export function fillSummary(box, facts, share = null) {
  if (!box.firstChild) {
    if (share !== null) {
      box.append(el("div", { class: "progress", role: "progressbar", "aria-label": "Trained", "aria-valuemin": 0, "aria-valuemax": 100 }, el("i", {})));
    }
    box.append(el("dl", {}));
  }
  if (share !== null) {
    setVar(box.firstChild.firstChild, "width", `${(100 * share).toFixed(2)}%`);
    box.firstChild.setAttribute("aria-valuenow", (100 * share).toFixed(0));
  }
  keep(
    box.lastChild,
    facts,
    (each) => each[0],
    ([name]) => el("div", {}, el("dt", {}, name), el("dd", {}), el("dd", { class: "more" })),
    (item, [, value, more]) => {
      setText(item.children[1], value);
      setText(item.children[2], more);
    },
  );
}

export function showLinkState(state, isConnected, run) {
  const isOver = run !== null && !run.is_live;
  setText(state, !isConnected ? "no answer; trying again" : isOver ? "read-only" : run === null ? "" : "live");
  setClass(state, `link-state ${!isConnected ? "is-lost" : isOver ? "is-over" : "is-live"}`);
}

export function nodeLink(name) {
  return `#/node/${encodeURIComponent(name)}`;
}
