// SPDX-License-Identifier: Apache-2.0
// The sections of an opened cell. Each takes the details of the cell, and returns null if they have nothing for it.

const PER_DECADE = 4;

function section(heading, ...content) {
  return make('section', {}, make('h3', {}, heading), ...content);
}

function reasonsSection(cell) {
  const { reasons, blockers, excused, mde, required } = cell.details;
  const verdict = make('p', { className: `verdict ${cell.state.replace(' ', '-')}` }, `The cell ${VERDICTS[cell.state]}.`);
  const notes = [];
  if (cell.details.problems !== undefined) {
    notes.push(`${counted(cell.details.problems, 'problem')}, ${counted(cell.details.comparisons, 'comparison')}.`);
    if (cell.state !== 'disagrees') notes.push(detected(mde));
  }
  const broken = cell.details.broken ? text(cell.details.broken) : '';
  if (broken) notes.unshift(`${broken[0].toUpperCase()}${broken.slice(1)}.`);
  if (cell.details.excluded) notes.push(`The candidate is never given these, as it declares: ${texts(cell.details.excluded).join('; ')}.`);
  if (cell.details.alike) notes.push(`No problem distinguished these: ${texts(cell.details.alike).join('; ')}.`);
  if (excused) notes.push(`The policy excuses it: ${excused}`);
  if (required === 0) {
    const disagrees = (blockers || []).some(([kind]) => ['disagree', 'promise broken'].includes(text(kind)));
    notes.push(`No rule of the policy asks for it.${disagrees ? ' A kernel that is wrong closes the gate whether a rule asks for the cell or not.' : ''}`);
  }
  const kept = (blockers || []).map(([, message, where]) => (text(where) ? `${text(message)} (${text(where)})` : text(message)));
  return make('section', { 'aria-label': 'Verdict' }, verdict, notes.map((note) => make('p', {}, quote(note))),
    reasons ? points(texts(reasons)) : null,
    isOfSmallest(cell.details) ? make('p', { className: 'note' }, OF_SMALLEST) : null,
    kept.length ? [make('h3', { className: 'later' }, 'What keeps the gate closed'), points(kept)] : null);
}

// Whether the reasons are about the smallest problem, instead of the problems that were drawn at first.
function isOfSmallest({ reasons, failure, outputs }) {
  return Boolean(failure && outputs) && (reasons || []).some((reason) => failure[2].includes(reason));
}

const OF_SMALLEST = 'These numbers are of the smallest problem that disagrees. Plots and tables further below have those of the original problems, before one was made smaller, so their numbers differ.';

const VERDICTS = {
  agrees: 'agrees', disagrees: 'disagrees', inconclusive: 'is inconclusive', missing: 'is missing',
  'promise broken': 'breaks a promise', 'known failure': 'disagrees as a known failure does',
};

function knownSection({ details: { known } }) {
  if (!known) return null;
  const said = known[1] ? 'It still disagrees in the same outputs.' : 'It does not disagree as its frozen example did.';
  return section('Known failure', make('p', {}, quote(text(known[0])), `. ${said}`),
    make('p', { className: 'note' }, `Its example has the digest ${text(known[2]).slice(0, 16)}.`));
}

function failureSection({ details: { failure, faults, reasons, explains, replay } }) {
  const said = new Set(texts(reasons));
  const others = [...new Set([...texts(failure ? failure[2] : []), ...texts(faults)])].filter((finding) => !said.has(finding));
  if (!failure) return others.length ? section('Findings', points(others)) : null;
  const [problem, description, , calls, statistics] = failure;
  const tried = calls ? ` ${counted(calls, 'problem was', 'problems were')} tried to make it smaller.` : '';
  return section('The smallest problem that disagrees', make('p', {}, quote(text(description)), `.${tried}`),
    others.length ? points(others) : null,
    statistics.length ? points(texts(statistics)) : null,
    text(explains) ? make('p', {}, quote(`Of the cause: ${text(explains)}.`)) : null,
    text(replay) ? [make('p', { className: 'note' }, 'This command judges it again:'), command(text(replay))] : null,
    folded('the problem as JSON', problemText(problem)));
}

function command(line) {
  const button = make('button', { type: 'button', className: 'plain' }, 'Copy');
  const code = make('code', {}, quote(line));
  button.addEventListener('click', () => copy(line, code, button));
  return make('div', { className: 'command' }, make('pre', {}, code), button, make('span', { className: 'unseen', role: 'status' }));
}

async function copy(line, code, button) {
  let done = false;
  try {
    await navigator.clipboard.writeText(line);
    done = true;
  } catch {
    getSelection().selectAllChildren(code);
    done = document.execCommand('copy');
  }
  button.textContent = done ? 'Copied' : 'Press Ctrl+C';
  button.nextElementSibling.textContent = done ? 'The command was copied.' : 'The command is selected.';
}

// A problem as JSON, a line for each field.
function problemText(number) {
  const lines = Object.entries(data.problems[number]).map(([name, value]) => ` ${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  return make('pre', {}, make('code', {}, quote(`{\n${lines.join(',\n')}\n}`)));
}

function pooledSection({ details: { outputs } }) {
  const pooled = (outputs || []).filter((output) => output[1]);
  const silent = (outputs || []).filter((output) => !output[1]).map((output) => text(output[0]));
  if (!outputs) return null;
  const names = pooled.map((output) => text(output[0]));
  const shares = pooled.map(([, [, scale, limit]]) => shareOf(scale, limit));
  const outside = shares.filter((share) => Math.abs(share) > 1).length;
  const sentence = outside
    ? `${counted(outside, 'output is', 'outputs are')} outside of the band that rounding explains.`
    : 'Every output is inside the band that rounding explains.';
  const notes = pooled.map(([, [, scale, limit]], i) =>
    `${number(scale)}, limit \u00b1${number(limit)}${Math.abs(shares[i]) > 1 ? ', outside' : ''}`);
  const rows = pooled.map(([, [problems, scale, limit]], i) =>
    [names[i], counted(problems, 'problem'), number(scale), `\u00b1${number(limit)}`, Math.abs(shares[i]) > 1 ? 'outside' : 'inside']);
  return section('Pooled scale',
    make('p', { className: 'note' }, 'By how much each output is too large: 0.01 means by 1%. It is measured over all original problems together.'),
    pooled.length ? figure(sentence, pooledChart(names, notes, shares), table(['output', '#problems', '#scale', '#limit', 'place'], rows)) : null,
    silent.length ? make('p', {}, `No problem says anything about the scale of ${silent.join(', ')}.`) : null);
}

function errorsSection({ details: { outputs } }) {
  const compared = (outputs || []).filter((output) => output[2].length || output[3].length);
  if (!compared.length) return null;
  const worst = (output) => Math.max(0, ...output[2].map((h) => (h[2] === null ? Infinity : h[2])));
  const sorted = [...compared].sort((a, b) => worst(b) - worst(a));
  return section('Errors against their limits',
    make('p', { className: 'note' }, 'How many problems had which share of the limit. A bar to the right of the limit disagrees. The problems are the original ones.'),
    sorted.map((output, i) => outputErrors(output, worst(output), i === 0)));
}

function outputErrors(output, worst, open) {
  const [name, , found, faults, missed, blind] = output;
  const histograms = found.map(([statistic, problems, largest, over, first, counts]) =>
    ({ statistic: text(statistic), problems, largest, over, first, counts }));
  const over = histograms.filter((h) => h.over).map((h) => h.statistic);
  const sentence = over.length ? `Over the limit: ${over.join(', ')}.` : 'No statistic is over its limit.';
  const note = (h) => (h.over ? `${h.over} of ${h.problems} over, largest ${number(h.largest)}` : `largest ${number(h.largest)}`);
  const rows = histograms.map((h) => [h.statistic, h.problems, h.over, number(h.largest)]);
  return make('details', { className: 'output', open },
    summaryOf(name, `at most ${number(worst === Infinity ? null : worst)} of a limit`),
    faults.length ? points(texts(faults)) : null,
    histograms.length ? figure(sentence,
      histogramChart(histograms.map((h) => h.statistic), histograms.map(note), histograms, PER_DECADE),
      table(['statistic', '#problems', '#over the limit', '#largest share'], rows)) : null,
    missed.length ? make('p', {}, `Planted errors that were not always rejected: ${missed.map(([what, share]) => `${text(what)} (${number(100 * share)}%)`).join(', ')}.`) : null,
    blind.length ? make('p', {}, `Accepted although the limits say otherwise, which is a fault of lossgate: ${texts(blind).join(', ')}.`) : null);
}

function summaryOf(name, note) {
  return make('summary', {}, quote(text(name)), ' ', make('span', { className: 'note' }, note));
}

function coverageSection({ details: { coverage, problems } }) {
  if (!coverage) return null;
  const missed = coverage.filter(([, n, required]) => required && !n).map(([goal]) => text(goal));
  const sentence = missed.length ? `Not reached: ${missed.join(', ')}.` : 'Every required goal is reached.';
  const names = coverage.map(([goal]) => text(goal));
  const notes = coverage.map(([, n, required]) => (n ? `${n} of ${problems}` : required ? 'not reached' : 'none'));
  const rows = coverage.map(([goal, n, required]) => [text(goal), n, required ? 'yes' : 'no']);
  return section('Coverage', figure(sentence, coverageChart(names, notes, coverage.map(([, n]) => n), problems || 1),
    table(['goal', '#problems', 'required'], rows)));
}

function mutantsSection({ details: { killed, surviving, equivalent } }) {
  if (killed === undefined) return null;
  const lines = [`${counted(killed, 'option mutant was', 'option mutants were')} killed.`];
  if (surviving) lines.push(`${counted(surviving.length, 'one survives', 'survive')}: ${texts(surviving).join('; ')}.`);
  else lines.push('None survives that a problem could kill.');
  if (equivalent) lines.push(`No problem can kill these: ${texts(equivalent).join('; ')}.`);
  return section('Mutants', lines.map((line) => make('p', {}, quote(line))));
}

function mistakesSection({ details: { shown, unseen, small } }) {
  if (!shown && !unseen) return null;
  const lines = [`The problems would have shown ${counted(shown || 0, 'known mistake', 'known mistakes')}.`];
  if (unseen) lines.push(`These would have passed: ${texts(unseen).join('; ')}.`);
  if (small) lines.push(`These change too little to be shown: ${texts(small).join('; ')}.`);
  return section('Known mistakes', lines.map((line) => make('p', {}, quote(line))));
}

function worstSection({ details: { worst } }) {
  if (!worst) return null;
  const rows = worst.map(([output, statistic, value, limit]) =>
    [text(output), text(statistic), number(value), number(limit), number(Math.abs(shareOf(value, limit)))]);
  return section('Worst examples', table(['output', 'statistic', '#value', '#limit', '#share'], rows),
    worst.map(([output, statistic, , , problem]) =>
      folded(make('span', {}, 'the problem of ', quote(`${text(output)}, ${text(statistic)}`)), problemText(problem))));
}

function propertiesSection({ details: { properties } }) {
  if (!properties) return null;
  const broken = properties.filter((held) => held[5]).map((held) => text(held[0]));
  const sentence = broken.length ? `Broken: ${broken.join(', ')}.` : 'Every property that was checked is kept.';
  const rows = properties.map(([name, problems, comparisons, margin, seconds, isBroken, exempt]) => {
    const kept = problems ? 'kept' : 'no problem says anything about it';
    const state = isBroken ? 'broken' : text(exempt) ? `exempt: ${text(exempt)}` : kept;
    return [text(name), state, problems, comparisons, comparisons ? number(margin) : '', number(seconds)];
  });
  return section('Properties beside agreement', make('p', {}, quote(sentence)),
    folded('all properties', table(['property', 'state', '#problems', '#compared', '#share of a limit', '#seconds'], rows)));
}

function resourcesSection({ details: { resources } }) {
  if (!resources) return null;
  const rows = Object.entries(resources).flatMap(([name, numbers]) =>
    Object.entries(numbers).map(([what, value]) => [name, what, number(value, 4)]));
  return section('Resources', table(['of', 'what', '#amount'], rows));
}

function trendSection({ details: { trend, moments } }) {
  if (!trend) return null;
  const charts = trend.outputs.map((output, i) => outputTrend(output, trend.times, i === 0)).filter(Boolean);
  const shown = trend.times.length;
  const said = moments > shown ? `The newest ${shown} of ${counted(moments, 'run')}, oldest first.` : `${counted(moments, 'run')}, oldest first.`;
  const verdicts = trend.times.map((time, i) => [utc(text(time)), text(trend.commits[i]) || 'unknown', text(trend.verdicts[i])]);
  return section('Trend of the pooled scale', make('p', { className: 'note' }, said), charts,
    folded('the verdict of each run', table(['time (UTC)', 'commit', 'verdict'], verdicts)));
}

function outputTrend([name, scales, limits], times, open) {
  const moments = times.map((time, i) => ({ time: text(time), scale: scales[i], limit: limits[i] }))
    .filter((moment) => moment.scale !== null);
  if (moments.length < 2) return null;
  const outside = moments.filter((m) => Math.abs(m.scale) > m.limit).length;
  const sentence = outside
    ? `outside of its band in ${outside} of ${counted(moments.length, 'run')}`
    : `inside its band in all ${moments.length} runs`;
  const rows = moments.map((m) => [utc(m.time), number(m.scale), `\u00b1${number(m.limit)}`, Math.abs(m.scale) > m.limit ? 'outside' : 'inside']);
  return make('details', { className: 'output', open }, summaryOf(name, outside ? counted(outside, 'run') + ' outside' : 'always inside'),
    figure(`Its pooled scale was ${sentence}.`, trendChart(moments), table(['time (UTC)', '#scale', '#limit', 'place'], rows)));
}

function originSection({ details, spec }) {
  const run = details.run === undefined ? {} : data.runs[details.run];
  const versions = Object.entries(run.versions || {}).map(([name, version]) => `${name} ${version}`);
  const settings = Object.entries(run.settings || {}).filter(([, v]) => v !== null && !(Array.isArray(v) && !v.length));
  const facts = {
    spec,
    source: details.source !== undefined && text(details.source),
    'source digest': details.digest !== undefined && text(details.digest).slice(0, 16),
    commit: run.commit && `${run.commit.slice(0, 12)}${run.modified ? ', with files that differ from it' : ''}`,
    versions: versions.join(', '),
    host: run.host,
    settings: settings.map(([name, value]) => `${name} ${value}`).join(', '),
    run: run.run && `${run.run}${run.part ? `, part ${run.part}` : ''}`,
    time: details.time !== undefined && text(details.time),
    seconds: details.seconds !== undefined && number(details.seconds),
    line: details.line,
  };
  const found = Object.entries(facts).filter(([, value]) => value);
  return found.length ? section('Where it comes from', make('dl', { className: 'facts' },
    found.map(([name, value]) => [make('dt', {}, name), make('dd', {}, quote(value))]))) : null;
}

const SECTIONS = [
  reasonsSection, knownSection, failureSection, pooledSection, trendSection, errorsSection, coverageSection,
  mutantsSection, mistakesSection, propertiesSection, worstSection, resourcesSection, originSection,
];
