// Dialogs and actions: an action asks once and shows its outcome.

import { el } from "/static/dom.js";

const dialog = document.getElementById("dialog");

export function openDialog(title, ...content) {
  dialog.replaceChildren(el("h2", { id: "dialog-title" }, title), ...content.filter((each) => each !== null));
  if (!dialog.open) dialog.showModal();
}

export function closeButton(label = "Close") {
  return el("button", { type: "button", onclick: () => dialog.close() }, label);
}

export async function read(path, options) {
  try {
    const answer = await fetch(path, options);
    return await answer.json();
  } catch {
    return { error: "nobody answers; is the program still running?" };
  }
}

export function act(path, wish) {
  const headers = { "Content-Type": "application/json" };
  return read(`/api/v1/${path}`, { method: "POST", headers, body: JSON.stringify(wish) });
}

export function askOnce({ title, text, label, back, path, wish = {}, isDanger = true }) {
  const outcome = el("p", { role: "status", class: "outcome" });
  const doIt = el("button", { type: "button", class: isDanger ? "danger" : "" }, label);
  const close = closeButton(back);
  doIt.addEventListener("click", async () => {
    doIt.disabled = true;
    const found = await act(path, wish);
    outcome.textContent = found.outcome ?? `Not done: ${found.error}`;
    doIt.remove();
    close.textContent = "Close";
  });
  openDialog(title, el("p", {}, text), outcome, el("div", { class: "buttons" }, close, doIt));
  return outcome;
}

export function copyable(text) {
  const line = el("code", { class: "invitation", tabindex: "0" }, text);
  const copy = el("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(line);
      copy.textContent = "Marked: copy it with the keyboard";
    }
  });
  return el("div", { class: "copyable" }, line, el("div", { class: "row" }, copy));
}
