// What people can do. Every action asks once and shows its outcome.

import { el } from "/static/dom.js";

const dialog = document.getElementById("dialog");

function open(title, ...content) {
  dialog.replaceChildren(el("h2", {}, title), ...content);
  dialog.showModal();
}

function closeButton(label = "Close") {
  return el("button", { type: "button", onclick: () => dialog.close() }, label);
}

async function ask(path, options) {
  try {
    const answer = await fetch(path, options);
    return await answer.json();
  } catch {
    return { error: "the hub does not answer" };
  }
}

export function confirmStop() {
  const outcome = el("p", { role: "status", class: "outcome" });
  const stop = el("button", { type: "button", class: "danger" }, "Stop and keep");
  const back = closeButton("Train on");
  stop.addEventListener("click", async () => {
    stop.disabled = true;
    const found = await ask("/api/v1/stop", { method: "POST" });
    outcome.textContent = found.outcome ?? `Not stopped: ${found.error}`;
    stop.remove();
    back.textContent = "Close";
  });
  open(
    "Stop the training?",
    el("p", {}, "What is under way is finished, averaged, evaluated and written down. It can go on later with --resume."),
    outcome,
    el("div", { class: "buttons" }, back, stop),
  );
}

export async function showInvitation() {
  const found = await ask("/api/v1/invitation");
  if (!found.line) {
    open("Invite", el("p", {}, found.error), el("div", { class: "buttons" }, closeButton()));
    return;
  }
  const line = el("code", { class: "invitation", tabindex: "0" }, found.line);
  const outcome = el("p", { role: "status", class: "outcome" });
  const copy = el("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(found.line);
      outcome.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(line);
      outcome.textContent = "It is marked now; copy it with the keyboard.";
    }
  });
  open(
    "Invite a PC",
    el("p", {}, "Whoever pastes this line into a terminal lends a PC to this run. It is a secret: give it only to people you trust."),
    line,
    outcome,
    el("div", { class: "buttons" }, copy, closeButton()),
  );
}
