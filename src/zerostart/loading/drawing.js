// A map of a page, to walk through: a window of cells, summed up to ROWS x COLUMNS. drawing.py draws the first.
"use strict";
const ROWS = 64, COLUMNS = 96, SHADES = 12;
const decimal = n => {
  if (n < 1000) return n + " bytes";
  const units = ["kB", "MB", "GB", "TB", "PB"];
  let u = 0;
  for (n /= 1000; n >= 1000 && u < 4; u++) n /= 1000;
  return n.toFixed(1) + " " + units[u];
};
const cut = (begin, end, most) => {
  const many = Math.min(most, end - begin);
  return Array.from({length: many + 1}, (_, i) => begin + Math.floor(i * (end - begin) / many));
};
for (const figure of document.querySelectorAll("figure[data-map]")) {
  const map = JSON.parse(document.getElementById(figure.dataset.map).textContent);
  const wide = map.columns.length, plot = figure.querySelector(".plot"), svg = plot.querySelector("svg");
  const whole = [0, map.rows.length, 0, wide];
  let seen = whole, down, across, here = [0, 0];
  const sum = (key, r, c) => {
    let total = 0;
    for (let y = down[r]; y < down[r + 1]; y++)
      for (let x = across[c]; x < across[c + 1]; x++) total += map[key][y * wide + x];
    return total;
  };
  const between = (labels, a, b) => {
    const [first, last] = [labels[a][0], labels[b - 1][1]];
    return first === last ? first : first + " to " + last;
  };
  const tell = () => {
    const [r, c] = here, y = down[r], x = across[c], at = y * wide + x;
    let words = between(map.rows, y, down[r + 1]) + ", " + between(map.columns, x, across[c + 1]) + ": " +
      decimal(sum("bytes", r, c)) + " (" + sum("bytes", r, c).toLocaleString("en") + ")";
    if (map.reads) words += " in " + sum("reads", r, c).toLocaleString("en") + " reads";
    if (map.end && down[r + 1] - y === 1 && across[c + 1] - x === 1 && map.end[at])
      words += ", within bytes " + [map.begin[at], map.end[at]].map(n => n.toLocaleString("en")).join(" to ");
    figure.querySelector("output").textContent = words;
  };
  const draw = () => {
    down = cut(seen[0], seen[1], ROWS);
    across = cut(seen[2], seen[3], COLUMNS);
    const rows = down.length - 1, columns = across.length - 1, cells = [];
    for (let r = 0; r < rows; r++) cells.push(across.slice(1).map((_, c) => sum("bytes", r, c)));
    const most = Math.max(1, ...cells.flat()), paths = {};
    cells.forEach((row, r) => row.forEach((n, c) => {
      const shade = Math.max(1, Math.min(SHADES, Math.floor(Math.sqrt(n / most) * SHADES)));
      if (n) paths[shade] = (paths[shade] || "") + `M${c} ${r}h1v1H${c}z`;
    }));
    here = [Math.min(here[0], rows - 1), Math.min(here[1], columns - 1)];
    svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    svg.innerHTML = Object.entries(paths).map(([s, d]) => `<path class="s${s}" d="${d}"/>`).join("") +
      `<path class="here" d="M${here[1]} ${here[0]}h1v1h-1z"/>`;
    tell();
  };
  const within = (at, size, most) => {
    const begin = Math.max(0, Math.min(most - size, Math.round(at - size / 2)));
    return [begin, begin + size];
  };
  const zoom = way => {
    const at = [(down[here[0]] + down[here[0] + 1]) / 2, (across[here[1]] + across[here[1] + 1]) / 2];
    const by = way === "in" ? 0.5 : 2, tall = whole[1];
    const sizes = [seen[1] - seen[0], seen[3] - seen[2]].map(n => Math.max(1, Math.ceil(n * by)));
    seen = way === "all" ? whole :
      [...within(at[0], Math.min(tall, sizes[0]), tall), ...within(at[1], Math.min(wide, sizes[1]), wide)];
    down = cut(seen[0], seen[1], ROWS);
    across = cut(seen[2], seen[3], COLUMNS);
    const place = (cuts, value) => Math.max(0, cuts.findIndex(c => c > value) - 1);
    here = [place(down, at[0]), place(across, at[1])];
    draw();
  };
  const move = (r, c) => {
    here = [Math.max(0, Math.min(down.length - 2, r)), Math.max(0, Math.min(across.length - 2, c))];
    draw();
  };
  plot.addEventListener("click", event => {
    const box = svg.getBoundingClientRect();
    move(Math.floor((event.clientY - box.top) / box.height * (down.length - 1)),
      Math.floor((event.clientX - box.left) / box.width * (across.length - 1)));
  });
  plot.addEventListener("dblclick", () => zoom("in"));
  plot.addEventListener("keydown", event => {
    const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
    const ways = {"+": "in", "=": "in", "-": "out", "0": "all"};
    if (event.key in steps) move(here[0] + steps[event.key][0], here[1] + steps[event.key][1]);
    else if (event.key in ways) zoom(ways[event.key]);
    else return;
    event.preventDefault();
  });
  for (const button of figure.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => zoom(button.dataset.zoom));
  figure.querySelector(".tools").hidden = false;
  draw();
}
// A page that is written anew while something runs: how old it is.
for (const note of document.querySelectorAll("[data-written]")) {
  const words = note.textContent;
  const tell = () => {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - note.dataset.written));
    const age = seconds < 120 ? seconds + " s" : Math.round(seconds / 60) + " min";
    note.textContent = words + ", " + age + " ago" +
      (seconds < 300 ? "" : ": the run has ended without a word, or is at something long, such as a checkpoint");
  };
  tell();
  setInterval(tell, 1000);
}
