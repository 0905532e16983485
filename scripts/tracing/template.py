"""The page's frame: style, legend and script. `page.py` puts its parts in the places of their @names@."""

from __future__ import annotations

TEMPLATE = """\
<!doctype html>
<html lang="en" data-colour="stayed">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Which tokens are kept</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif;
  --kept: 255 140 0; --gone: 205 205 205; --line: 0 90 200; --edge: #bbb }
@media (prefers-color-scheme: dark) { :root { --gone: 70 70 70; --line: 120 180 255; --edge: #555 } }
body { max-width: 62rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem }
h3 { font-size: 1rem; margin-bottom: .3rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: .95rem/1.7 ui-monospace, monospace; margin: 0;
  max-height: 26rem; overflow-y: auto; border: 1px solid var(--edge); border-radius: .4rem; padding: .6rem }
fieldset { border: 1px solid var(--edge); border-radius: .4rem; margin: 1rem 0 }
ul { padding-left: 1.2rem }
.bar { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .2rem .8rem;
  align-items: center; background: Canvas; padding: .5rem 0 }
.bar input { flex: 1 1 12rem; min-height: 2rem }
.bar output { min-width: 19rem; font-variant-numeric: tabular-nums }
canvas, svg { display: block; width: 100%; border: 1px solid var(--edge); border-radius: .4rem;
  box-sizing: border-box }
canvas { height: 12rem; image-rendering: pixelated; cursor: crosshair }
svg { height: 7rem } polyline { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round }
polyline.raw { stroke: rgb(var(--line)); stroke-width: 1 }
polyline.ema { stroke: rgb(var(--kept)); stroke-width: 3 }
span.raw { color: rgb(var(--line)) } span.ema { color: rgb(190 90 0); font-weight: 700 }
.k { padding: 0 .3rem }
.small, .about { font-size: .875rem; margin: .3rem 0 }
.cut { font-style: italic; opacity: .8 }
@levels@
.e { text-decoration: line-through 1px; opacity: .5 }
[data-colour] span.later { background: none; opacity: .2 }
.now { outline: 2px solid rgb(var(--line)) }
</style>
</head>
<body>
<h1>Which tokens are kept</h1>
<fieldset><legend>Colour</legend>
<label><input type="radio" name="colour" value="stayed" checked> how long a token stayed</label><br>
<label><input type="radio" name="colour" value="utility"> rank of its utility, the last one it had</label><br>
from least to most: @scale@
</fieldset>
<ul>
<li><span class="e">Struck out</span>: evicted by the step that is set. The model no longer sees it.</li>
<li><span class="later">Pale</span>: a token of the answer that is not there yet.</li>
<li><span class="now">Framed</span>: came or went in just that step. The first one evicts most of the prompt,
which is not framed.</li>
</ul>
<noscript><p>Without scripts the page shows the end of each run, and no picture of the cache.</p></noscript>
@sections@
@more@
<script type="application/json" id="data">@data@</script>
<script>
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const colours = getComputedStyle(document.documentElement);
const colour = (name, alpha = 1) => `rgb(${colours.getPropertyValue(name)} / ${alpha})`;
const redraws = [];
document.querySelectorAll('section').forEach(section => {
  const run = data[section.dataset.run], find = what => section.querySelector(what);
  const slider = find('input'), output = find('output'), canvas = find('canvas'), about = find('.about');
  const tokens = [...section.querySelectorAll('pre span[title]')].map(node => ({
    node, since: Number(node.dataset.since || 0), gone: Number(node.dataset.gone ?? Infinity)
  }));
  const rows = run.picture, rowOf = step => (step - 1) / Math.max(1, run.steps - 1) * (rows.length - 1);
  const draw = step => {
    const c = canvas.getContext('2d'), scale = 4;
    canvas.width = rows[0].length; canvas.height = rows.length * scale;
    const fill = (x, y, width, height, style) => { c.fillStyle = style; c.fillRect(x, y, width, height); };
    rows.forEach((row, y) => [...row].forEach((share, x) => {
      if (share === '.') return;
      fill(x, y * scale, 1, scale, colour('--gone'));
      if (share !== '0') fill(x, y * scale, 1, scale, colour('--kept', 0.3 + 0.7 * share / 9));
    }));
    if (step > 0) fill(0, Math.round(rowOf(step)) * scale + 1, canvas.width, 2, colour('--line'));
  };
  const show = () => {
    const step = Number(slider.value);
    for (const t of tokens) {
      t.node.classList.toggle('later', t.since > step);
      t.node.classList.toggle('e', t.since <= step && t.gone <= step);
      t.node.classList.toggle('now', step > 0 && (t.since === step || (t.gone === step && step > 1)));
    }
    const where = step + ' of ' + run.steps + ': ' + run.kept[step].toLocaleString('en') + ' of ' +
      run.total[step].toLocaleString('en') + ' tokens are kept';
    output.textContent = where; slider.setAttribute('aria-valuetext', 'step ' + where);
    draw(step);
  };
  slider.addEventListener('input', show);
  canvas.addEventListener('click', event => {
    const y = event.offsetY / canvas.clientHeight;
    slider.value = Math.min(run.steps, 1 + Math.floor(y * run.steps)); show();
  });
  const tell = event => { if (event.target.title) about.textContent = event.target.title; };
  find('pre').addEventListener('click', tell); find('pre').addEventListener('pointerover', tell);
  redraws.push(show); show();
});
document.querySelectorAll('input[name=colour]').forEach(radio => radio.addEventListener('change', () => {
  document.documentElement.dataset.colour = radio.value;
}));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => redraws.forEach(draw => draw()));
</script>
</body>
</html>
"""
