// Draws the runs that stand in #data (see page.py, `_data`) to one canvas each, all on one time scale, or each on its
// own: its times are then stretched to the longest run's, and the axis shows shares of a run. Times are ticks.
// A row is a rank: its boxes and, below them, its memory. Only rows in sight are drawn.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const GUTTER = 92, RIGHT = 14, MOST_MESSAGES = 4000;
  const tip = document.getElementById("tip");
  const axis = document.getElementById("axis");
  const showMessages = document.getElementById("messages");
  const showMemory = document.getElementById("memory");
  const ownScale = document.getElementById("own");

  const sums = (steps) => {
    const times = new Float64Array(steps.length);
    let now = 0;
    for (let i = 0; i < steps.length; i++) times[i] = now += steps[i];
    return times;
  };
  let longest = 1;
  const largest = data.top * 1.06 || 1, limit = data.limit && data.limit <= data.top ? data.limit : null;
  const runs = data.runs.map((run) => {
    const ranks = run.ranks.map((rank) => {
      const times = sums(rank.times);
      return { ...rank, start: times.filter((_, i) => i % 2 === 0), end: times.filter((_, i) => i % 2 === 1) };
    });
    const memory = run.memory.map((curve) => ({ times: sums(curve.times), sizes: curve.sizes }));
    const start = sums(run.moves.start);
    const moves = { ...run.moves, start, end: start.map((time, i) => time + run.moves.length[i]) };
    longest = Math.max(longest, run.makespan);
    return { ...run, ranks, memory, moves, factor: 1 };
  });
  longest = Math.max(longest, data.bound || 0);
  const stretched = (run) => { // factor: how many times as wide as on the common scale
    const factor = run.makespan > 0 ? longest / run.makespan : 1;
    const by = (times) => times.map((time) => time * factor);
    return {
      ...run, factor, makespan: run.makespan * factor,
      ranks: run.ranks.map((rank) => ({ ...rank, start: by(rank.start), end: by(rank.end) })),
      memory: run.memory.map((curve) => ({ ...curve, times: by(curve.times) })),
      moves: { ...run.moves, start: by(run.moves.start), end: by(run.moves.end) },
    };
  };

  const most = Math.max(...runs.map((run) => run.ranks.length), 1);
  const [BOX, CURVE, GAP] = most <= 8 ? [24, 30, 10] : most <= 24 ? [17, 17, 5] : [12, 10, 4];
  const FONT = Math.min(11, BOX - 2);
  const hasMemory = (run) => showMemory.checked && run.recorded;
  const rowHeight = (run) => BOX + GAP + (hasMemory(run) ? CURVE + 2 : 0);

  const whole = { from: -longest * 0.004, to: longest * 1.012 };
  let view = { ...whole };
  let followed = null; // microbatch
  let hovered = null; // {run, rank, index}
  let queued = false;
  const redraw = () => {
    if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; draw(); }); }
  };

  // The first place whose value is above x, in ascending values.
  const above = (values, x) => {
    let low = 0, high = values.length;
    while (low < high) { const middle = (low + high) >> 1; if (values[middle] > x) high = middle; else low = middle + 1; }
    return low;
  };

  const digits = (value) => value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
  const units = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
  const unitOf = (seconds) => units.find(([, size]) => seconds >= 2 * size) || units[2];
  const secondsText = (time) => {
    const [name, size] = unitOf(Math.abs(time * data.tick));
    return `${digits(time * data.tick / size)} ${name}`;
  };
  const bytesText = (size) => {
    for (const name of ["B", "KiB", "MiB", "GiB"]) {
      if (size < 1024) return name === "B" ? `${Math.round(size)} B` : `${digits(size)} ${name}`;
      size /= 1024;
    }
    return `${digits(size)} TiB`;
  };

  const sections = runs.map((run) => {
    const heading = document.createElement("h2");
    heading.textContent = run.name;
    const note = document.createElement("small");
    const mean = run.bubble.reduce((sum, share) => sum + share, 0) / Math.max(run.bubble.length, 1);
    note.textContent = `${secondsText(run.makespan)}, bubble ${(mean * 100).toFixed(1)} %${run.recorded ? "" : ", memory not recorded"}`;
    const hint = document.createElement("small");
    hint.textContent = `zoom in to see messages: more than ${MOST_MESSAGES} are in view`;
    heading.append(note, hint);
    const box = document.createElement("div");
    box.className = "run";
    const canvas = document.createElement("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${run.name}: timeline of ${run.ranks.length} ranks`);
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    box.append(canvas, cursor);
    document.getElementById("runs").append(heading, box);
    return { run, common: run, canvas, cursor, hint };
  });
  const rescale = () => {
    for (const section of sections) {
      if (ownScale.checked) section.own ||= stretched(section.common);
      section.run = ownScale.checked ? section.own : section.common;
    }
    hovered = null;
  };

  let ink, soft, rule, stripe, held;
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    [ink, soft, rule, stripe, held] = ["--ink", "--soft", "--rule", "--stripe", "--held"].map((name) => style.getPropertyValue(name).trim());
  };

  const plotWidth = () => Math.max(axis.clientWidth - GUTTER - RIGHT, 50);
  const toX = (time) => GUTTER + (time - view.from) / (view.to - view.from) * plotWidth();
  const toTime = (x) => view.from + (x - GUTTER) / plotWidth() * (view.to - view.from);

  const prepare = (canvas, height) => {
    const scale = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    return pen;
  };

  // What a tick of the axis is in its numbers: seconds, or per cent of a run.
  const perTick = () => ownScale.checked ? 100 / longest : data.tick;
  const marks = () => {
    const span = view.to - view.from, rough = span / Math.max(plotWidth() / 110, 2), tick = perTick();
    const least = rough * tick, power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * (1 - 1e-9));
    const found = [];
    for (let i = Math.ceil(view.from * tick / step); i * step <= view.to * tick; i++) found.push(i * step / tick);
    return { found, step };
  };

  const drawAxis = ({ found, step }) => {
    const pen = prepare(axis, 26), tick = perTick();
    const [name, size] = ownScale.checked ? ["% of run", 1] : unitOf(Math.max((view.to - view.from) * tick, 1e-9));
    const places = Math.min(Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)), 9);
    pen.fillStyle = soft;
    pen.strokeStyle = rule;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.fillText(ownScale.checked ? name : `time, ${name}`, 20, 11);
    pen.textAlign = "center";
    for (const time of found) {
      const x = toX(time);
      if (x < GUTTER - 1 || x > GUTTER + plotWidth() + 1) continue;
      pen.fillText((time * tick / size).toFixed(places), x, 11);
      pen.fillRect(x - 0.5, 20, 1, 6);
    }
  };

  const drawCurve = (pen, run, rank, top) => {
    const curve = run.memory[rank], state = run.state[rank], bottom = top + CURVE;
    const left = Math.max(toX(0), GUTTER), right = GUTTER + plotWidth();
    const end = Math.min(Math.max(toX(run.makespan), left), right);
    const y = (size) => bottom - size / largest * CURVE;
    const first = above(curve.times, view.from);
    const shape = new Path2D();
    shape.moveTo(left, bottom);
    let column = left, size = first > 0 ? curve.sizes[first - 1] : state, peak = size;
    const step = (to) => { // the most that a pixel's column held stays in sight
      shape.lineTo(column, y(peak));
      if (peak > size) {
        const next = Math.min(column + 1, to);
        shape.lineTo(next, y(peak));
        shape.lineTo(next, y(size));
      }
      shape.lineTo(to, y(size));
    };
    for (let i = first; i < curve.times.length && curve.times[i] <= view.to; i++) {
      const x = Math.max(toX(curve.times[i]), left);
      if (x - column >= 1) {
        step(x);
        column = x;
        peak = curve.sizes[i];
      }
      size = curve.sizes[i];
      peak = Math.max(peak, size);
    }
    step(end);
    shape.lineTo(end, bottom);
    const fill = (from, to, paint) => { // the part of the shape between two sizes
      pen.save();
      pen.beginPath();
      pen.rect(left, y(to), end - left, y(from) - y(to));
      pen.clip();
      pen.fillStyle = paint;
      pen.fill(shape);
      pen.restore();
    };
    fill(0, state, held);
    fill(state, largest, data.memory);
    if (limit) fill(limit, largest, data.limitColour);
    if (limit) {
      pen.strokeStyle = data.limitColour;
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(GUTTER, y(limit));
      pen.lineTo(right, y(limit));
      pen.stroke();
      pen.setLineDash([]);
    }
  };

  const drawBoxes = (pen, run, rank, top) => {
    const events = run.ranks[rank], buckets = new Map(), labels = [];
    for (let i = above(events.end, view.from); i < events.start.length && events.start[i] <= view.to; i++) {
      const x = Math.max(toX(events.start[i]), GUTTER - 2);
      let width = Math.min(toX(events.end[i]), GUTTER + plotWidth() + 2) - x;
      if (width > 3) width -= 1; else width = Math.max(width, 0.6);
      const mb = events.microbatch[i], faint = followed !== null && mb !== followed;
      const key = (events.kind[i] * 8 + (run.levels[events.stage[i]] || 0)) * 2 + (faint ? 1 : 0);
      if (!buckets.has(key)) buckets.set(key, []);
      buckets.get(key).push(x, width);
      if (!faint && mb >= 0 && width > String(mb).length * FONT * 0.6 + 1) labels.push([x + width / 2, mb, key >> 1]);
    }
    for (const [key, spans] of buckets) {
      pen.fillStyle = data.colours[key >> 4][(key >> 1) & 7][0];
      pen.globalAlpha = key & 1 ? 0.18 : 1;
      for (let i = 0; i < spans.length; i += 2) pen.fillRect(spans[i], top, spans[i + 1], BOX);
    }
    pen.globalAlpha = 1;
    pen.font = `${FONT}px system-ui, sans-serif`;
    pen.textAlign = "center";
    for (const [x, mb, look] of labels) {
      pen.fillStyle = data.colours[look >> 3][look & 7][1];
      pen.fillText(mb, x, top + BOX / 2 + 0.5);
    }
    if (hovered && hovered.run === run && hovered.rank === rank) {
      const x = toX(events.start[hovered.index]);
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.strokeRect(x, top - 1, Math.max(toX(events.end[hovered.index]) - x - 1, 2), BOX + 2);
      pen.lineWidth = 1;
    }
  };

  const drawMessages = (pen, run, first, last) => {
    const { kind, from, to, start, end, microbatch } = run.moves, seen = { F: [], B: [] };
    for (let i = 0; i < start.length && start[i] <= view.to; i++) {
      if (end[i] < view.from || Math.max(from[i], to[i]) < first || Math.min(from[i], to[i]) > last) continue;
      if (followed !== null && microbatch[i] !== followed) continue;
      seen[kind[i]].push(i);
    }
    if (seen.F.length + seen.B.length > MOST_MESSAGES) return false;
    const height = rowHeight(run);
    for (const name of ["F", "B"]) {
      pen.strokeStyle = data.colours[data.kinds.indexOf(name)][0][0];
      pen.globalAlpha = followed === null ? 0.65 : 1;
      pen.beginPath();
      for (const i of seen[name]) {
        const down = to[i] > from[i];
        pen.moveTo(toX(start[i]), GAP / 2 + from[i] * height + (down ? BOX : 0));
        pen.lineTo(toX(end[i]), GAP / 2 + to[i] * height + (down ? 0 : BOX));
      }
      pen.stroke();
    }
    pen.globalAlpha = 1;
    return true;
  };

  const drawRun = ({ run, canvas, hint }, { found }) => {
    const height = rowHeight(run), total = Math.max(run.ranks.length * height + 4, 10);
    const place = canvas.getBoundingClientRect();
    if (place.top > window.innerHeight + 200 || place.top + total < -200) {
      canvas.style.height = `${total}px`;
      return;
    }
    const pen = prepare(canvas, total), right = GUTTER + plotWidth();
    const first = Math.max(Math.floor(-place.top / height) - 2, 0);
    const last = Math.min(Math.ceil((window.innerHeight - place.top) / height) + 2, run.ranks.length - 1);
    for (let rank = first; rank <= last; rank++) {
      if (rank % 2) { pen.fillStyle = stripe; pen.fillRect(0, rank * height, right + RIGHT, height); }
    }
    pen.fillStyle = rule;
    for (const time of found) {
      const x = toX(time);
      if (x >= GUTTER) pen.fillRect(x - 0.5, 0, 1, total);
    }
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, plotWidth(), total);
    pen.clip();
    for (let rank = first; rank <= last; rank++) {
      const top = rank * height + GAP / 2;
      if (hasMemory(run)) drawCurve(pen, run, rank, top + BOX + 2);
      drawBoxes(pen, run, rank, top);
    }
    const drawn = !showMessages.checked || drawMessages(pen, run, first, last);
    const upright = (time, dash) => {
      pen.strokeStyle = ink;
      pen.setLineDash(dash);
      pen.beginPath();
      pen.moveTo(toX(time), 0);
      pen.lineTo(toX(time), total);
      pen.stroke();
      pen.setLineDash([]);
    };
    upright(run.makespan, []);
    if (data.bound) upright(data.bound * run.factor, [5, 4]);
    pen.restore();
    pen.textAlign = "left";
    for (let rank = first; rank <= last; rank++) {
      const top = rank * height + GAP / 2;
      pen.fillStyle = ink;
      pen.font = `${Math.min(12, BOX)}px system-ui, sans-serif`;
      pen.fillText(`rank ${rank}`, 20, top + BOX / 2 + 0.5);
      if (BOX + CURVE >= 30 && hasMemory(run)) {
        pen.fillStyle = soft;
        pen.font = "11px system-ui, sans-serif";
        pen.fillText(`idle ${(run.bubble[rank] * 100).toFixed(1)} %`, 20, top + BOX + CURVE / 2);
      }
    }
    hint.hidden = drawn;
  };

  const draw = () => {
    const axisMarks = marks();
    drawAxis(axisMarks);
    for (const section of sections) drawRun(section, axisMarks);
  };

  const move = (from, to) => {
    const least = longest / 2e4, size = Math.min(Math.max(to - from, least), whole.to - whole.from);
    const start = Math.min(Math.max(from, whole.from), whole.to - size);
    view = { from: start, to: start + size };
    redraw();
  };
  const zoom = (factor, about) => move(about - (about - view.from) * factor, about + (view.to - about) * factor);
  const pan = (share) => { const step = (view.to - view.from) * share; move(view.from + step, view.to + step); };
  const middle = () => (view.from + view.to) / 2;

  const find = (section, event) => {
    const place = section.canvas.getBoundingClientRect();
    const x = event.clientX - place.left, y = event.clientY - place.top, rank = Math.floor(y / rowHeight(section.run));
    const time = toTime(x), events = section.run.ranks[rank];
    if (!events || x < GUTTER) return { time, rank: -1, index: -1 };
    const slack = (view.to - view.from) / plotWidth(); // a pixel, so that thin boxes can be met
    const index = above(events.end, time - slack / 2);
    const inside = index < events.start.length && events.start[index] <= time + slack / 2;
    return { time, rank, index: inside && y - rank * rowHeight(section.run) <= BOX + GAP ? index : -1 };
  };

  const describe = (run, { time, rank, index }) => {
    const lines = [], events = run.ranks[rank];
    if (index >= 0) {
      const kind = events.kind[index], name = data.kinds[kind];
      lines.push(`${name} ${data.meaning[kind]}`);
      if (events.stage[index] >= 0) lines.push(`stage ${events.stage[index]}, microbatch ${events.microbatch[index]}, rank ${rank}`);
      const [start, end] = [events.start[index] / run.factor, events.end[index] / run.factor];
      lines.push(`from ${secondsText(start)}, takes ${secondsText(end - start)}`);
    } else {
      lines.push(`rank ${rank} at ${secondsText(Math.max(time, 0) / run.factor)}`);
    }
    const curve = run.memory[rank], point = above(curve.times, time) - 1;
    const size = point >= 0 ? curve.sizes[point] : run.state[rank];
    if (run.recorded) lines.push(`memory ${bytesText(size)}, of it state ${bytesText(run.state[rank])}`);
    return lines.join("\n");
  };

  const hide = () => {
    tip.style.display = "none";
    for (const { cursor } of sections) cursor.style.display = "none";
    if (hovered) { hovered = null; redraw(); }
  };
  const hover = (section, event) => {
    const at = find(section, event), place = section.canvas.getBoundingClientRect();
    if (at.rank < 0) return hide();
    for (const { cursor } of sections) {
      cursor.style.display = "block";
      cursor.style.left = `${event.clientX - place.left}px`;
    }
    tip.textContent = describe(section.run, at);
    tip.style.display = "block";
    const right = event.clientX + 14 + tip.offsetWidth > window.innerWidth;
    const low = event.clientY + 16 + tip.offsetHeight > window.innerHeight;
    tip.style.left = `${right ? event.clientX - 10 - tip.offsetWidth : event.clientX + 14}px`;
    tip.style.top = `${low ? event.clientY - 10 - tip.offsetHeight : event.clientY + 16}px`;
    const { run } = section;
    if (at.index < 0 && hovered) { hovered = null; redraw(); }
    if (at.index >= 0 && !(hovered && hovered.run === run && hovered.rank === at.rank && hovered.index === at.index)) {
      hovered = { run, rank: at.rank, index: at.index };
      redraw();
    }
  };

  for (const section of sections) {
    const { canvas } = section;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, view: { ...view }, moved: false };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("held");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return hover(section, event);
      if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
      if (drag.moved) {
        const step = (drag.x - event.clientX) / plotWidth() * (drag.view.to - drag.view.from);
        move(drag.view.from + step, drag.view.to + step);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) {
        const at = find(section, event), mb = at.index >= 0 ? section.run.ranks[at.rank].microbatch[at.index] : -1;
        followed = mb >= 0 && mb !== followed ? mb : null;
        redraw();
      }
      drag = null;
      canvas.classList.remove("held");
    });
    canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("held"); });
    canvas.addEventListener("pointerleave", hide);
    canvas.addEventListener("wheel", (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.002), toTime(event.clientX - canvas.getBoundingClientRect().left));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(sideways / plotWidth());
      else return; // an ordinary wheel scrolls the page
      event.preventDefault();
    }, { passive: false });
  }

  const keys = {
    "+": () => zoom(0.7, middle()), "=": () => zoom(0.7, middle()), "-": () => zoom(1 / 0.7, middle()),
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), 0: () => move(whole.from, whole.to),
    Escape: () => { followed = null; redraw(); },
    m: () => { showMessages.checked = !showMessages.checked; redraw(); },
    s: () => { ownScale.checked = !ownScale.checked; rescale(); redraw(); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
  });
  document.getElementById("in").addEventListener("click", keys["+"]);
  document.getElementById("out").addEventListener("click", keys["-"]);
  document.getElementById("fit").addEventListener("click", keys[0]);
  for (const box of [showMessages, showMemory]) box.addEventListener("change", redraw);
  ownScale.addEventListener("change", () => { rescale(); redraw(); });
  window.addEventListener("resize", redraw);
  window.addEventListener("scroll", redraw, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
  readColours();
  rescale();
  draw();
})();
