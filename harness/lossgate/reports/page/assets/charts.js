// SPDX-License-Identifier: Apache-2.0
// The specifications of the plots. All but the trend are made of rows: a label, a note, and marks below them.

const ROW = 46;

const x = (field, rest) => ({ field, type: 'quantitative', ...rest });

function rows(count, layers) {
  const y = (field) => ({ field, type: 'quantitative', axis: null, scale: { domain: [0, count], reverse: true, nice: false } });
  return { height: count * ROW, layer: layers(y) };
}

// The label of each row and its note, at the left and right end of the line above the marks.
function captions(names, notes, colours, width, y) {
  const values = names.map((label, i) => ({ label, note: notes[i], at: i + 0.28 }));
  const place = { y: y('at') };
  return [
    { data: { values }, mark: { type: 'text', align: 'left', baseline: 'middle', limit: width * 0.55, clip: false },
      encoding: { ...place, x: { value: 0 }, text: { field: 'label', type: 'nominal' } } },
    { data: { values }, mark: { type: 'text', align: 'right', baseline: 'middle', color: colours.muted, limit: width * 0.6 },
      encoding: { ...place, x: { value: 'width' }, text: { field: 'note', type: 'nominal' } } },
  ];
}

// Histograms of the shares of their limits that statistics had.
function histogramChart(names, notes, histograms, perDecade) {
  const [low, high] = [-3.25, Math.max(1, ...histograms.map((h) => Math.ceil((h.first + h.counts.length) / perDecade)))];
  const bars = [];
  histograms.forEach((h, i) => {
    const most = Math.max(...h.counts);
    h.counts.forEach((n, j) => {
      const right = (h.first + j) / perDecade;
      if (n) bars.push({ from: 10 ** (right - 1 / perDecade), to: 10 ** right, top: i + 0.95 - (0.48 * n) / most, foot: i + 0.95, over: right > 0 });
    });
  });
  const lines = histograms.map((_, i) => ({ from: 10 ** low, to: 10 ** high, at: i + 0.95 }));
  const scale = { type: 'log', domain: [10 ** low, 10 ** high], nice: false };
  const ticks = [0.001, 0.01, 0.1, 1, 10, 100, 1e3, 1e4, 1e5, 1e6].filter((tick) => tick <= 10 ** high);
  const axis = {
    values: high > 3 ? ticks.filter((t) => Math.log10(t) % 2 === 0 || t === 1) : ticks,
    labelExpr: "datum.value == 1 ? 'limit' : datum.value < 1 ? format(datum.value, '~g') : datum.value < 1e5 ? format(datum.value, ',') : format(datum.value, '.0e')",
    title: 'share of the limit', tickSize: 4, labelFlush: 20,
  };
  return (colours, width) => rows(histograms.length, (y) => [
    { data: { values: lines }, mark: { type: 'rule', color: colours.line },
      encoding: { x: x('from', { scale, axis }), x2: { field: 'to' }, y: y('at') } },
    { data: { values: bars }, mark: { type: 'rect', stroke: colours.paper, strokeWidth: 1 },
      encoding: { x: x('from', { scale }), x2: { field: 'to' }, y: y('top'), y2: { field: 'foot' },
        color: { field: 'over', type: 'nominal', legend: null, scale: { domain: [false, true], range: [colours.mark, colours.bad] } } } },
    { data: { values: lines.map((line, i) => ({ from: 1, top: i + 0.46, foot: i + 0.95 })) },
      mark: { type: 'rule', color: colours.ink, strokeWidth: 1.5 },
      encoding: { x: x('from', { scale }), y: y('top'), y2: { field: 'foot' } } },
    ...captions(names, notes, colours, width, y),
  ]);
}

// The pooled scale of each output in its band. Scales are in units of the band's half width.
function pooledChart(names, notes, shares) {
  const largest = Math.max(...shares.map((s) => Math.min(Math.abs(s), 1e9)));
  const far = largest > 4;
  const end = far ? 10 ** Math.ceil(Math.log10(largest * 1.2)) : largest > 1.8 ? 5 : 2;
  const scale = { domain: [-end, end], nice: false, ...(far ? { type: 'symlog', constant: 0.1 } : {}) };
  const axis = {
    values: far ? [-end, -1, 1, end] : [-end, -1, 0, 1, end], tickSize: 4, labelFlush: 30,
    labelExpr: "datum.value == 0 ? '0' : (datum.value < 0 ? '\u2212' : '+') + (abs(datum.value) == 1 ? 'limit' : format(abs(datum.value), ',') + ' limits')",
    title: null, labelOverlap: false,
  };
  const values = shares.map((s, i) => ({
    low: -1, high: 1, zero: 0, share: Math.max(-1e9, Math.min(1e9, s)), top: i + 0.5, foot: i + 0.92, at: i + 0.71,
    place: Math.abs(s) > 1 ? 'outside' : 'inside',
  }));
  const specification = (colours, width) => ({ data: { values }, ...rows(values.length, (y) => [
    { mark: { type: 'rect', color: colours.band },
      encoding: { x: x('low', { scale, axis }), x2: { field: 'high' }, y: y('top'), y2: { field: 'foot' } } },
    ...['low', 'high'].map((edge) => ({ mark: { type: 'rule', color: colours.muted, strokeDash: [3, 3] },
      encoding: { x: x(edge, { scale }), y: y('top'), y2: { field: 'foot' } } })),
    { mark: { type: 'rule', color: colours.muted, opacity: 0.6 },
      encoding: { x: x('zero', { scale }), y: y('top'), y2: { field: 'foot' } } },
    { mark: { type: 'point', filled: true, size: 90, opacity: 1 },
      encoding: { x: x('share', { scale }), y: y('at'), ...insideOrOutside(colours) } },
    ...captions(names, notes, colours, width, y),
  ]) });
  return { specification, logarithmic: far };
}

// A circle inside the band and a diamond outside of it.
function insideOrOutside(colours) {
  const domain = ['inside', 'outside'];
  return {
    shape: { field: 'place', type: 'nominal', legend: null, scale: { domain, range: ['circle', 'diamond'] } },
    color: { field: 'place', type: 'nominal', legend: null, scale: { domain, range: [colours.mark, colours.bad] } },
  };
}

// How many problems reach each goal.
function coverageChart(names, notes, counts, problems) {
  const scale = { domain: [0, problems], nice: false };
  const values = counts.map((n, i) => ({ zero: 0, all: problems, n, top: i + 0.55, foot: i + 0.85 }));
  return (colours, width) => ({ data: { values }, ...rows(values.length, (y) => [
    { mark: { type: 'rect', color: null, stroke: colours.line, fillOpacity: 0 },
      encoding: { x: x('zero', { scale, axis: null }), x2: { field: 'all' }, y: y('top'), y2: { field: 'foot' } } },
    { mark: { type: 'rect', color: colours.mark },
      encoding: { x: x('zero', { scale }), x2: { field: 'n' }, y: y('top'), y2: { field: 'foot' } } },
    ...captions(names, notes, colours, width, y),
  ]) });
}

// The runs that the axis names: the first, the last, and one between if their names do not touch.
function trendTicks(last, letters, width) {
  const middle = Math.round(last / 2);
  const label = letters * 7 + 8;
  const unit = (width - 72) / (last + 0.6);
  const fits = Math.min(middle, last - middle) * unit > 1.5 * label;
  return fits ? [0, middle, last] : [0, last];
}

// The pooled scale of an output and its band, run by run.
function trendChart(moments) {
  const limits = moments.map((m) => m.limit).filter((limit) => limit > 0).sort((a, b) => a - b);
  const limit = limits[Math.floor(limits.length / 2)] || 1e-9;
  const farthest = Math.max(...moments.map((m) => Math.max(Math.abs(m.scale), m.limit)));
  const wide = farthest > 5 * limit;
  const scale = wide
    ? { type: 'symlog', constant: limit / 10, domain: [-farthest * 1.3, farthest * 1.3], nice: false }
    : { domain: [-farthest * 1.15, farthest * 1.15], nice: false };
  const values = moments.map((m, i) => ({
    run: i, low: -m.limit, high: m.limit, scale: m.scale, place: Math.abs(m.scale) > m.limit ? 'outside' : 'inside',
  }));
  const last = moments.length - 1;
  const { names, day } = momentNames(moments.map((m) => m.time));
  const yAxis = { values: wide ? [-farthest, -limit, limit, farthest] : [-limit, 0, limit], title: null,
    labelExpr: "datum.value == 0 ? '0' : format(datum.value, '.1e')", tickSize: 4, minExtent: 56, maxExtent: 56, labelOverlap: true };
  const specification = (colours, width) => {
    const steps = trendTicks(last, Math.max(...names.flatMap((name) => name.split(' ').map((line) => line.length))), width);
    const run = x('run', {
      scale: { domain: [-0.3, last + 0.3], nice: false },
      axis: { values: steps, labelExpr: "split(names[datum.value], ' ')", title: day || null, labelFlush: 40, labelOverlap: true, tickSize: 4 },
    });
    const y = (field) => x(field, { scale, axis: yAxis });
    return {
      height: 130, data: { values }, params: [{ name: 'names', value: names }],
      layer: [
        { mark: { type: 'area', color: colours.band }, encoding: { x: run, y: y('low'), y2: { field: 'high' } } },
        ...['low', 'high'].map((edge) => ({ mark: { type: 'line', color: colours.muted, strokeDash: [3, 3], strokeWidth: 1 },
          encoding: { x: run, y: y(edge) } })),
        { mark: { type: 'line', color: colours.mark, strokeWidth: 1.5 }, encoding: { x: run, y: y('scale') } },
        { mark: { type: 'point', filled: true, size: 60, opacity: 1 }, encoding: { x: run, y: y('scale'), ...insideOrOutside(colours) } },
      ],
    };
  };
  return { specification, logarithmic: wide };
}
