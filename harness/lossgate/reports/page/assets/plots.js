// SPDX-License-Identifier: Apache-2.0
// Draws plots by Vega-Lite. The library is started when the first plot is drawn.

const startLibrary = once(async () => {
  document.head.append(make('script', { textContent: await unpack('library') }));
});

function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    paper: colour('paper'), ink: colour('ink'), muted: colour('muted'), line: colour('line'),
    band: colour('band'), mark: colour('mark'), bad: colour('bad'),
  };
}

// A figure: a sentence, a plot, and its numbers as a table. The plot is drawn when it is seen.
function figure(sentence, plot, numbers, note = plot.logarithmic ? LOGARITHMIC : '') {
  const chart = make('div', { className: 'chart' });
  chart.plot = { sentence, specification: plot.specification || plot };
  return make('figure', {}, make('figcaption', { className: 'note' }, sentence, note && ` ${note}`), chart,
    folded('as a table', numbers));
}

const LOGARITHMIC = 'The axis is logarithmic on both sides of 0.';

async function draw(chart) {
  const width = Math.floor(chart.clientWidth);
  if (!width) return;
  await startLibrary();
  const colours = palette();
  const { sentence, specification } = chart.plot;
  chart.plot.width = width;
  const font = getComputedStyle(document.body).fontFamily;
  const labels = { labelColor: colours.muted, labelFontSize: 12, titleFontSize: 12, labelFont: font, titleFont: font };
  const config = {
    background: null, font, view: { stroke: null }, text: { color: colours.ink, fontSize: 12.5 },
    axis: { ...labels, grid: false, domain: false, tickColor: colours.line, titleColor: colours.muted, titleFontWeight: 400 },
  };
  const whole = {
    $schema: 'https://vega.github.io/schema/vega-lite/v6.json', description: sentence, width,
    autosize: { type: 'fit-x', contains: 'padding' }, padding: { left: 0, right: 8, top: 4, bottom: 0 },
    config, ...specification(colours, width),
  };
  if (chart.plot.view) chart.plot.view.finalize();
  // Expressions are interpreted: the page's policy forbids to evaluate text as a script.
  chart.plot.view = await window.vegaEmbed(chart, whole, {
    mode: 'vega-lite', renderer: 'svg', ast: true, actions: false, tooltip: false, defaultStyle: false,
  });
}

// Draws the plots of a part of the page that are visible and not drawn yet, or all if they must be redrawn.
async function drawAll(part, again = false) {
  for (const chart of part.querySelectorAll('.chart')) {
    if (chart.closest('details:not([open])')) continue;
    if (again || chart.plot.width !== Math.floor(chart.clientWidth)) await draw(chart);
  }
}

const forget = (part) => {
  for (const chart of part.querySelectorAll('.chart')) if (chart.plot.view) chart.plot.view.finalize();
};
