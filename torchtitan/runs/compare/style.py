"""Style of the comparison page: colours for light and dark, layout, and the few lines of script."""

# Okabe and Ito's colours, for any colour vision; yellow and black are changed for the page's background.
STYLE = """
:root { color-scheme: light dark; --paper:#fff; --ink:#1d2127; --soft:#5b6470; --line:#dfe3e8; --shade:#f5f6f8;
  --c0:#0072b2; --c1:#d55e00; --c2:#009e73; --c3:#cc79a7; --c4:#e69f00; --c5:#56b4e9; --c6:#9a8f00; --c7:#4b4b4b; }
@media (prefers-color-scheme: dark) { :root { --paper:#15181d; --ink:#e3e7ec; --soft:#9aa4b1; --line:#2f353d;
  --shade:#1d2127; --c0:#4a9fe0; --c1:#f07f2e; --c2:#1fbf92; --c3:#dd93bb; --c4:#f0b429; --c5:#8fd0f5; --c6:#f0e442;
  --c7:#b5b5b5; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.45 system-ui, sans-serif; }
header { position:sticky; top:0; z-index:2; background:var(--paper); border-bottom:1px solid var(--line);
  padding:10px 24px; }
main { max-width:1500px; margin:0 auto; padding:0 24px 48px; }
h1 { font-size:20px; margin:0 0 6px; } h2 { font-size:19px; margin:36px 0 8px; }
h3 { font-size:15px; margin:20px 0 6px; }
.legend { display:flex; flex-wrap:wrap; gap:6px 10px; align-items:center; }
.entry { font:inherit; color:inherit; background:var(--shade); border:1px solid var(--line); border-radius:6px;
  padding:2px 9px; cursor:pointer; }
.entry[aria-pressed=false] { opacity:.4; text-decoration:line-through; }
.axis-choice { margin-left:auto; color:var(--soft); } .axis-choice label { margin-left:8px; color:var(--ink); }
.note, figcaption small { color:var(--soft); font-size:13px; margin:4px 0 10px; max-width:110ch; }
.notes { border-left:3px solid var(--c4); padding:4px 12px 4px 28px; margin:14px 0; background:var(--shade); }
.named { white-space:nowrap; }
.missing { color:var(--soft); font-style:italic; }
.scroll + .scroll { margin-top:14px; }
.scroll { overflow-x:auto; width:fit-content; max-width:100%; border:1px solid var(--line); border-radius:6px; }
table { border-collapse:collapse; font-size:13px; font-variant-numeric:tabular-nums; }
th, td { padding:5px 10px; text-align:right; white-space:nowrap; border-bottom:1px solid var(--line); }
tr:last-child > * { border-bottom:0; } tbody tr:hover > * { background:var(--shade); }
thead th { font-weight:600; color:var(--soft); white-space:normal; vertical-align:bottom; min-width:6ch;
  hyphens:none; }
#configuration td { white-space:normal; overflow-wrap:anywhere; min-width:12ch; max-width:40ch; }
th:first-child { text-align:left; position:sticky; left:0; background:var(--paper); font-weight:600; }
details { margin-top:14px; } summary { cursor:pointer; color:var(--soft); } details .scroll { margin-top:8px; }
details td { text-align:left; white-space:normal; }
.panels { display:grid; grid-template-columns:repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap:18px 24px; }
.small-panels { display:grid; grid-template-columns:repeat(auto-fill, minmax(220px, 1fr)); gap:10px 16px; }
figure { margin:0; } figcaption small { display:block; margin:0; }
svg { display:block; width:100%; height:auto; overflow:visible; }
svg text { font:12px system-ui, sans-serif; fill:var(--soft); font-variant-numeric:tabular-nums; }
svg text.name { fill:var(--ink); } svg text.missing { font-style:italic; }
svg .grid { stroke:var(--line); fill:none; } svg .axis { stroke:var(--soft); fill:none; }
.swatch { display:inline-block; width:26px; height:12px; vertical-align:-1px; }
.line { stroke:var(--c); stroke-width:2; fill:none; stroke-linejoin:round; }
.faint .line, .faint circle { stroke-width:1; opacity:.38; }
.band { fill:var(--c); opacity:.17; } .bar { fill:var(--c); opacity:.75; } circle { fill:var(--c); }
.whisker { stroke:var(--c); stroke-width:1.6; fill:none; } .spread { stroke:var(--ink); fill:none; }
.d1 .line { stroke-dasharray:8 4; } .d2 .line { stroke-dasharray:2 3; } .d3 .line { stroke-dasharray:9 3 2 3; }
.frame { display:grid; grid-template-columns:repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap:14px; }
.frame[hidden] { display:none; } .frame img { width:100%; display:block; }
.frame .grid { border:1px dashed var(--line); padding:40% 8px; margin:0; text-align:center; }
#sample-step { width:min(420px, 60vw); vertical-align:middle; }
body:has(#by-images:checked) .over-steps, body:has(#by-steps:checked) .over-images { display:none; }
""" + "".join(f".c{n} {{ --c:var(--c{n}); }} " for n in range(8))

SCRIPT = """
document.querySelectorAll('.entry').forEach(entry => entry.onclick = () => {
  const shown = entry.getAttribute('aria-pressed') !== 'true';
  entry.setAttribute('aria-pressed', shown);
  document.body.classList.toggle('hide' + entry.dataset.group, !shown);
});
const slider = document.getElementById('sample-step');
if (slider) slider.oninput = () => {
  const frames = [...document.querySelectorAll('.frame')];
  frames.forEach((frame, number) => frame.hidden = number !== +slider.value);
  slider.nextElementSibling.value = (+frames[slider.value].dataset.step).toLocaleString('en');
};
"""


def group_rules(groups: int) -> str:
    """Rules by which the legend hides a group in the curves and in the loss by timestep."""
    return "".join(f".hide{n} :is(#curves, #bins) .g{n} {{ display:none; }} " for n in range(groups))
