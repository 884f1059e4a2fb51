// Draws one dashboard as Grafana does: its panel components, and its queries, asked of Prometheus.
// Address: ?dashboard=NAME&prometheus=URL&from=SECONDS&to=SECONDS&scrape=SECONDS.
import {
  applyFieldOverrides, createTheme, dateTime, DataFrame, Field, FieldConfigSource, FieldType, getFieldDisplayValues,
  rangeUtil, Registry, ThemeContext, toDataFrame,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

const asked = Object.fromEntries(new URLSearchParams(location.search));
const [from, to, scrape] = [asked.from, asked.to, asked.scrape].map(Number);
const ends = { from: dateTime(from * 1000), to: dateTime(to * 1000) };
const range = { ...ends, raw: ends };
const theme = createTheme({ colors: { mode: 'dark' } });
const [WIDTH, MARGIN, CELL, GAP] = [innerWidth, 16, 30, 8];
const timeZone = 'utc';
const keep = (text: string) => text;

// Grafana's grid: 24 columns, rows of 30 pixels, 8 pixels between panels.
function place({ x, y, w, h }: any) {
  const column = (WIDTH - 2 * MARGIN + GAP) / 24;
  return { left: MARGIN + x * column, top: y * (CELL + GAP), width: w * column - GAP, height: h * (CELL + GAP) - GAP };
}

async function ask(panel: any): Promise<DataFrame[]> {
  const points = Math.floor(place(panel.gridPos).width);
  const step = rangeUtil.calculateInterval(range, points, `${scrape}s`).intervalMs / 1000;
  const values: Record<string, string> = {
    __rate_interval: `${Math.max(step + scrape, 4 * scrape)}s`,
    __interval: `${step}s`,
    __range: `${to - from}s`,
    model: '.*',
    instance: '.*',
  };
  const frames = await Promise.all(panel.targets.map(async (target: any) => {
    const query = target.expr.replace(/\$(\w+)/g, (_: string, name: string) => values[name]);
    const when = target.instant
      ? { time: `${to}` }
      : { start: `${Math.floor(from / step) * step}`, end: `${Math.floor(to / step) * step}`, step: `${step}` };
    const path = target.instant ? 'query' : 'query_range';
    const reply = await fetch(`${asked.prometheus}/api/v1/${path}?${new URLSearchParams({ query, ...when })}`);
    const told = await reply.json();
    if (told.status !== 'success') {
      throw new Error(`${panel.title}: ${told.error}`);
    }
    return told.data.result.map((series: any) => toFrame(series, target, step));
  }));
  return frames.flat();
}

function toFrame(series: any, target: any, step: number): DataFrame {
  const points: Array<[number, string]> = series.values ?? [series.value];
  const name = target.legendFormat.replace(/{{\s*(\w+)\s*}}/g, (_: string, label: string) => series.metric[label] ?? '');
  // Grafana leaves a gap where a value is not a number.
  const numbers = points.map(([, text]) => (Number.isFinite(Number(text)) ? Number(text) : null));
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: points.map(([time]) => time * 1000), config: { interval: step * 1000 } },
      { name: 'Value', type: FieldType.number, values: numbers, labels: series.metric, config: { displayNameFromDS: name } },
    ],
  });
}

// Knows every setting of a panel's fields, as a panel's editor does. None is for the axis of time.
function registryOf({ defaults, overrides }: FieldConfigSource) {
  const item = (path: string, id: string, isCustom: boolean) =>
    ({ id, path, isCustom, name: id, process: (value: any) => value, shouldApply: isShown }) as any;
  const isShown = (field: Field) => field.type !== FieldType.time;
  const own = Object.keys(defaults).filter((name) => name !== 'custom');
  const ids = new Set(overrides.flatMap((rule) => rule.properties.map((property) => property.id)));
  const custom = Object.keys(defaults.custom ?? {}).map((name) => `custom.${name}`);
  return new Registry(() => [...new Set([...own, ...custom, ...ids])].map((id) =>
    id.startsWith('custom.') ? item(id.slice(7), id, true) : item(id, id, false)));
}

function Content({ panel, frames, width, height }: any) {
  const { fieldConfig, options } = panel;
  if (frames.length === 0) {
    return <div className="empty">{fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  const data = applyFieldOverrides({
    data: frames, fieldConfig, theme, timeZone, replaceVariables: keep, fieldConfigRegistry: registryOf(fieldConfig),
  });
  if (panel.type === 'timeseries') {
    return (
      <TimeSeries frames={data} structureRev={1} timeRange={range} timeZone={timeZone} width={width} height={height}
        legend={options.legend} />
    );
  }
  if (panel.type !== 'stat') {
    throw new Error(`panels of type ${panel.type} are not drawn`);
  }
  const values = getFieldDisplayValues({
    fieldConfig, reduceOptions: options.reduceOptions, replaceVariables: keep, theme, data, timeZone,
  });
  return (
    <VizRepeater source={values} getValues={() => values} width={width} height={height} renderCounter={1}
      orientation={options.orientation}
      renderValue={({ value, width, height, count }: any) => (
        <BigValue value={value.display} count={count} width={width} height={height} theme={theme}
          colorMode={options.colorMode} graphMode={options.graphMode} justifyMode={options.justifyMode}
          textMode={options.textMode} />
      )} />
  );
}

function Page({ dashboard, found }: any) {
  const clock = (seconds: number) => dateTime(seconds * 1000).utc().format('YYYY-MM-DD HH:mm');
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }: any) => gridPos.y + gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <header>
        <h1>{dashboard.title}</h1>
        {dashboard.templating.list.slice(1).map((each: any) => (
          <span key={each.name}><b>{each.label}</b>{each.current.text}</span>
        ))}
        <time>{clock(from)} to {clock(to)} UTC</time>
      </header>
      <main style={{ height: bottom * (CELL + GAP) }}>
        {dashboard.panels.map((panel: any) => {
          const at = place(panel.gridPos);
          if (panel.type === 'row') {
            return <div className="group" key={panel.id} style={at}>{panel.title}</div>;
          }
          return (
            <section key={panel.id} style={at}>
              <PanelChrome title={panel.title} description={panel.description} width={at.width} height={at.height}>
                {(width, height) => <Content panel={panel} frames={found[panel.id]} width={width} height={height} />}
              </PanelChrome>
            </section>
          );
        })}
      </main>
    </ThemeContext.Provider>
  );
}

async function draw() {
  const dashboard = await (await fetch(`dashboards/${asked.dashboard}.json`)).json();
  const found: Record<number, DataFrame[]> = {};
  for (const panel of dashboard.panels.filter(({ type }: any) => type !== 'row')) {
    found[panel.id] = await ask(panel);
  }
  createRoot(document.getElementById('root')!).render(<Page dashboard={dashboard} found={found} />);
  await document.fonts.ready;
  document.body.dataset.drawn = 'yes';
}

draw();
