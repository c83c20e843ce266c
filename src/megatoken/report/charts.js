// Shows the values under the pointer on line charts. Neither "less than" nor an ampersand may stand here, as in page.js.

// As many digits as the drawing resolves.
const shown = (value, span) => value.toLocaleString("en", {maximumFractionDigits: Math.min(9, Math.max(0, Math.ceil(-Math.log10(span / 500))))});

// A panel: its axes, and its curves as lists of points in units of the canvas.
function panel(group) {
  const [left, right, low, high] = group.dataset.x.split(" ").map(Number);
  const [floor, top, most] = group.dataset.y.split(" ").map(Number);
  const across = x => low + (x - left) * (high - low) / (right - left);
  const curves = [...group.querySelectorAll("polyline")].map(curve => ({
    name: curve.dataset.name,
    points: curve.getAttribute("points").split(" ").map(point => point.split(",").map(Number)),
  }));
  const marks = [...group.querySelectorAll("line[data-name]")].map(mark => [mark.dataset.name, Number(mark.getAttribute("x1"))]);
  return {
    ...group.dataset, left, right, top, floor, curves, marks,
    xText: x => group.dataset.doubling ? shown(2 ** across(x), 2 ** high) : shown(across(x), high - low),
    yText: y => shown((floor - y) * most / (floor - top), most),
  };
}

// The height of a curve at x; undefined before its first and after its last point.
function height(points, x) {
  const after = points.findIndex(point => point[0] >= x);
  if (after === -1) return undefined;
  const [x1, y1] = points[after];
  if (x1 === x) return y1;
  if (after === 0) return undefined;
  const [x0, y0] = points[after - 1];
  return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

function element(name, style, parent) {
  const made = document.createElementNS(parent.namespaceURI, name);
  made.setAttribute("class", style);
  parent.append(made);
  return made;
}

for (const svg of document.querySelectorAll("figure svg")) {
  const groups = svg.querySelectorAll("g.plot");
  if (groups.length === 0) continue;
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.parentNode.append(tip);
  const panels = [...groups].map(panel);
  const rule = element("line", "pointer", svg), ring = element("circle", "found", svg);
  const hide = () => { tip.hidden = true; rule.setAttribute("visibility", "hidden"); ring.setAttribute("visibility", "hidden"); };
  hide();

  // The points nearest to the pointer of a chart that draws its points.
  const nearest = (x, y) => {
    const found = panels.flatMap(one => one.curves.flatMap(curve => curve.points.map(([a, b]) => ({one, curve, a, b, far: Math.hypot(a - x, b - y)}))));
    const {one, curve, a, b} = found.reduce((best, each) => best.far > each.far ? each : best);
    ring.setAttribute("cx", a); ring.setAttribute("cy", b); ring.setAttribute("r", 5);
    ring.setAttribute("visibility", "visible");
    return [a, [`${one.xText(a)} ${one.across}`, `${curve.name}: ${one.yText(b)} ${one.unit}`]];
  };
  // The heights of all curves at one place, and the marks next to it.
  const heights = x => {
    const {left, right, top, xText, across, marks} = panels[0];
    const at = Math.min(right, Math.max(left, x));
    rule.setAttribute("x1", at); rule.setAttribute("x2", at);
    rule.setAttribute("y1", top); rule.setAttribute("y2", panels.at(-1).floor);
    rule.setAttribute("visibility", "visible");
    const lines = panels.flatMap(one => one.curves.map(curve => [one, curve, height(curve.points, at)]))
      .filter(([, , y]) => y !== undefined).map(([one, curve, y]) => `${curve.name}: ${one.yText(y)} ${one.unit}`);
    const near = marks.filter(([, place]) => 4 >= Math.abs(place - at)).map(([name]) => name);
    return [at, [`${xText(at)} ${across}`, ...lines, ...near]];
  };

  const show = event => {
    const box = svg.getBoundingClientRect(), figure = svg.parentNode.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / scale, y = (event.clientY - box.top) / scale;
    const [at, lines] = panels[0].dots ? nearest(x, y) : heights(x);
    tip.replaceChildren(...lines.map(line => { const row = document.createElement("div"); row.textContent = line; return row; }));
    tip.hidden = false;
    const middle = box.left - figure.left + at * scale;
    const aside = middle > figure.width / 2 ? middle - tip.offsetWidth - 12 : middle + 12;
    tip.style.left = `${Math.max(4, Math.min(aside, figure.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${box.top - figure.top + panels[0].top * scale}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
