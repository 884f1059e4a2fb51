// Asks for new windows and shows one of them, with charts of all. Every text from a server is set
// as text, never as markup.

import { draw, drawLine } from "./chart.js";
import * as words from "./words.js";

const { count } = words;

const ASK_LIMIT_MS = 10000;
const SILENT_S = 15;
// Between two questions, whatever the interval of the scrapes.
const SHORTEST_S = 0.5, LONGEST_S = 5;

const state = { run: "", points: [], interval: null, source: "", age: 0, trouble: "", chosen: null };
const byId = (id) => document.getElementById(id);

async function ask() {
  const last = state.points.at(-1)?.number ?? 0;
  const query = new URLSearchParams({ run: state.run, after: String(last) });
  try {
    const reply = await fetch(`points?${query}`, { signal: AbortSignal.timeout(ASK_LIMIT_MS) });
    if (!reply.ok) throw new Error(`it replies HTTP ${reply.status}`);
    take(await reply.json());
    state.trouble = "";
  } catch (error) {
    state.trouble = `meridian top does not reply: ${error.message}. Start it again; this page goes on then.`;
  }
  show();
  // A recording does not go on.
  if (state.trouble || state.interval) {
    setTimeout(ask, 1000 * Math.min(LONGEST_S, Math.max(SHORTEST_S, state.interval ?? LONGEST_S)));
  }
}

function take(told) {
  if (told.run !== state.run) Object.assign(state, { points: [], chosen: null });
  const kept = state.points.filter((point) => point.number >= told.first);
  Object.assign(state, { run: told.run, interval: told.interval_s, source: told.source, age: told.age_s });
  state.points = [...kept, ...told.points];
}

function show() {
  const { points } = state;
  const newest = points.length - 1;
  const chosen = points.findIndex((point) => point.number === state.chosen);
  const index = chosen < 0 ? newest : chosen;
  if (chosen < 0) state.chosen = null;
  showState(points[newest], index);
  const hasWindows = points.some((point) => point.view);
  document.querySelector("main").hidden = !hasWindows;
  if (!hasWindows) return;
  showWindow(lastKnown(index));
  showCharts(index);
  showMoment(index);
}

// The window at an index or, where the server did not tell, the one before it.
function lastKnown(index) {
  const { points } = state;
  return points.slice(0, index + 1).findLast((point) => point.view) ?? points.find((point) => point.view);
}

function showState(newest, index) {
  const isReplay = state.source && !state.interval;
  const model = state.points.findLast((point) => point.view?.model)?.view.model;
  byId("where").textContent = state.source + (model ? `, model ${model}` : "");
  let name = isReplay ? "recording" : "live", trouble = state.trouble;
  if (!trouble && newest?.error) trouble = `${newest.error}; trying again`;
  if (!trouble && !newest && state.source) name = "waiting for a second scrape";
  if (!trouble && state.interval && state.age > SILENT_S + 2 * state.interval) {
    trouble = `The server has not replied for ${words.duration(state.age)}`;
  }
  if (!state.source && !trouble) name = "loading";
  if (trouble) name = state.points.some((point) => point.view) ? "old numbers" : "no numbers";
  byId("state").textContent = name;
  byId("state").className = trouble ? "pill bad" : "pill";
  setNote("trouble", trouble);
  document.title = `${trouble ? "(!) " : ""}meridian top ${state.source}`;
  const view = state.points[index]?.view;
  byId("reset").hidden = !view?.is_reset;
  let phaseless = "";
  if (view && view.load.running === null) {
    phaseless = "Requests are unknown: this server has --disable-log-stats.";
  } else if (view && !view.load.is_patched) {
    phaseless = "Phases are unknown: this server runs stock vLLM. Serve it with meridian_patch to see them.";
  }
  setNote("phaseless", phaseless);
}

function setNote(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}

function showWindow({ view }) {
  const { bottleneck, numbers, change } = view.verdict;
  byId("verdict").className = bottleneck === "none" || bottleneck === "unknown" ? "calm" : "held";
  byId("bottleneck").textContent = bottleneck;
  byId("bottleneck-words").textContent = words.meaningOf(words.BOTTLENECKS, bottleneck) ?? "";
  byId("numbers").textContent = numbers;
  byId("change").textContent = change;
  byId("change-line").hidden = !change;
  byId("tiles").replaceChildren(...words.tiles(view).map(tile));
  // A measure keeps its row in windows without it, so that the page does not jump.
  const told = new Set(state.points.flatMap((point) => Object.keys(point.view?.latencies ?? {})));
  const rows = Object.keys(words.LATENCIES).filter((name) => told.has(name))
    .map((name) => latencyRow(name, view.latencies[name]));
  document.querySelector("#latency tbody").replaceChildren(...rows);
  byId("latency").hidden = !rows.length;
  byId("no-latency").hidden = rows.length > 0;
}

function tile([name, value, unit]) {
  const made = node("div");
  made.append(node("dt", name), node("dd", value), node("dd", unit, "unit"));
  return made;
}

function latencyRow(name, figures) {
  const row = node("tr");
  const first = node("th", name);
  first.scope = "row";
  first.append(node("span", words.LATENCIES[name], "unit"));
  const line = node("td");
  drawLine(line, state.points.map((point) => point.view?.latencies[name]?.mean_s ?? null));
  const cells = figures
    ? [words.latency(figures.mean_s), words.quantile(figures.p50), words.quantile(figures.p95), count(figures.count)]
    : ["-", "-", "-", "0"];
  row.append(first, ...cells.map((text) => node("td", text)), line);
  return row;
}

function showCharts(index) {
  showChart(words.PHASES, byId("chart-phases"), index, 240);
  for (const chart of words.CHARTS) {
    let card = byId(`card-${chart.id}`);
    if (!card) {
      card = node("section", "", "card");
      card.id = `card-${chart.id}`;
      const box = node("div", "", "chart");
      box.id = `chart-${chart.id}`;
      card.append(titleOf(chart), node("p", chart.explained, "explained"), box);
      byId("charts").append(card);
    }
    showChart(chart, byId(`chart-${chart.id}`), index, 130);
  }
}

function titleOf(chart) {
  const title = node("h2", `${chart.title} `);
  title.append(node("span", chart.unit, "unit"));
  return title;
}

function showChart(chart, box, index, height) {
  const { points } = state;
  const valuesOf = (point) => (point.view ? chart.values(point) : {});
  const names = [...new Set(points.flatMap((point) => Object.keys(valuesOf(point))))];
  let [plot, legend] = box.children;
  if (!plot) {
    plot = node("div", "", "plot");
    legend = node("ul", "", "legend");
    box.append(plot, legend);
  }
  if (!names.length) {
    plot.replaceChildren(node("p", "This server does not tell it.", "explained"));
    legend.replaceChildren();
    return;
  }
  const shown = lastKnown(index);
  const told = (chart.shown ?? chart.values)(shown);
  const colour = (name) => words.colourOf(name, names.indexOf(name));
  const isLive = Boolean(state.interval);
  draw(plot, {
    windows: points.map((point, place) => ({
      from: beginOf(point, points[place - 1]),
      to: point.at_s,
      values: valuesOf(point),
      isKnown: Boolean(point.view),
      isReset: Boolean(point.view?.is_reset),
    })),
    names,
    colour,
    most: chart.max,
    shown: index,
    height,
    origin: isLive ? points.at(-1).at_s : points[0].at_s - (points[0].view?.window_s ?? 0),
    timeText: (seconds) => (isLive && seconds === 0 ? "now" : (seconds < 0 ? "−" : "") + words.duration(Math.abs(seconds))),
    label: `${chart.title}, ${chart.unit}: ${names.map((name) => `${name} ${count(told[name])}`).join(", ")}`,
  });
  const counted = `In this window of ${shown.view.window_s.toFixed(1)} s:`;
  const heads = chart.shown ? [node("li", counted, "unit")] : [];
  legend.replaceChildren(...heads, ...names.toReversed().map((name) => legendItem(name, told[name], colour(name), words.meaningOf(chart.words, name))));
}

// An outage ends where the next reply came, though its counts are of all the time since the last one.
function beginOf(point, before) {
  if (!point.view) return before ? before.at_s : point.at_s - (state.interval ?? 0);
  const begin = point.at_s - point.view.window_s;
  return before ? Math.max(begin, before.at_s) : begin;
}

function legendItem(name, value, colour, meaning) {
  const item = node("li", "", value ? "" : "zero");
  item.dataset.name = name;
  const words = node("span", name.replaceAll("_", " "));
  if (meaning) words.append(node("span", `: ${meaning}`, "unit"));
  item.append(node("i", "", `swatch ${colour}`), node("b", count(value)), words);
  return item;
}

function showMoment(index) {
  const { points } = state;
  const slider = byId("moment"), last = points.length - 1, point = points[index];
  slider.max = String(last);
  slider.value = String(index);
  byId("newest").disabled = state.chosen === null;
  const length = point.view ? `window of ${point.view.window_s.toFixed(1)} s` : "no reply";
  const ended = state.interval
    ? index === last ? "the newest" : `${words.duration(points[last].at_s - point.at_s)} before the newest`
    : `${index + 1} of ${points.length}`;
  byId("moment-words").textContent = `${length}, ${ended}`;
  slider.setAttribute("aria-valuetext", byId("moment-words").textContent);
}

function node(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function choose(index) {
  state.chosen = index >= state.points.length - 1 ? null : state.points[index].number;
  show();
}

byId("moment").addEventListener("input", (event) => choose(Number(event.target.value)));
byId("newest").addEventListener("click", () => choose(state.points.length));
for (const kind of ["pointerdown", "pointermove"]) {
  document.addEventListener(kind, (event) => {
    const svg = event.target.closest?.(".plot svg");
    if (svg && event.buttons === 1) choose(svg.windowAt(event.clientX));
  });
}
window.addEventListener("resize", show);
ask();
