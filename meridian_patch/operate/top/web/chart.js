// Draws stacked areas over time as SVG. Knows no server: it is given numbers and names.

const SVG = "http://www.w3.org/2000/svg";
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 22;

// Draws into `box`, whose width it takes.
//
//   windows   {from, to, values, isKnown, isReset}; times in seconds, rising; values by name
//   names     the bands, the lowest one first
//   colour    name -> class
//   most      top of the scale, or undefined: the highest sum
//   shown     index of the marked window
//   height    in pixels
//   timeText  seconds -> label of the axis; `origin` is the time that counts as 0
//   label     what a screen reader says
export function draw(box, { windows, names, colour, most, shown, height, timeText, origin, label }) {
  const width = Math.max(200, box.clientWidth);
  const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", label);
  const begin = windows[0].from, end = windows[windows.length - 1].to;
  const x = (time) => LEFT + ((width - LEFT - RIGHT) * (time - begin)) / Math.max(1e-9, end - begin);
  const top = most ?? rounded(Math.max(...windows.map((each) => sum(each.values, names))));
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - Math.min(1, value / top));

  drawScale(svg, width, y, top);
  drawTimes(svg, { begin, end, x, height, width, timeText, origin });
  for (const each of windows) {
    if (each.isKnown) continue;
    const gap = { x: x(each.from), y: TOP, width: Math.max(1, x(each.to) - x(each.from)) };
    svg.append(element("rect", { ...gap, height: height - TOP - BOTTOM, class: "gap" }));
  }
  for (const run of runs(windows)) drawBands(svg, run, { names, colour, x, y });
  for (const each of windows) {
    if (each.isReset) svg.append(upright(x(each.to), height, "reset"));
  }
  if (windows[shown]) svg.append(upright(x(windows[shown].to), height, "shown"));
  box.replaceChildren(svg);
  // The window at a place of the pointer.
  svg.windowAt = (clientX) => {
    const at = clientX - svg.getBoundingClientRect().left;
    const distances = windows.map((each) => Math.abs(x(each.to) - at));
    return distances.indexOf(Math.min(...distances));
  };
  return svg;
}

// A small line without a scale; values may be null.
export function drawLine(box, values) {
  const width = 120, height = 24;
  const svg = element("svg", { width, height, class: "line", "aria-hidden": "true" });
  const most = Math.max(1e-12, ...values.filter((value) => value !== null));
  const x = (index) => 2 + ((width - 4) * index) / Math.max(1, values.length - 1);
  let path = "", isDown = false;
  values.forEach((value, index) => {
    const at = `${place(x(index))} ${place(22 - (20 * value) / most)}`;
    // A value between gaps is a dot: a line of no length.
    if (value !== null) path += isDown ? `L${at}` : `M${at}L${at}`;
    isDown = value !== null;
  });
  svg.append(element("path", { d: path, class: "stroke" }));
  box.replaceChildren(svg);
}

function drawScale(svg, width, y, top) {
  for (const value of [0, top / 2, top]) {
    svg.append(element("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "rule" }));
    const text = element("text", { x: LEFT - 6, y: y(value) + 4, class: "left" });
    text.textContent = short(value);
    svg.append(text);
  }
}

function drawTimes(svg, { begin, end, x, height, width, timeText, origin }) {
  const fitting = Math.max(1, Math.floor((width - LEFT - RIGHT) / 80));
  const step = TIME_STEPS.find((each) => (end - begin) / each <= fitting) ?? (end - begin) / fitting;
  for (let count = Math.ceil((begin - origin) / step); origin + count * step <= end + 1e-6; count += 1) {
    const at = x(origin + count * step);
    const anchor = at > width - 40 ? "end" : at < LEFT + 20 ? "start" : "middle";
    const text = element("text", { x: at, y: height - 6, "text-anchor": anchor });
    text.textContent = timeText(count * step);
    svg.append(element("line", { x1: at, x2: at, y1: height - BOTTOM, y2: height - BOTTOM + 4, class: "rule" }));
    svg.append(text);
  }
}

// Windows that follow each other without a gap.
function runs(windows) {
  const found = [];
  let last = null;
  for (const each of windows) {
    if (each.isKnown) {
      const follows = last?.isKnown && each.from - last.to < 0.5 * (each.to - each.from);
      if (follows) found[found.length - 1].push(each);
      else found.push([each]);
    }
    last = each;
  }
  return found;
}

function drawBands(svg, run, { names, colour, x, y }) {
  // A run begins where its first window does, so that a single window is an area too.
  const times = [run[0].from, ...run.map((each) => each.to)];
  const all = [run[0], ...run];
  let below = all.map(() => 0);
  for (const name of names) {
    const above = below.map((value, index) => value + (all[index].values[name] ?? 0));
    const there = above.map((value, index) => `${place(x(times[index]))} ${place(y(value))}`);
    const back = below.map((value, index) => `${place(x(times[index]))} ${place(y(value))}`).reverse();
    if (above.some((value, index) => value > below[index])) {
      const band = element("path", { d: `M${there.join("L")}L${back.join("L")}Z`, class: `band ${colour(name)}` });
      band.dataset.name = name;
      svg.append(band);
    }
    below = above;
  }
}

function upright(at, height, kind) {
  return element("line", { x1: at, x2: at, y1: TOP, y2: height - BOTTOM, class: kind });
}

function sum(values, names) {
  return names.reduce((total, name) => total + (values[name] ?? 0), 0);
}

// The next number that halves to a short one.
function rounded(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].find((each) => each * power >= value) * power;
}

function short(value) {
  const format = { notation: "compact", maximumSignificantDigits: 3 };
  return value.toLocaleString("en", format);
}

function place(value) {
  return Math.round(value * 10) / 10;
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
