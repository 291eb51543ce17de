// Brings the page's figures to life: each still picture is replaced by a plot when it comes near, and gets buttons that
// show and hide arms, and zoom. Without this script, and on paper, the still pictures stay.
(() => {
"use strict";

const root = document.documentElement;
const finger = matchMedia("(pointer: coarse)").matches;
const figures = [];

/* "$arm-3/0.16" -> the page's colour of the third arm, washed out; colours alone, never a label. */
function painted(node, key) {
  if (Array.isArray(node)) {
    const inside = /color$/.test(key || "") || typeof node[0] === "object"; // colours, or shapes; no numbers
    return inside ? node.map((item) => painted(item, key)) : node;
  }
  if (node && typeof node === "object") {
    return Object.fromEntries(Object.entries(node).map(([name, value]) => [name, painted(value, name)]));
  }
  const found = /color$/.test(key || "") && /^\$([a-z0-9-]+)(?:\/([\d.]+))?$/.exec(node);
  if (!found) return node;
  const colour = getComputedStyle(root).getPropertyValue("--" + found[1]).trim();
  if (!found[2]) return colour;
  const rgb = parseInt(colour.slice(1), 16);
  return `rgba(${rgb >> 16},${(rgb >> 8) & 255},${rgb & 255},${found[2]})`;
}

class Figure {
  constructor(host, plot) {
    this.host = host;
    this.plot = plot;
    this.hidden = new Set(plot.arms.filter((arm) => arm.aside).map((arm) => arm.name));
    this.layers = new Set();
    this.drawn = false;
    this.still = host.querySelector(".still");
    this.live = document.createElement("div");
    this.live.className = "live";
    this.live.hidden = true;
    this.live.setAttribute("role", "img");
    this.live.setAttribute("aria-label", host.dataset.alt);
    this.still.after(this.live);
    this.still.before(this.tools());
  }

  tools() {
    const bar = document.createElement("div");
    bar.className = "tools";
    bar.setAttribute("role", "toolbar");
    bar.setAttribute("aria-label", "What this figure shows");
    const arms = this.group(bar, "Arms");
    const aside = this.hidden.size ? this.group(bar, "At the baseline's best point") : null;
    this.armButtons = this.plot.arms.map((arm) => {
      const button = this.button(arm.aside ? aside : arms, arm.label, () => this.toggle(this.hidden, arm.name));
      const dot = document.createElement("span");
      dot.className = "dot";
      button.style.setProperty("--accent", `var(--arm-${arm.colour})`);
      button.prepend(dot);
      return [button, arm.name];
    });
    if (this.plot.arms.length > 2) {
      this.button(arms, "All", () => this.showOnly(this.plot.arms.map((arm) => arm.name)), "show all arms");
      this.button(arms, "None", () => this.showOnly([]), "hide all arms");
    }
    this.layerButtons = [];
    if (this.plot.layers.length) {
      const layers = this.group(bar, "Also shown");
      this.layerButtons = this.plot.layers.map((layer) => {
        const button = this.button(layers, layer.label, () => this.toggle(this.layers, layer.name));
        button.classList.add("layer");
        return [button, layer.name];
      });
    }
    const range = this.group(bar, "Range");
    for (const [sign, words, change] of [
      ["+", "zoom in", (low, high) => [low + (high - low) / 4, high - (high - low) / 4]],
      ["−", "zoom out", (low, high) => [low - (high - low) / 2, high + (high - low) / 2]],
      ["‹", "move left", (low, high) => [low - (high - low) / 4, high - (high - low) / 4]],
      ["›", "move right", (low, high) => [low + (high - low) / 4, high + (high - low) / 4]],
    ]) this.button(range, sign, () => this.zoom(change), words).classList.add("zoom");
    this.button(range, "Reset", () => this.reset(), "reset the range");
    this.press();
    return bar;
  }

  group(bar, label) {
    const group = document.createElement("div");
    group.className = "group";
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", label);
    bar.append(group);
    return group;
  }

  button(group, text, act, label) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(text);
    if (label) button.setAttribute("aria-label", label);
    if (label) button.title = label;
    button.addEventListener("click", () => { this.draw(); act(); });
    group.append(button);
    return button;
  }

  toggle(set, name) {
    if (!set.delete(name)) set.add(name);
    this.refresh();
  }

  showOnly(names) {
    this.hidden = new Set(this.plot.arms.map((arm) => arm.name).filter((name) => !names.includes(name)));
    this.refresh();
  }

  press() {
    for (const [button, name] of this.armButtons) button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    for (const [button, name] of this.layerButtons) button.setAttribute("aria-pressed", String(this.layers.has(name)));
  }

  shown(trace) {
    const { arm, layer } = trace.meta;
    return !this.hidden.has(arm) && (layer === "" || this.layers.has(layer));
  }

  refresh() {
    this.press();
    Plotly.restyle(this.live, { visible: this.plot.traces.map((trace) => this.shown(trace)) });
  }

  layout() {
    const small = root.clientWidth < 640;
    const layout = painted(this.plot.layout);
    return {
      ...layout,
      height: Math.round(layout.height * (small ? 0.85 : 1)),
      margin: { l: 8, r: 12, t: 10, b: 8 },
      showlegend: false,
      hovermode: "closest",
      dragmode: finger ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      uirevision: "kept",
      font: { family: "system-ui, sans-serif", size: small ? 11 : 12.5, color: painted("$ink", "color") },
      hoverlabel: painted({ bgcolor: "$card", bordercolor: "$soft", font: { color: "$ink" }, align: "left" }),
    };
  }

  traces() {
    return this.plot.traces.map((trace) => ({ ...painted(trace), visible: this.shown(trace) }));
  }

  draw() {
    if (this.drawn) return;
    this.drawn = true;
    this.live.hidden = false;
    this.still.hidden = true;
    const ways = { responsive: true, displayModeBar: false, doubleClick: "reset", showTips: false };
    Plotly.newPlot(this.live, this.traces(), this.layout(), ways);
  }

  repaint() {
    if (this.drawn) Plotly.react(this.live, this.traces(), this.layout());
  }

  reset() {
    const changes = {};
    for (const [name, axis] of Object.entries(this.plot.layout)) {
      if (!(name in this.live._fullLayout)) continue; // nothing is drawn on it: no arm is compared, say
      if (/axis/.test(name)) changes[axis.range ? `${name}.range` : `${name}.autorange`] = axis.range ? [...axis.range] : true;
    }
    Plotly.relayout(this.live, changes);
  }

  /* The steps asked for, and the heights of what is shown there. */
  zoom(change) {
    const axis = this.live._fullLayout.xaxis;
    const range = change(...axis.range);
    const changes = { "xaxis.range": range };
    for (const name of Object.keys(this.plot.layout).filter((key) => /^yaxis/.test(key))) {
      let low = Infinity, high = -Infinity;
      for (const trace of this.plot.traces) {
        if (!this.shown(trace) || (trace.yaxis || "y").replace("y", "yaxis") !== name) continue;
        trace.x.forEach((x, i) => {
          const place = axis.type === "log" ? Math.log10(x) : x;
          if (x === null || place < range[0] || place > range[1]) return;
          low = Math.min(low, trace.y[i]);
          high = Math.max(high, trace.y[i]);
        });
      }
      if (low <= high) {
        const margin = 0.06 * (high - low) || 0.01;
        changes[`${name}.range`] = [low - margin, high + margin];
      }
    }
    Plotly.relayout(this.live, changes);
  }
}

for (const source of document.querySelectorAll("script[data-plot]")) {
  const host = document.getElementById(source.dataset.plot);
  if (host) figures.push(new Figure(host, JSON.parse(source.textContent)));
}
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    near.unobserve(entry.target);
    figures.find((figure) => figure.host === entry.target).draw();
  }
}, { rootMargin: "400px" });
for (const figure of figures) near.observe(figure.host);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures.forEach((figure) => figure.repaint()));
})();
