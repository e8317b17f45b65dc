// What people can do with a run.

import { act, askOnce, closeButton, copyable, openDialog, read } from "/static/dialogs.js";
import { el } from "/static/dom.js";

export function confirmStop() {
  const text = "What is under way is finished, averaged, evaluated and written down. It can go on later with --resume.";
  askOnce({ title: "Stop the training?", text, label: "Stop and keep", back: "Train on", path: "stop" });
}

export function confirmPause(isPaused) {
  const facts = isPaused
    ? ["Pause the training?", "Nodes finish what they have, then stay and wait. Nothing is lost.", "Pause", "Train on"]
    : ["Go on with the training?", "Nodes get work again.", "Go on", "Stay paused"];
  const [title, text, label, back] = facts;
  askOnce({ title, text, label, back, path: "pause", wish: { is_paused: isPaused }, isDanger: false });
}

export function confirmCheckpoint() {
  const text = "What was trained up to now is written into the run's folder. Training goes on meanwhile.";
  const outcome = askOnce({ title: "Write a checkpoint now?", text, label: "Write it", back: "Not now", path: "checkpoint", isDanger: false });
  awaited = { kinds: ["Checkpointed", "NotCheckpointed"], outcome };
}

// An action whose outcome comes later, as a piece of news.
let awaited = null;

export function hearNews(news) {
  const found = awaited ? news.find((each) => awaited.kinds.includes(each.kind)) : undefined;
  if (!found) return;
  if (awaited.outcome.isConnected && awaited.outcome.textContent) awaited.outcome.textContent = found.text;
  awaited = null;
}

export function confirmKick(name) {
  const text = "Others take over its stage. It may come back with another key, unless you withdraw its invitation.";
  askOnce({ title: `Send ${name} away?`, text, label: "Send away", back: "Let it stay", path: "kick", wish: { node: name } });
}

export async function showInvitation(said = null, made = null) {
  const [everybody, guests] = await Promise.all([read("/api/v1/invitation"), read("/api/v1/guests")]);
  if (!everybody.line) {
    openDialog("Invite", el("p", {}, everybody.error), el("div", { class: "buttons" }, closeButton()));
    return;
  }
  const outcome = el("p", { role: "status", class: "outcome" }, said ?? "");
  openDialog(
    "Invite a PC",
    el("p", {}, "Whoever pastes a line into a terminal lends a PC to this run. Lines are secrets."),
    el("h3", {}, "One person"),
    guestForm(outcome),
    outcome,
    made ? invitationBox(made) : null,
    el("h3", {}, "Everybody who has this line"),
    invitationBox(everybody),
    Array.isArray(guests) ? guestTable(guests, outcome) : null,
    el("div", { class: "buttons" }, closeButton()),
  );
}

// The line, and a QR code of it for a phone, which is shown on request: it is a secret too.
function invitationBox({ line, code }) {
  const shown = el("div", { class: "code", hidden: true });
  const button = el("button", { type: "button", "aria-expanded": "false" }, "QR code");
  button.addEventListener("click", () => {
    shown.hidden = !shown.hidden;
    button.setAttribute("aria-expanded", String(!shown.hidden));
    if (!shown.firstChild) shown.append(drawCode(code));
  });
  const box = copyable(line);
  box.lastChild.append(button);
  box.append(shown);
  return box;
}

function drawCode({ size, path }) {
  const border = 4;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `${-border} ${-border} ${size + 2 * border} ${size + 2 * border}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "The line as a QR code");
  const dark = document.createElementNS("http://www.w3.org/2000/svg", "path");
  dark.setAttribute("d", path);
  svg.append(dark);
  return svg;
}

function guestForm(outcome) {
  const field = (label, options) => {
    const input = el("input", options);
    return [input, el("label", {}, label, input)];
  };
  const [name, nameLabel] = field("Name", { required: true, maxlength: 40, autocomplete: "off" });
  const [days, daysLabel] = field("Days", { type: "number", min: 1, max: 36500, placeholder: "no end" });
  const [nodes, nodesLabel] = field("PCs", { type: "number", min: 1, placeholder: "any" });
  const form = el("form", { class: "guest-form" }, nameLabel, daysLabel, nodesLabel, el("button", {}, "Invite"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const numberOf = (input) => (input.value === "" ? null : Number(input.value));
    const found = await act("invite", { name: name.value, days: numberOf(days), nodes: numberOf(nodes) });
    if (found.line) await showInvitation(`${found.outcome}: give this line to nobody else. It is shown once.`, found);
    else outcome.textContent = `Not invited: ${found.error}`;
  });
  return form;
}

function guestTable(guests, outcome) {
  const rows = guests.map((guest) => el("tr", {}, ...guestCells(guest, outcome)));
  const heads = ["Invited", "Until", "PCs", "Faults", "Withdraw"].map((name, index) =>
    el("th", { scope: "col", class: index === 2 || index === 3 ? "num" : "" }, name),
  );
  return el("table", { class: "table guests" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}

function guestCells(guest, outcome) {
  const until = guest.ends_at === null ? "no end" : new Date(1000 * guest.ends_at).toLocaleString("en", { hour12: false });
  const strikes = el("td", { class: "num", title: guest.strikes.join("\n") }, String(guest.strikes.length));
  const cells = [el("td", {}, guest.name), el("td", {}, until), el("td", { class: "num" }, guest.max_nodes ?? "any"), strikes];
  return [...cells, el("td", {}, guest.is_revoked ? "withdrawn" : revokeButton(guest.name, outcome))];
}

// Asks once: the second click does it.
function revokeButton(name, outcome) {
  const button = el("button", { type: "button", class: "danger" }, "Withdraw");
  let isAsked = false;
  button.addEventListener("click", async () => {
    if (!isAsked) {
      isAsked = true;
      button.textContent = "Really?";
      return;
    }
    const found = await act("revoke", { name });
    if (found.outcome) await showInvitation(found.outcome);
    else outcome.textContent = `Not withdrawn: ${found.error}`;
  });
  return button;
}
