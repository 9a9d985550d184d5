// Draws the cards and keeps them current. Text from the cluster reaches the
// document through text nodes and attributes only, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const main = byId("nodes"), filter = byId("filter"), trouble = byId("trouble");
const MiB = 1048576;
const few = 8; // up to so many nodes are open from the start

// What is known, by node name: the data, the words to search, the element.
const nodes = new Map();
let scope = "", hidden = false, heard = 0;

function make(tag, cls, ...children) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  e.append(...children);
  return e;
}

const mib = (bytes) => Math.round(bytes / MiB).toLocaleString("en") + " MiB";
const gib = (bytes) => bytes >= 10240 * MiB ? Math.round(bytes / MiB / 1024).toLocaleString("en") + " GiB" : mib(bytes);
const percent = (part, all) => all > 0 ? Math.min(100, Math.max(0, 100 * part / all)) : 0;
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

function nameOf(h) {
  const pod = [h.namespace, h.pod].filter(Boolean).join("/");
  return [pod || "a pod", h.container].filter(Boolean).join(" ");
}

// A holder keeps its colour from view to view. The name stands beside it, so
// the colour may repeat.
function colourOf(h, i) {
  const name = hidden ? String(i) : h.namespace + "/" + h.pod;
  let x = 7;
  for (let k = 0; k < name.length; k++) x = (x * 31 + name.charCodeAt(k)) >>> 0;
  return "c" + x % 10;
}

// What keeps a card or a node from being used, as [class, text].
function cardState(c) {
  const parts = [];
  if (c.health !== "healthy") parts.push(c.health + (c.reason ? ": " + c.reason : ""));
  if (c.cordoned) parts.push("cordoned" + (c.cordonedFor ? ": " + c.cordonedFor : ""));
  return parts.length ? [c.health === "healthy" ? "warn" : "bad", parts.join(", ")] : ["good", "healthy"];
}

function nodeState(n) {
  if (n.blocked) return ["bad", n.blockedFor || n.blocked];
  if (!n.hookUp) return ["bad", "the hook has no link to the container runtime"];
  const out = n.cards.filter((c) => c.health !== "healthy" || c.cordoned).length;
  const parts = [];
  if (out) parts.push(`${out} of ${n.cards.length} cards out`);
  if (n.unadjusted) parts.push(plural(n.unadjusted, "container") + " without the card");
  if (n.refused) parts.push(plural(n.refused, "grant") + " refused");
  return parts.length ? ["warn", parts.join(", ")] : ["good", "ready"];
}

function wordsOf(n) {
  const w = [n.name, n.version, n.driver, n.blocked, n.blockedFor, nodeState(n)[1], n.softwareGPU ? "software" : ""];
  for (const c of n.cards) {
    w.push(c.uuid, c.model, cardState(c)[1]);
    for (const h of c.holders) w.push(nameOf(h), h.state);
  }
  return w.join("\n").toLowerCase();
}

function drawBar(c) {
  const bar = make("div", cardState(c)[0] === "good" ? "bar" : "bar out");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `card ${c.index}: ${mib(c.grantedBytes)} of ${mib(c.memoryBytes)} granted` +
    (c.usedBytes === undefined ? "" : `, ${mib(c.usedBytes)} in use`));
  const whole = Math.max(c.memoryBytes, c.grantedBytes);
  c.holders.forEach((h, i) => {
    const used = h.whole && h.usedBytes === undefined ? c.usedBytes : h.usedBytes;
    const part = make("div", `part ${colourOf(h, i)} ${h.state}`);
    part.style.width = percent(h.limitBytes, whole) + "%";
    part.title = `${nameOf(h)}: ${h.whole ? "the whole card" : mib(h.limitBytes) + (h.counted ? ", counted, not enforced" : "")}` + (used === undefined ? "" : `, ${mib(used)} in use`);
    if (used !== undefined) {
      const fill = make("i");
      fill.style.width = percent(used, h.limitBytes) + "%";
      part.append(fill);
    }
    part.append(make("span", "", nameOf(h)));
    bar.append(part);
  });
  return bar;
}

function facts(c) {
  const f = [`${mib(Math.max(0, c.memoryBytes - c.grantedBytes))} free of ${mib(c.memoryBytes)}`, `${c.grantedPercent}% of compute granted`];
  if (c.usedBytes !== undefined) f.push(mib(c.usedBytes) + " in use");
  if (c.utilizationRatio !== undefined) f.push(Math.round(100 * c.utilizationRatio) + "% busy");
  if (c.powerWatts !== undefined) f.push(Math.round(c.powerWatts) + " W");
  if (c.temperatureCelsius !== undefined) f.push(Math.round(c.temperatureCelsius) + " °C");
  if (c.processes !== undefined) f.push(plural(c.processes, "process").replace("processs", "processes"));
  return f.join(" · ");
}

function drawHolders(c) {
  const live = c.holders.some((h) => h.usedBytes !== undefined || h.peakBytes !== undefined);
  const heads = ["holder", "state", "mode", "limit", "compute"].concat(live ? ["used", "peak", "refusals"] : []);
  const row = make("tr");
  heads.forEach((text, i) => {
    const th = make("th", i > 2 ? "n" : "", text);
    th.scope = "col";
    row.append(th);
  });
  const body = make("tbody");
  c.holders.forEach((h, i) => {
    const cell = (v) => make("td", "n", v === undefined ? "–" : v);
    const tr = make("tr", "",
      make("td", "", make("i", "dot " + colourOf(h, i)), nameOf(h)), make("td", "", h.state), make("td", "", h.mode || "–"),
      cell(h.whole ? "whole card" : mib(h.limitBytes) + (h.counted ? ", counted, not enforced" : "")), cell((h.whole ? "100%" : h.percent ? h.percent + "%" + (h.counted ? " counted" : "") : "–") + (h.computeRatio === undefined ? "" : `, ${Math.round(100 * h.computeRatio)}% busy`)));
    if (live) {
      tr.append(cell(h.usedBytes === undefined ? undefined : mib(h.usedBytes) + (h.residualBytes ? ` + ${mib(h.residualBytes)} past the library` : "")), cell(h.peakBytes === undefined ? undefined : mib(h.peakBytes)),
        cell(h.refusals === undefined ? undefined : h.refusals.toLocaleString("en")));
    }
    body.append(tr);
  });
  return make("div", "holders", make("table", "", make("thead", "", row), body));
}

function drawCard(c) {
  const [cls, text] = cardState(c);
  const about = make("small", "", c.model, " · ", c.uuid);
  const section = make("section", "card", make("h3", "", make("span", "", `card ${c.index} `, about), make("small", cls, text)), drawBar(c), make("p", "facts", facts(c)));
  if (c.holders.length) section.append(drawHolders(c));
  return section;
}

// draw fills a node's element: its line always, its cards only while open. Text
// that somebody is selecting stays as it is until they are done.
function draw(entry) {
  const chosen = document.getSelection();
  if (chosen && !chosen.isCollapsed && entry.element.contains(chosen.anchorNode)) return;
  const n = entry.data, [cls, text] = nodeState(n);
  const cells = make("span", "cells");
  for (const c of n.cards) {
    const cell = make("span", cardState(c)[0] === "good" ? "cell" : "cell out"), fill = make("i");
    fill.style.width = percent(c.grantedBytes, c.memoryBytes) + "%";
    cell.append(fill);
    cell.title = `card ${c.index}: ${mib(c.grantedBytes)} of ${mib(c.memoryBytes)} granted, ${cardState(c)[1]}`;
    cells.append(cell);
  }
  const granted = n.cards.reduce((a, c) => a + c.grantedBytes, 0), all = n.cards.reduce((a, c) => a + c.memoryBytes, 0);
  const name = make("b", "", n.name);
  name.title = [n.name, n.version && "carve " + n.version, n.driver && "driver " + n.driver, n.softwareGPU && "software GPU"].filter(Boolean).join(", ");
  entry.line.replaceChildren(name, cells, make("span", "state", `${gib(granted)} of ${gib(all)} `, make("span", cls, text)));
  if (!entry.element.open) {
    entry.body.replaceChildren();
    return;
  }
  entry.body.replaceChildren(...n.cards.map(drawCard));
}

function admit(n, mayOpen) {
  let entry = nodes.get(n.name);
  if (!entry) {
    entry = { line: make("summary"), body: make("div", "cards") };
    entry.element = make("details", "node", entry.line, entry.body);
    entry.element.open = mayOpen;
    entry.element.addEventListener("toggle", () => draw(entry));
    nodes.set(n.name, entry);
    entry.isNew = true;
  }
  entry.data = n;
  entry.words = wordsOf(n);
  entry.good = nodeState(n)[0] === "good";
  draw(entry);
}

// place puts new nodes where they belong by name.
function place() {
  const order = new Intl.Collator("en", { numeric: true });
  const sorted = [...nodes.values()].sort((a, b) => order.compare(a.data.name, b.data.name));
  for (let i = 0; i < sorted.length; i++) {
    if (!sorted[i].isNew) continue;
    const next = sorted.slice(i + 1).find((e) => !e.isNew);
    main.insertBefore(sorted[i].element, next ? next.element : null);
    sorted[i].isNew = false;
  }
}

function sift() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const e of nodes.values()) {
    const hit = words.every((w) => e.words.includes(w)) && !(trouble.checked && e.good);
    e.element.hidden = !hit;
    shown += hit ? 1 : 0;
  }
  byId("hits").textContent = words.length || trouble.checked ? `${shown} of ${plural(nodes.size, "node")}` : "";
}

function sum() {
  let cards = 0, granted = 0, all = 0, bad = 0;
  for (const { data, good } of nodes.values()) {
    cards += data.cards.length;
    bad += good ? 0 : 1;
    for (const c of data.cards) {
      granted += c.grantedBytes;
      all += c.memoryBytes;
    }
  }
  byId("scope").textContent = scope === "cluster" ? "cluster" : nodes.size === 1 ? "node " + [...nodes.keys()][0] : "";
  byId("sums").textContent = `${plural(nodes.size, "node")}, ${plural(cards, "card")}, ${gib(granted)} of ${gib(all)} granted` +
    (all ? ` (${Math.round(100 * granted / all)}%)` : "") + (bad ? `, ${plural(bad, "node")} in trouble` : "");
  const note = byId("note");
  note.hidden = !(hidden || nodes.size === 0);
  note.textContent = nodes.size === 0 ? "No node reports cards: label a GPU node with carve.dev/managed=true." :
    "Names of holders are hidden from this address. Reach the page by kubectl port-forward to see them.";
}

function take(change) {
  scope = change.scope;
  hidden = Boolean(change.hidden);
  const there = new Set(change.nodes.map((n) => n.name));
  const gone = change.all ? [...nodes.keys()].filter((n) => !there.has(n)) : change.gone || [];
  for (const name of gone) {
    const entry = nodes.get(name);
    if (entry) entry.element.remove();
    nodes.delete(name);
  }
  const mayOpen = change.all && change.nodes.length <= few;
  for (const n of change.nodes) admit(n, mayOpen);
  place();
  sum();
  sift();
}

function status(cls, text) {
  const p = byId("link");
  if (p.className !== cls || p.textContent !== text) {
    p.className = cls;
    p.textContent = text;
  }
}

// The browser connects again by itself, save after an answer that isn't a
// stream; then we do.
function connect() {
  const stream = new EventSource("api/v1/events");
  stream.onmessage = (m) => {
    heard = Date.now();
    take(JSON.parse(m.data));
    status("live", "live");
  };
  stream.onopen = () => status("live", "live");
  stream.onerror = () => {
    const since = heard ? "; shown is the state of " + new Date(heard).toLocaleTimeString() : "";
    status("lost", "no connection, trying again" + since);
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
}

const openAll = (open) => {
  for (const e of nodes.values()) if (!e.element.hidden) e.element.open = open;
};
byId("open").addEventListener("click", () => openAll(true));
byId("close").addEventListener("click", () => openAll(false));
byId("tools").addEventListener("submit", (e) => e.preventDefault());
filter.addEventListener("input", sift);
trouble.addEventListener("change", sift);
document.addEventListener("keydown", (e) => {
  if (e.key === "/" && document.activeElement !== filter && !e.ctrlKey && !e.metaKey && !e.altKey) {
    e.preventDefault();
    filter.focus();
  } else if (e.key === "Escape" && document.activeElement === filter) {
    filter.value = "";
    sift();
  }
});
connect();
